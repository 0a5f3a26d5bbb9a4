"""Random damage to every kind of file in real checkpoints: none is accepted, and if none is left the run stops."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun.checkpoint.manifest import MANIFEST
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.state import Checkpointer
from clusterrun.checkpoint.store import Store, step_name
from clusterrun.errors import CheckpointError

STEPS = (10, 20)
KINDS = (MANIFEST, ".metadata", "__0_0.distcp")
SETTINGS: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
Content = dict[str, bytes]  # name -> bytes of a checkpoint's files; a name that is missing is deleted


def checkpointer(directory: Path, warnings: list[str]) -> Checkpointer:
    store = Store(directory, patience_s=0)
    return Checkpointer(store, 0, "c0ffee", Keep(2), 30, torch.device("cpu"), warnings.append)


@dataclass
class Good:
    """Two checkpoints as they were written, and a place to damage copies of them."""

    directory: Path
    files: dict[int, Content]

    def lay_out(self, contents: dict[int, Content]) -> Store:
        shutil.rmtree(self.directory, ignore_errors=True)
        for step, content in contents.items():
            (self.directory / step_name(step)).mkdir(parents=True)
            for name, data in content.items():
                (self.directory / step_name(step) / name).write_bytes(data)
        return Store(self.directory, patience_s=0)


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Good]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    saver = checkpointer(tmp_path / "checkpoints", [])
    for step in STEPS:
        entries: dict[str, Any] = {f"model/{i}": torch.randn(40) for i in range(5)}
        assert saver.save(step, {**entries, "extra": {"lr": 0.1}}, {"epoch": 1, "scaler": {"scale": 65536.0}}).ok
    files = {
        step: {f.name: f.read_bytes() for f in (tmp_path / "checkpoints" / step_name(step)).iterdir()} for step in STEPS
    }
    assert all(set(content) == set(KINDS) for content in files.values())
    yield Good(tmp_path / "checkpoints", files)
    dist.destroy_process_group()


def flip(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    data = bytearray(content[name])
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    content[name] = bytes(data)


def cut(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    content[name] = content[name][: draw(st.integers(0, len(content[name]) - 1))]


def grow(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    at = draw(st.integers(0, len(content[name])))
    content[name] = content[name][:at] + draw(st.binary(min_size=1, max_size=20)) + content[name][at:]


def hole(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    """Blocks that never reached the disk."""
    data = bytearray(content[name])
    at = draw(st.integers(0, len(data) - 1))
    size = min(draw(st.sampled_from([1, 16, 512, 4096])), len(data) - at)
    data[at : at + size] = bytes(size)
    content[name] = bytes(data)


def scribble(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    data, new = content[name], draw(st.binary(min_size=1, max_size=64))
    at = draw(st.integers(0, len(data) - 1))
    content[name] = (data[:at] + new + data[at + len(new) :])[: len(data)]


def of_another_checkpoint(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    content[name] = other[name]


def swap(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    another = draw(st.sampled_from([kind for kind in KINDS if kind != name]))
    content[name], content[another] = content[another], content[name]


def delete(draw: st.DrawFn, content: Content, name: str, other: Content) -> None:
    del content[name]


WAYS: list[Callable[[st.DrawFn, Content, str, Content], None]] = [
    flip,
    flip,
    cut,
    cut,
    grow,
    grow,
    hole,
    scribble,
    scribble,
    of_another_checkpoint,
    swap,
    delete,
]


@st.composite
def damages(draw: st.DrawFn, good: Good, step: int) -> tuple[str, str, Content]:
    """The kind of file, the way of damage, and what is then in the checkpoint's directory; it may be as it was."""
    content, other = dict(good.files[step]), good.files[min(set(STEPS) - {step})]
    name, way = draw(st.sampled_from(KINDS)), draw(st.sampled_from(WAYS))
    way(draw, content, name, other)
    return name, way.__name__, content


def test_none_of_2000_random_damages_is_accepted(good: Good) -> None:
    tried: Counter[tuple[str, str]] = Counter()
    accepted = []

    @settings(max_examples=2600, **SETTINGS)
    @given(damages(good, 20))
    def one(damage: tuple[str, str, Content]) -> None:
        name, way, content = damage
        if content == good.files[20]:
            return  # zeros over zeros
        tried[name, way] += 1
        store = good.lay_out({20: content})
        (info,) = store.list()
        if not store.verify(info):
            accepted.append(damage)

    one()
    assert accepted == []
    assert sum(tried.values()) >= 2000
    ways = {way.__name__ for way in WAYS}
    assert set(tried) == {(kind, way) for kind in KINDS for way in ways}


def test_undamaged_ones_are_accepted(good: Good) -> None:
    store = good.lay_out(good.files)
    assert [store.verify(info) for info in store.list()] == [[], []]


def test_the_one_before_is_taken(good: Good) -> None:
    @settings(max_examples=60, **SETTINGS)
    @given(damages(good, 20))
    def one(damage: tuple[str, str, Content]) -> None:
        if damage[2] == good.files[20]:
            return
        good.lay_out({**good.files, 20: damage[2]})
        warnings: list[str] = []
        found = checkpointer(good.directory, warnings).find()
        assert found is not None
        assert found.step == 10
        assert len(warnings) == 1
        assert "is set aside as .bad-step-00000020-" in warnings[0]

    one()


def test_all_damaged_is_an_explicit_stop(good: Good) -> None:
    @settings(max_examples=60, **SETTINGS)
    @given(damages(good, 10), damages(good, 20))
    def one(older: tuple[str, str, Content], newer: tuple[str, str, Content]) -> None:
        if older[2] == good.files[10] or newer[2] == good.files[20]:
            return
        good.lay_out({10: older[2], 20: newer[2]})
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"none is valid, so there is nothing to resume from"):
                checkpointer(good.directory, []).find()
        assert all(name.startswith(".bad-") for name in os.listdir(good.directory))

    one()
