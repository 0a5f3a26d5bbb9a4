"""Hydra: where configs are looked for, how overrides are read, and how its errors become one clear line."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from clusterrun.config.schema import RunConfig
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.errors import ConfigError, choices, nearest

CONFIG_NAME = "clusterrun"  # not "config": a user's own ./conf/config.yaml must not shadow ours
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError)
GROUPS = ("cluster", "train", "data", "checkpoint", "preflight")
PACKAGED = "clusterrun.conf"
DEFAULT_CLUSTER = "laptop"  # as in conf/clusterrun.yaml


class UserConfigs(SearchPathPlugin):
    """Puts the user's directories before the packaged one, so that they can shadow as well as add."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for directory in reversed(user_config_dirs()):
            search_path.prepend(provider="clusterrun-user", path=f"file://{directory.resolve()}")


def normalise(overrides: Sequence[str]) -> list[str]:
    """Spare users two of Hydra's distinctions.

    ``+cluster=x`` and ``cluster=x`` mean the same, so for every group. In free dictionaries (``train.task_args``,
    ``cluster.env``, ``cluster.slurm.extra``) a new key needs no ``+``.
    """
    groups = "|".join(GROUPS)
    if not overrides:
        return []
    for item in overrides:
        if re.fullmatch(rf"[+~]*({groups})=(null|true|false|[\d.]+)|~({groups})|=.*", item, flags=re.IGNORECASE):
            raise ConfigError(f"{item}: a group takes the name of one of its configs, e.g. cluster=laptop")
    free = "|".join(re.escape(path) for path in _free_dictionaries(RunConfig))
    return [re.sub(rf"^({free})(?=[.=])", r"++\1", re.sub(rf"^\+({groups})=", r"\1=", item)) for item in overrides]


def _free_dictionaries(schema: type, prefix: str = "") -> list[str]:
    """Dotted paths of the dict-typed fields of a schema."""
    found: list[str] = []
    for name, hint in typing.get_type_hints(schema).items():
        if typing.get_origin(hint) is dict:
            found.append(prefix + name)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += _free_dictionaries(hint, f"{prefix}{name}.")
    return found


def _register() -> None:
    ConfigStore.instance().store(name="schema", node=RunConfig)
    Plugins.instance().register(UserConfigs)


@contextmanager
def _hydra_errors_raised() -> Iterator[None]:
    """Hydra prints and exits by itself unless told otherwise; here its errors are to be explained, not printed."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def run_hydra_app(arguments: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Hydra's whole command line (overrides, --cfg, --multirun, --info, --shell-completion) over our configs.

    ``task`` is called with each composed configuration. Raises ConfigError for anything the user got wrong.
    """
    _register()
    _check_flags(arguments)
    composed: list[DictConfig] = []

    def collect(config: DictConfig) -> None:
        name_cluster(config, HydraConfig.get().runtime.choices["cluster"])
        composed.append(config)

    saved = sys.argv
    sys.argv = ["clusterrun", *normalise(arguments)]
    try:
        with _hydra_errors_raised():
            hydra.main(config_path=f"pkg://{PACKAGED}", config_name=CONFIG_NAME, version_base="1.3")(collect)()
    except _HYDRA_ERRORS as error:
        raise explain(error) from None
    finally:
        sys.argv = saved
    for config in composed:
        task(config)


