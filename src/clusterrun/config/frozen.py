"""The configuration as it is written into a run directory and read back. Nothing composes Hydra after submission."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf._utils import OmegaConfDumper
from omegaconf.errors import OmegaConfBaseException

from clusterrun.config.schema import RunConfig
from clusterrun.errors import ConfigError


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """libyaml's, 20 times as fast as what OmegaConf writes with, and quoting what OmegaConf would not read as text."""


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML; ``load`` gives an equal value back."""
    return Writer().to_yaml(config)


class Writer:
    """Writes many configurations that have much in common, as those of a sweep: equal sections are rendered once."""

    def __init__(self) -> None:
        self._sections: dict[str, str] = {}

    def to_yaml(self, config: RunConfig) -> str:
        """As the function of this name."""
        return "".join(self._section({key: value}) for key, value in to_dict(config).items())

    def _section(self, section: dict[str, Any]) -> str:
        known = repr(section)
        if known not in self._sections:
            text = yaml.dump(_literal(section), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            self._sections[known] = str(text)
        return self._sections[known]


def load(path: Path) -> RunConfig:
    """Read a frozen configuration. Raises ConfigError when it is not one."""
    try:
        raw = OmegaConf.load(path)
        if not raw:
            raise ValueError("it is empty")
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), raw)
        loaded = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: can't be read as a run's configuration: {str(error).splitlines()[0]}") from None
    assert isinstance(loaded, RunConfig)
    return loaded


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain values, enums by name."""
    plain: dict[str, Any] = _plain(config)
    return plain


def _literal(value: Any) -> Any:
    """Interpolations are resolved by now: what still looks like one is meant word for word, so it is escaped."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value
