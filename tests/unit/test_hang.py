"""Who is behind when nothing moves, and when a worker counts as hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun import frames, pulse
from clusterrun.config.schema import CheckpointConfig, RecoveryConfig, RunConfig
from clusterrun.launch import lookout
from clusterrun.launch.hang import blame, states
from clusterrun.launch.lookout import BEAT, HANG, Limits, Lookout, RankState, Watched
from clusterrun.pulse import Beat, Pulse, Stage

NODES = ("c1", "c2", "c3")
LIMITS = Limits(factor=30, floor_s=10, start_s=1000, warmup_steps=3, save_s=50)


def rank(number: int, ticks: int = 40, stage: str = "exchange", state: str = "S", step: int | None = None) -> RankState:
    return RankState(number, 1000 + number, ticks, ticks if step is None else step, stage, state, 31.0)


def beat(ticks: int, stage: Stage = Stage.exchange) -> Beat:
    return Beat(ticks, ticks, 0.0, 0.0, 1, 0, stage)


class TestBlame:
    def test_a_node_without_a_word(self) -> None:
        found = blame(NODES, {"c1": [rank(0)], "c3": [rank(2)]})
        assert (found.node, found.rank, found.silent) == ("c2", None, ("c2",))
        assert "no step ended for 31 s (step 40): no word from c2" in found.message

    def test_a_stopped_process_comes_before_what_it_did(self) -> None:
        found = blame(NODES, {"c1": [rank(0)], "c2": [rank(1, ticks=40, state="T")], "c3": [rank(2, ticks=39)]})
        assert (found.node, found.rank) == ("c2", 1)
        assert "rank 1 on c2 is stopped" in found.message

    def test_stuck_in_the_kernel(self) -> None:
        found = blame(NODES, {"c1": [rank(0)], "c2": [rank(1)], "c3": [rank(2, state="D")]})
        assert (found.node, found.rank) == ("c3", 2)
        assert "storage" in found.message

    def test_the_one_with_fewer_steps(self) -> None:
        found = blame(NODES, {"c1": [rank(0), rank(1, ticks=39)], "c2": [rank(2)], "c3": [rank(3)]})
        assert (found.node, found.rank) == ("c1", 1)

    def test_in_the_same_step_the_one_that_works_alone(self) -> None:
        """A rank that hangs in its forward pass: the others have done as many steps, and wait in the exchange."""
        found = blame(NODES, {"c1": [rank(0)], "c2": [rank(1, stage="compute")], "c3": [rank(2)]})
        assert (found.node, found.rank) == ("c2", 1)
        assert "rank 1 on c2 is behind, in 'compute' of step 40" in found.message

    def test_many_are_named_briefly(self) -> None:
        behind = [rank(number, stage="data") for number in range(1, 8)]
        assert "rank 4 on c1 and 3 more is behind" in blame(["c1"], {"c1": [rank(0), *behind]}).message

    def test_nobody(self) -> None:
        for stage in ("exchange", "compute"):
            found = blame(NODES, {node: [rank(number, stage=stage)] for number, node in enumerate(NODES)})
            assert (found.node, found.rank) == (None, None)
            assert "no rank is behind" in found.message

    def test_messages_of_another_version_count_as_none(self) -> None:
        assert states({"c1": {"ranks": [{"colour": "green"}]}, "c2": 7, "c3": {"ranks": []}}) == {"c3": []}


class TestPatience:
    def test_the_median_counts_and_the_floor(self) -> None:
        assert LIMITS.patience_s(beat(40), 0.1) == 10
        assert LIMITS.patience_s(beat(40), 2.0) == 60

    def test_the_start_and_the_warm_up_may_take_longer(self) -> None:
        assert LIMITS.patience_s(beat(0, Stage.starting), None) == 1000
        assert LIMITS.patience_s(beat(2), 0.1) == 1000
        assert LIMITS.patience_s(beat(3), 0.1) == 10

    def test_a_save_may_take_as_long_as_the_ranks_wait_for_each_other(self) -> None:
        assert LIMITS.patience_s(beat(40, Stage.saving), 0.1) == 60

    def test_off(self) -> None:
        off = Limits(factor=0, floor_s=10, start_s=10, warmup_steps=0, save_s=0)
        assert off.patience_s(beat(40), 0.1) == float("inf")

    def test_median_of_the_time_between_ticks(self) -> None:
        watched = Watched(beat(0))
        for ticks, passed in ((1, 1.0), (2, 1.0), (2, 4.0), (3, 5.0), (13, 1.0)):
            watched.look(beat(ticks), passed)
        assert watched.median_s == pytest.approx((1 + 1) / 2)  # of 1, 1, 9 and 0.1
        assert watched.quiet_s == 0
        watched.look(beat(13), 2.5)
        assert watched.quiet_s == 2.5

    def test_a_save_that_begins_is_a_sign_of_life(self) -> None:
        watched = Watched(beat(5))
        watched.look(beat(5), 8.0)
        watched.look(beat(5, Stage.saving), 1.0)
        assert watched.quiet_s == 0


WORKER = """
import faulthandler, os, signal, sys, time
from clusterrun.pulse import Pulse, Stage
faulthandler.register(signal.SIGUSR1, all_threads=True)
pulse = Pulse.of_this_worker()
for step in range(1, 21):
    pulse.begin(step)
    time.sleep(0.01)
    pulse.tick()
