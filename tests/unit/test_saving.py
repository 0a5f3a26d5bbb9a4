"""Saves in the background, over real Gloo ranks: what is written, who waits for what, how failures come to light."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.cadence import Cadence, FailureRate
from clusterrun.checkpoint.retention import Keep, Score
from clusterrun.checkpoint.staging import HostCopies, my_share
from clusterrun.checkpoint.state import Checkpointer, Saved
from clusterrun.checkpoint.store import Store
from clusterrun.config.schema import CheckpointConfig, OnOvertake
from clusterrun.errors import CheckpointError
from clusterrun.train.saving import Saver, State
from ranks import both, leftovers, run_ranks

SHORT_S = 2.0  # for a rank to wait for another whose disk never answers


class Loop:
    """A training loop reduced to its state: ``value`` is added to in place, as an optimizer does."""

    def __init__(self, rank: int, directory: Path, timeout_s: float = 30.0, **settings: Any) -> None:
        self.rank = rank
        self.said: list[str] = []
        self.warnings: list[str] = []
        self.saves: list[tuple[int, bool, str]] = []
        self.value = torch.zeros(300_000)
        self.own = torch.full((4,), float(rank))
        config = CheckpointConfig(**{"async_save": True, "every_steps": 10, **settings})
        checkpointer = Checkpointer(
            store=Store(directory, patience_s=0),
            attempt=0,
            config_hash="c0ffee",
            keep=Keep.of(config),
            timeout_s=timeout_s,
            device=torch.device("cpu"),
            warn=self.warnings.append,
        )
        self.saver = Saver(
            checkpointer=checkpointer,
            config=config,
            cadence=Cadence(config, FailureRate(3600, "for the test")),
            grace_s=60,
            report=self.report,
            say=self.said.append,
            warn=self.warnings.append,
            saved_step=None,
        )
        self.store = checkpointer.store

    def report(self, saved: Saved, reason: str) -> None:
        self.saves.append((saved.step, saved.ok, reason))

    def save(self, step: int, last: bool = False) -> None:
        """Train up to the step, save, and train on at once."""
        self.value.fill_(step)
        shared = {"model/a": self.value, "model/b": self.value[:7].double(), "note": {"at": step}}
        self.saver.save(step, "every_steps", lambda: State(shared, {f"rng/rank{self.rank}/x": self.own}, {}), last=last)
        self.value.fill_(-1)

    def poll(self) -> bool:
        votes = torch.tensor(self.saver.votes())
        dist.all_reduce(votes)
        return self.saver.heard(votes.tolist())

    def poll_until_landed(self) -> None:
        end = time.monotonic() + 30
        while self.saver.in_flight:
            self.poll()
            assert time.monotonic() < end
            time.sleep(0.01)

    def content(self, step: int) -> set[float]:
        """The different values in a checkpoint's model."""
        (info,) = [info for info in self.store.list() if info.step == step]
        assert self.store.verify(info) == []
        loaded: dict[str, Any] = {k: torch.empty(s, dtype=d) for k, (s, d) in dcp.layout(info.path).items()}
        assert set(loaded) == {"model/a", "model/b", *(f"rng/rank{r}/x" for r in range(dist.get_world_size()))}
        loaded["note"] = None
        dcp.read(loaded, info.path)
        assert loaded["note"] == {"at": step}
        return {*loaded["model/a"].tolist(), *loaded["model/b"].tolist()}


class SlowDisk:
    """fsync on one rank waits for ``go``."""

    def __init__(self, patch: pytest.MonkeyPatch, here: bool) -> None:
        self.go = threading.Event()
        fsync = os.fsync

        def slow(fd: int) -> None:
            self.go.wait(60)
            fsync(fd)

        if here:
            patch.setattr(os, "fsync", slow)


def what_is_saved_is_the_state_of_that_moment(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch, here=rank == 2)
        loop.save(10)
        for _ in range(5):
            loop.poll()
        assert loop.saver.in_flight
        assert loop.saver.saved_step is None
        assert loop.store.list() == []
        dist.barrier()
        disk.go.set()
        loop.poll_until_landed()
    assert loop.saves == [(10, True, "every_steps")]
    assert loop.saver.saved_step == 10
    for step in (20, 30):  # in the same buffers
        loop.save(step)
        loop.poll_until_landed()
        assert loop.content(step) == {float(step)}
    assert loop.content(10) == {10.0}


