"""A configuration as the overrides that give it again: how a report says which command repeats a run."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.schema import RunConfig
from clusterrun.config.validate import validated
from clusterrun.errors import ClusterrunError

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:@%+\-]*")
_WORDS = {"null", "true", "false", "inf", "nan"}
# Left out: where runs lie depends on the environment, and does not change what is computed.
_SHARED_DIR = ("cluster.", "shared_dir")


def as_overrides(config: RunConfig) -> list[str]:
    """Groups by their names, then what differs from them. Checked by composing it again, as far as that is possible."""
    groups = {"cluster": config.cluster.name, "train": config.train.name, "data": config.data.kind.value}
    chosen: list[str] = []
    for group, name in groups.items():
        try:
            compose([*chosen, f"{group}={name}", *(["train.script=x"] if name == "script" else [])])
        except ClusterrunError:  # composed from something else; then every difference is spelled out
            continue
        chosen.append(f"{group}={name}")
    base = frozen.to_dict(compose([*chosen, *(["train.script=x"] if "train=script" in chosen else [])]))
    return [*chosen, *_differences(frozen.to_dict(_own(config)), base, "")]


def gives_again(config: RunConfig, overrides: list[str]) -> bool:
    """Whether composing the overrides here and now gives the same configuration."""
    try:
        composed = _own(compose(overrides))
        composed.cluster.shared_dir = config.cluster.shared_dir
        again = frozen.to_dict(validated(composed))
    except ClusterrunError:
        return False
    return again == frozen.to_dict(_own(config))


def _own(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, run_id=None, wait=None)


def _differences(wanted: dict[str, Any], base: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key, value in wanted.items():
        if (prefix, key) == _SHARED_DIR:
            continue
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            found += _differences(value, base[key], f"{prefix}{key}.")
        elif key not in base or value != base[key]:
            found.append(f"{prefix}{key}={spelled(value)}")
    return found


def spelled(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{spelled(k)}:{spelled(v)}' for k, v in value.items())}}}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # A backslash counts as one unless it stands before a quote or at the end (Hydra, "Quoted values").
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'".replace("${", "\\${")