def where_it_hangs():
    pulse.at(Stage.compute)
    print("ready", flush=True)
    time.sleep(600)
where_it_hangs()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    started = []

    def start(number: int) -> subprocess.Popen[str]:
        env = {**os.environ, pulse.DIRECTORY: str(tmp_path), "RANK": str(number)}
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def make(directory: Path, said: list[str]) -> Lookout:
    recovery = RecoveryConfig(hang_floor_s=2.0, hang_warmup_steps=3, heartbeat_s=1.0)
    return Lookout(directory, "c2", 3, RunConfig(recovery=recovery, checkpoint=CheckpointConfig()), said.append)


def decoded(kind: str, said: list[str]) -> Any:
    return frames.decode(kind, "".join(said).splitlines()).get("c2")


def test_a_hung_and_a_stopped_worker_are_reported_with_their_stacks(
    tmp_path: Path, worker: Callable[[int], subprocess.Popen[str]]
) -> None:
    said: list[str] = []
    watch = make(tmp_path, said)
    watch.look(0.25)
    processes = [worker(3), worker(4)]
    processes[1].send_signal(signal.SIGSTOP)
    wait_for(lambda: lookout.process_state(processes[1].pid) == "T")
    for number in range(8):
        watch.look(0.25)
        assert decoded(HANG, said) is None, number  # the workers' own 0.2 s of steps were not seen as such
    patience_s = RecoveryConfig().hang_start_s  # no tick was seen while it looked: only the start's limit holds
    watch.look(patience_s)
    ranks = {value["rank"]: value for value in decoded(HANG, said)["ranks"]}
    assert (ranks[3]["stage"], ranks[3]["step"], ranks[3]["state"]) == ("compute", 20, "S")
    assert ranks[4]["state"] == "T"
    processes[0].kill()
    assert "where_it_hangs" in processes[0].communicate()[1]
    count = len(said)
    watch.look(patience_s)
    assert not [line for line in said[count:] if f" {HANG} " in line], "said once"


def test_a_dead_worker_is_torchruns_business(tmp_path: Path, worker: Callable[[int], subprocess.Popen[str]]) -> None:
    said: list[str] = []
    watch = make(tmp_path, said)
    process = worker(0)
    watch.look(0.25)
    process.kill()
    process.wait()
    watch.look(1e6)
    assert decoded(HANG, said) is None


def test_beats_are_rare_and_only_when_something_happened(tmp_path: Path) -> None:
    said: list[str] = []
    watch = make(tmp_path, said)
    own = Pulse(tmp_path / "5", 5)
    for looks in range(1, 41):
        own.begin(looks)
        own.pace(0.25, 0.0625)
        own.tick()
        watch.look(0.25)
    assert 9 <= len(said) <= 11  # in ten seconds
    assert decoded(BEAT, said)["ranks"]["5"][1:] == [250.0, 62.5]
    assert watch.step() == 40
    count = len(said)
    for _ in range(40):
        watch.look(0.04)
    assert len(said) <= count + 1


def test_a_new_process_of_a_rank_begins_anew(tmp_path: Path) -> None:
    said: list[str] = []
    watch = make(tmp_path, said)
    Pulse(tmp_path / "0", 0).tick()
    watch.look(0.25)
    for _ in range(10):
        Pulse(tmp_path / "0", 0)
        watch.look(0.25)
    assert pulse.read_all(tmp_path)[0].ticks == 0
    assert decoded(HANG, said) is None


def test_a_pulse_without_a_place_goes_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(pulse.DIRECTORY, raising=False)
    Pulse.of_this_worker().tick()
    monkeypatch.setenv(pulse.DIRECTORY, str(tmp_path / "missing"))
    Pulse.of_this_worker().tick()
    assert pulse.read_all(tmp_path / "missing") == {}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
