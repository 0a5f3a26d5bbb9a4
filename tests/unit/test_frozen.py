"""The configuration as a file in the run directory: what is written is what the job reads."""

from __future__ import annotations

import dataclasses
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.schema import ClusterConfig, RunConfig, SlurmConfig, TrainConfig
from clusterrun.errors import ConfigError

# "???" means "must be given" in OmegaConf, so a composed configuration can't hold it.
texts = (
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
    | st.from_regex(r"\\{0,3}(\$\{)?[a-z:]{0,4}\}?\\{0,2}", fullmatch=True)
    | st.sampled_from(
        ["null", "~", "yes", "off", "1e5", "0x1f", "1:30", "01", "1_000", ".5", "inf", "- x", "a: b", "'"]
    )
).filter(lambda text: text != "???")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen") / "config.yaml"


def _again(config: RunConfig, file: Path) -> RunConfig:
    file.write_text(frozen.to_yaml(config), encoding="utf-8")
    return frozen.load(file)


@settings(deadline=None)
@given(
    st.lists(texts, max_size=3), st.dictionaries(texts, texts, max_size=3), st.dictionaries(texts, scalars, max_size=3)
)
def test_round_trip_of_free_text(file: Path, args: list[str], env: dict[str, str], extra: dict[str, Any]) -> None:
    config = RunConfig(
        cluster=ClusterConfig(env=env, slurm=SlurmConfig(extra=extra, setup=args)),
        train=TrainConfig(args=args, task_args={"a": [extra, args], **extra}),
    )
    assert _again(config, file) == config


def _filled(schema: type) -> st.SearchStrategy[Any]:
    """Any value of a schema dataclass."""
    return st.builds(schema, **{name: _values(hint) for name, hint in typing.get_type_hints(schema).items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint):
        return _filled(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return st.lists(_values(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(texts, scalars if inner[1] is Any else _values(inner[1]), max_size=2)
    if type(None) in inner:
        return st.none() | _values(next(part for part in inner if part is not type(None)))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: texts,
    }
    return simple[hint]


@settings(deadline=None)
@given(_filled(RunConfig))
def test_round_trip_of_every_setting(file: Path, config: RunConfig) -> None:
    assert _again(config, file) == config


def test_a_composed_configuration(place: Path, file: Path) -> None:
    arguments = ["cluster=a100_nvswitch", "train=gpt", r"cluster.slurm.setup=['export A=\${HOME}/x']", "seed=3"]
    config = compose(arguments)
    assert config.cluster.slurm.setup == ["export A=${HOME}/x"]  # for the job's shell, not for us
    assert _again(config, file) == config


def test_plain_values(place: Path) -> None:
    plain = frozen.to_dict(compose(["cluster=lab"]))
    assert plain["cluster"]["executor"] == "slurm"
    assert plain["cluster"]["interconnect"]["inter_node"] == "ethernet"
    assert plain.keys() == {f.name for f in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "word\n", "seed: x\n", "nosuch: 1\n", "a: [\n", "train: 3\n", "seed: ${x}\n"]
)
def test_what_is_no_configuration(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml: can't be read") as refused:
        frozen.load(file)
    assert "\n" not in str(refused.value)


def test_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        frozen.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        frozen.load(tmp_path / "config.yaml")