def one_that_overtakes_waits(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch, here=rank == 1)
        loop.save(10)
        began = time.monotonic()
        threading.Timer(0.5, disk.go.set).start()
        loop.save(20)
        assert time.monotonic() - began >= 0.5 or rank != 1  # the others may have come later
        assert loop.saves == [(10, True, "every_steps")]
        loop.save(30, last=True)  # not in the background, and waits for the one that is
    assert not loop.saver.in_flight
    assert loop.saves == [(step, True, "every_steps") for step in (10, 20, 30)]
    assert [loop.content(step) for step in (10, 20, 30)] == [{10.0}, {20.0}, {30.0}]
    loop.save(30, last=True)
    assert len(loop.saves) == 3


def one_that_overtakes_is_skipped(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory, on_overtake=OnOvertake.skip)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch, here=rank == 1)
        loop.save(10)
        loop.save(10)
        loop.save(20)
        dist.barrier()
        disk.go.set()
        loop.save(30, last=True)  # told to stop: this one is made
    assert loop.saves == [(10, True, "every_steps"), (30, True, "every_steps")]
    assert [info.step for info in loop.store.list()] == [30, 10]
    assert len(loop.warnings) == 1
    assert "step 20 is not saved: the checkpoint of step 10 is still being written" in loop.warnings[0]


def the_last_one_may_be_in_flight_already(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory)
    loop.save(10)
    loop.save(10, last=True)
    assert loop.saves == [(10, True, "every_steps")]
    assert not loop.saver.in_flight


def a_full_disk_comes_to_light(rank: int, directory: Path) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    loop = Loop(rank, directory, max_failed_saves=2)
    loop.save(10)
    loop.poll_until_landed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full if rank == 1 else os.fsync)
        loop.save(20)
        loop.poll_until_landed()
        assert loop.saves[-1] == (20, False, "every_steps")
        if rank == 0:
            assert "step 20 is not saved: rank 1: " in loop.warnings[0]
            assert "No space left on device; training goes on" in loop.warnings[0]
        assert both(leftovers(directory)) == [[]] * 3
        loop.save(30)
        with pytest.raises(CheckpointError, match=r"2 saves in a row failed .* is of step 10"):
            loop.poll_until_landed()
    assert loop.content(10) == {10.0}


def the_end_is_tried_again_until_there_is_room(rank: int, directory: Path) -> None:
    calls = []
    fsync = os.fsync

    def full_at_first(fd: int) -> None:
        calls.append(fd)
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    loop = Loop(rank, directory)
    state = State({"model/a": torch.full((9,), 3.0)}, {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_at_first if rank == 1 else fsync)
        loop.saver.save_end(30, lambda: state)
    ends = [ok for step, ok, reason in loop.saves if (step, reason) == (30, "end")]
    assert len(ends) >= 2
    assert not ends[0]
    assert ends[-1]
    assert loop.store.latest_step() == 30


def an_end_that_cannot_be_saved_is_no_end(rank: int, directory: Path) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    loop = Loop(rank, directory, timeout_s=1.0)
    loop.saver.config.timeout_s = 1.0
    loop.save(10, last=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full if rank == 1 else os.fsync)
        with pytest.raises(CheckpointError, match=r"has ended, but step 30 .* newest checkpoint is of step 10"):
            loop.saver.save_end(30, lambda: State({"model/a": torch.zeros(9)}, {}, {}))
    assert [entry[:2] for entry in loop.saves] == [(10, True), (30, False), (30, False)]


def a_disk_that_never_answers(rank: int, directory: Path) -> None:
    """The ranks go on together; what the rank does once its disk answers again harms nothing."""
    loop = Loop(rank, directory, timeout_s=SHORT_S)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch, here=rank == 1)
        loop.save(10)
        began = time.monotonic()
        loop.saver.land()
        assert time.monotonic() - began < SHORT_S * 6
        assert loop.saves == [(10, False, "every_steps")]
    loop.save(20)
    disk.go.set()
    loop.poll_until_landed()
    assert loop.saves[-1] == (20, True, "every_steps")
    assert loop.content(20) == {20.0}
    time.sleep(0.5)
    assert both([info.step for info in loop.store.list()]) == [[20]] * 3