def name_cluster(config: DictConfig, choice: str) -> None:
    """A cluster's YAML need not repeat the name that its file has."""
    if not config.cluster.name:
        config.cluster.name = choice.rpartition("/")[2]


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that Hydra does not know, in one line where its parser would print its whole usage."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            get_args_parser().parse_args(list(arguments))
    except SystemExit as end:
        if end.code:
            raise ConfigError(f"{said.getvalue().strip().rpartition('error: ')[2]}; see clusterrun --help") from None
        raise


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration for a list of overrides, as the command line would compose it.

    Raises:
        ConfigError: with the field, the value, and what would be right.
    """
    _register()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module(PACKAGED, version_base="1.3"):
            items = normalise(overrides)
            composed = hydra.compose(CONFIG_NAME, overrides=items)
    except _HYDRA_ERRORS as error:
        raise explain(error) from None
    chosen = [item.partition("=")[2] for item in items if item.startswith("cluster=")]
    name_cluster(composed, chosen[-1] if chosen else DEFAULT_CLUSTER)
    return to_run_config(composed)


def to_run_config(composed: DictConfig) -> RunConfig:
    """Typed and resolved. Raises ConfigError for keys nobody reads (``+key=value`` lets them in)."""
    try:
        _refuse_unknown(composed, RunConfig, "")
        loaded = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error) from None
    assert isinstance(loaded, RunConfig)
    return loaded


def _refuse_unknown(node: DictConfig, schema: type, path: str) -> None:
    hints = typing.get_type_hints(schema)
    for key in node:
        full = path + str(key)
        if key not in hints:
            raise _unknown(full)
        if dataclasses.is_dataclass(hints[key]):
            _refuse_unknown(node[key], hints[key], f"{full}.")


def explain(error: Exception) -> ConfigError:
    """One line for an error of Hydra or OmegaConf: what, where, and what to do."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        known = [o for o in error.options or [] if o != CONFIG_NAME]
        searched = ", ".join([*map(str, user_config_dirs()), "the packaged configs"])
        listed = f" Known: {choices(known)}" if known else ""
        return ConfigError(
            f"{group or 'config'}={option}: no such config.{nearest(option, known)}{listed} (looked in {searched})"
        )
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return _unreadable(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r}: can't be read as key=value ({_first_line(error)}); "
            "quote values with spaces or commas, e.g. 'train.args=[--epochs,3]'"
        )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) and error.__cause__ else error
    text = f"{error}\n{cause}"
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(f"{_full_key(cause) or _first_line(cause)}: must be given")
    ambiguous = re.match(r"Ambiguous value for argument '([^']*)'", str(error))
    if ambiguous:
        key, _, value = ambiguous.group(1).partition("=")
        return ConfigError(
            f"{key}={value}: several values; sweep over them with -m, or write a list as '{key}=[{value}]'"
        )
    unknown = re.search(r"Key '([^']+)' (?:not in '|is not in struct)", text)
    if unknown or isinstance(cause, ConfigKeyError):
        return _unknown(_full_key(error, cause) or (unknown.group(1) if unknown else "?"))
    key = _full_key(error, cause)
    message = _first_line(cause)
    bad_enum = re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", message)
    if bad_enum:
        known = bad_enum.group(2).split(", ")
        value = bad_enum.group(1)
        return ConfigError(f"{key}={value}: must be one of {', '.join(known)}.{nearest(value, known)}")
    override = re.match(r"Error merging override \+*(.+)", str(error))
    in_file = re.match(r"In '([^']+)': \w+ raised while composing config:\n(.+)", str(error))
    subject = override.group(1) if override else key
    if in_file:
        message, subject = in_file.group(2), f"{key or 'settings'} (in {in_file.group(1)}.yaml)"
    for pattern, advice in _PLAIN_WORDS:
        if re.match(pattern, message):
            value = re.match(r"Value '(.*)' (?:of type|is not)", message)
            shown = f"{subject}={value.group(1)}" if value and not override else subject
            return ConfigError(f"{shown}: {advice}")
    return ConfigError(f"{subject}: {message}" if subject and subject not in message else message)


def _unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> ConfigError:
    """A user's file that is no YAML, or no text."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or "bad YAML"
        return ConfigError(f"{mark.name}, line {mark.line + 1}: {problem}; correct the YAML there")
    bad = [p for d in user_config_dirs() for p in sorted(d.rglob("*.yaml")) if p.is_file() and not _is_text(p)]
    return ConfigError(f"{bad[0] if bad else 'a configuration file'}: is not UTF-8 text; save it as UTF-8")


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _unknown(key: str) -> ConfigError:
    parent, _, leaf = key.rpartition(".")
    known = fields_of(parent)
    inside = f" in {parent}" if parent else ""
    listed = f" Known{inside}: {choices(known)}" if known else ""
    return ConfigError(f"{key}: no such setting.{nearest(leaf, known)}{listed}")


def fields_of(path: str) -> list[str]:
    """Names of the settings below a dotted path of RunConfig; empty for free dictionaries and unknown paths."""
    here: Any = RunConfig
    for part in path.split(".") if path else []:
        if not dataclasses.is_dataclass(here):
            return []
        hints = typing.get_type_hints(here)
        if part not in hints:
            return []
        here = hints[part]
    return [f.name for f in dataclasses.fields(here)] if dataclasses.is_dataclass(here) else []


# What OmegaConf says of a value, and what a user can do about it.
_PLAIN_WORDS = (
    (r"field '.*' is not Optional", "null is not allowed, it needs a value"),
    (r"Value '.*' of type '\w+' could not be converted to Integer", "must be a whole number"),
    (r"Value '.*' of type '\w+' could not be converted to Float", "must be a number"),
    (r"Value '.*' is not a valid bool", "must be true or false"),
    (r"Invalid value assigned: \w+ is not a ListConfig", "must be a list, e.g. [a,b]"),
    (r"Cannot assign \w+ to Dict", "must be a mapping, e.g. {a: 1}"),
    (r"Merge error: \w+ is not a subclass of \w+", "must be a mapping, e.g. {name: value}"),
    (r".* does not support deletion", "can't be removed; set it to another value, or to null where that is allowed"),
)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _full_key(*errors: BaseException) -> str:
    for error in errors:
        full = getattr(error, "full_key", None)
        if full:
            return str(full)
        found = re.search(r"full_key: (\S+)", str(error)) or re.search(
            r"Could not (?:override|append to|delete) '([^']+)'", str(error)
        )
        if found:
            return found.group(1)
    return ""
