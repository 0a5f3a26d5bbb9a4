"""When the conductor stops waiting for a step, and with how many nodes it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun import frames
from clusterrun.config.schema import ClusterConfig, RecoveryConfig, RunConfig, TrainConfig
from clusterrun.launch import watch as watch_module
from clusterrun.launch.conductor import nodes_to_go_on_with
from clusterrun.launch.lookout import BEAT, HANG
from clusterrun.launch.outcome import FRAME, How, Outcome
from clusterrun.launch.stragglers import Straggler
from clusterrun.launch.watch import StepWatch

NODES = ["c1", "c2", "c3"]


class Rig:
    """A watch, the files it reads, and a clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.err = directory / "out", directory / "err"
        self.left = list(NODES)
        self.told: list[tuple[int, str]] = []
        self.now = 1000.0
        monkeypatch.setattr(watch_module, "time", type("Clock", (), {"monotonic": lambda: self.now}))
        self.out.write_text("")
        self.err.write_text("")
        config = RunConfig(recovery=RecoveryConfig(hang_floor_s=10, straggler_for_s=30))
        self.watch = StepWatch(config, NODES, self.out, self.err, nodes_left=lambda: self.left, tell=self.tell)

    def tell(self, straggler: Straggler, node: str) -> None:
        self.told.append((straggler.rank, node))

    def say(self, kind: str, node: str, value: Any) -> None:
        with self.out.open("a") as file:
            file.write(frames.encode(kind, node, value))

    def complain(self, line: str) -> None:
        with self.err.open("a") as file:
            file.write(line + "\n")

    def look(self, after_s: float = 0.0) -> str | None:
        self.now += after_s
        return self.watch.look()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def hang(rank: int, state: str = "S") -> dict[str, Any]:
    state_of = {"rank": rank, "pid": 1, "ticks": 9, "step": 9, "stage": "exchange", "state": state, "quiet_s": 11.0}
    return {"t": time.time(), "ranks": [state_of]}


def test_nothing_to_say(rig: Rig) -> None:
    rig.complain("[W1202 socket.cpp:207] The hostname of the client socket cannot be retrieved")
    assert all(rig.look(10) is None for _ in range(100))


def test_a_failed_node_leaves_the_others_a_moment(rig: Rig) -> None:
    rig.say(FRAME, "c2", Outcome(How.crashed, rank=1).as_json())
    assert rig.look() is None
    assert rig.look(14) is None
    assert "did not end" in (rig.look(2) or "")


def test_an_agent_that_was_killed_says_nothing_but_srun_does(rig: Rig) -> None:
    rig.complain("srun: error: c2: task 1: Killed")
    assert rig.look() is None
    assert "did not end" in (rig.look(16) or "")


def test_stopped_and_done_are_no_failures(rig: Rig) -> None:
    rig.say(FRAME, "c1", Outcome(How.stopped, saved=True).as_json())
    rig.say(FRAME, "c2", Outcome(How.done).as_json())
    rig.complain("srun: error: c1: task 0: Exited with exit code 75")
    assert rig.look() is None
    assert rig.look(20) is None


def test_a_node_that_slurm_lost(rig: Rig) -> None:
    assert rig.look(1) is None
    rig.left.remove("c3")
    assert rig.look(1) is None, "not asked every second"
    rig.complain("srun: error: Node failure on c3.  Check slurmctld log for details")
    assert rig.look(1) is None
    assert rig.look(4) == "lost c3"
    assert rig.watch.lost == {"c3"}


def test_a_node_that_slurm_lost_without_a_word(rig: Rig) -> None:
    rig.left.remove("c1")
    assert rig.look(31) is None
    assert rig.look(4) == "lost c1"


def test_a_scheduler_that_does_not_answer_has_lost_nobody(rig: Rig) -> None:
    rig.left.clear()
    assert rig.look(31) is None
    assert rig.watch.lost == set()


def test_a_hang_of_which_all_nodes_tell(rig: Rig) -> None:
    rig.say(HANG, "c1", hang(0))
    assert rig.look() is None
    rig.say(HANG, "c2", hang(1, "T"))
    rig.say(HANG, "c3", hang(2))
    assert "rank 1 on c2 is stopped" in (rig.look(0.5) or "")
    assert rig.watch.blame is not None
    assert rig.watch.blame.silent == ()


def test_a_hang_of_which_one_node_does_not_tell(rig: Rig) -> None:
    rig.say(HANG, "c1", hang(0))
    rig.say(HANG, "c3", hang(2))
    assert rig.look() is None
    assert rig.look(10) is None
    assert "no word from c2" in (rig.look(2) or "")
    assert rig.watch.blame is not None
    assert rig.watch.blame.silent == ("c2",)


def test_stragglers_are_compared_over_all_nodes(rig: Rig) -> None:
    for t in range(0, 100, 10):
        for rank, node in enumerate(NODES[: 2 if t < 30 else 3]):
            rig.say(BEAT, node, {"t": 100.0 + t, "ranks": {str(rank): [t, 300.0 if rank == 1 else 100.0, 1.0]}})
        rig.look(10)
        assert bool(rig.told) == (t >= 60), f"at {t}: 30 s after all three were heard"
    assert rig.told == [(1, "c2")]


def config(**fields: Any) -> RunConfig:
    train = TrainConfig(task="linear", **{"batch_per_rank": 8, **fields.pop("train", {})})
    return RunConfig(cluster=ClusterConfig(nproc_per_node=2, **fields), train=train)


class TestFewerNodes:
    def test_enough(self) -> None:
        assert nodes_to_go_on_with(config(nodes=4), 4) == 4
        assert nodes_to_go_on_with(config(nodes=4), 5) == 4

    def test_not_without_leave(self) -> None:
        assert nodes_to_go_on_with(config(nodes=4), 3) is None

    def test_down_to_the_least(self) -> None:
        some = config(nodes=4, min_nodes=2)
        assert [nodes_to_go_on_with(some, healthy) for healthy in (4, 3, 2, 1, 0)] == [4, 3, 2, None, None]

    def test_a_global_batch_must_divide(self) -> None:
        """48 samples over 8, 6, 4 and 2 ranks all divide; 40 do not over 6, so three healthy nodes train as two."""
        for global_batch, expected in ((48, 3), (40, 2)):
            train = {"global_batch": global_batch, "batch_per_rank": None}
            assert nodes_to_go_on_with(config(nodes=4, min_nodes=1, train=train), 3) == expected