def states_that_differ_are_not_saved(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory)
    shared = {"model/a": torch.zeros(5), **({"model/only_here": torch.zeros(3)} if rank == 2 else {})}
    saved = loop.saver.checkpointer.save(1, shared, {}, {})
    assert saved.problem == "the ranks' states have different keys or shapes"
    assert both([info.step for info in loop.store.list()]) == [[]] * 3


def rank_0s_clock_decides(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory, every_steps=None, every_minutes=0.01 if rank == 0 else 1e-5)
    assert not loop.poll()
    time.sleep(0.7)
    assert both(loop.poll()) == [True] * 3
    loop.save(7)
    assert both(loop.poll()) == [False] * 3
    loop.poll_until_landed()


def the_best_are_saved(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory, keep_best=1)
    wanted = []
    for step, loss in ((1, 5.0), (2, 6.0), (3, 4.0), (4, 4.5), (5, 4.6)):
        wanted.append(loop.saver.would_be_among_the_best(step, Score(loss, 0.0)))
        if wanted[-1] or step > 3:
            loop.save(step, last=True)
    assert both(wanted) == [[True, False, True, False, False]] * 3
    assert both([info.step for info in loop.store.list()]) == [[5, 4, 3]] * 3


def a_grace_that_is_too_short_is_said(rank: int, directory: Path) -> None:
    loop = Loop(rank, directory)
    loop.saver.grace_s = 0.5
    for step in (10, 20):
        with pytest.MonkeyPatch.context() as patch:
            disk = SlowDisk(patch, here=rank == 1)
            threading.Timer(0.6, disk.go.set).start()
            loop.save(step)
            loop.poll_until_landed()
    assert len(loop.warnings) <= 2  # again only when it has become much longer
    assert "a run that is told to stop has 0 s for it" in loop.warnings[0]
    assert "raise cluster.signal_lead_s" in loop.warnings[0]


def test_scenarios(tmp_path: Path) -> None:
    scenarios = [
        what_is_saved_is_the_state_of_that_moment,
        one_that_overtakes_waits,
        one_that_overtakes_is_skipped,
        the_last_one_may_be_in_flight_already,
        a_full_disk_comes_to_light,
        the_end_is_tried_again_until_there_is_room,
        an_end_that_cannot_be_saved_is_no_end,
        a_disk_that_never_answers,
        states_that_differ_are_not_saved,
        rank_0s_clock_decides,
        the_best_are_saved,
        a_grace_that_is_too_short_is_said,
    ]
    run_ranks(3, tmp_path, scenarios)


def test_shares_are_whole_and_even() -> None:
    sizes = [1000, 700, 300, 300, 100, 50, 1]
    shared: dict[str, Any] = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)} | {"text": "x"}
    shares = [my_share(shared, rank, 3) for rank in range(3)]
    assert sorted(key for mine in shares for key in mine) == sorted(shared)
    loads = [sum(value.numel() for value in mine.values() if isinstance(value, torch.Tensor)) for mine in shares]
    assert max(loads) == 1000
    reordered = dict(reversed(shared.items()))
    assert [set(my_share(reordered, rank, 3)) for rank in range(3)] == [set(mine) for mine in shares]


def test_copies_are_copies() -> None:
    copies, entries = HostCopies(), {"a": torch.arange(6.0).reshape(2, 3).t(), "b": {"list": [1]}, "c": torch.tensor(1)}
    first = copies.of(entries)
    assert torch.equal(first["a"], entries["a"])  # type: ignore[arg-type]
    entries["b"]["list"].append(2)  # type: ignore[index]
    assert first["b"] == {"list": [1]}
    again = copies.of(entries)
    assert again["a"].data_ptr() == first["a"].data_ptr()
    other = copies.of({"a": torch.zeros(3, 2, dtype=torch.float64)})
    assert other["a"].dtype == torch.float64
