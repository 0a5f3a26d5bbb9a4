"""Hangs, stragglers and crash loops on this machine, with real workers. On several hosts: slurm/test_faults.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.checkpoint.store import Store
from clusterrun.fence import Fence
from clusterrun.ledger import Ending
from support import assert_same_bits, attempts, clusterrun, final_state, losses, run_dir, start, step_reached, wait_for

RUN = [
    "cluster.nodes=3",
    "cluster.nproc_per_node=1",
    "train=ddp_linear",
    "train.task=fault_task:FaultTask",
    "train.epochs=100",
    "train.max_steps=40",
    "train.log_every_steps=1",
    "checkpoint.every_steps=10",
    "recovery.hang_floor_s=3",
    "recovery.hang_warmup_steps=3",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def test_a_hung_rank_is_named_with_its_stack_and_the_run_goes_on(shared: Path, tmp_path: Path) -> None:
    code, said = clusterrun(shared, *RUN, "run_id=undisturbed")
    assert code == 0, said
    task = ["train.task_args.hang_rank=1", "train.task_args.hang_call=25", f"train.task_args.once={tmp_path}/once"]
    code, said = clusterrun(shared, *RUN, *task, "train.task_args.delay_s=0.02", "run_id=hangs")
    assert code == 0, said
    hung, done = attempts(shared, "hangs")
    assert (hung.ending, done.ending) == (Ending.hung, Ending.done)
    assert "rank 1 on node1 is behind, in 'compute' of step 24; the others wait" in hung.message
    assert hung.step == 24
    assert hung.message in said
    logs = run_dir(shared, "hangs").attempt(1).logs
    assert "fault_task.py" in (logs / "node1.1.err").read_text()
    assert "in hang" in (logs / "node1.1.err").read_text()
    for other in ("node0.0.err", "node2.2.err"):
        assert "in backward" in (logs / other).read_text()
    assert_same_bits(final_state(shared, "undisturbed"), final_state(shared, "hangs"))
    assert losses(shared, "undisturbed") == losses(shared, "hangs")


def test_the_same_crash_at_the_same_step_twice_is_93(shared: Path) -> None:
    code, said = clusterrun(shared, *RUN, "train.task_args.die_call=6", "run_id=loops")
    assert code == 93, said
    assert [a.ending for a in attempts(shared, "loops")] == [Ending.crashed] * 2
    assert "the same error twice at step 5, the last: crashed. node1: rank 1: killed by SIGKILL" in said


def test_a_straggler_is_named(shared: Path) -> None:
    slow = ["train.task_args.delay_s=0.02", "train.task_args.slow_rank=2", "train.task_args.slow_s=0.1"]
    often = ["recovery.heartbeat_s=0.5", "recovery.straggler_for_s=1", "train.max_steps=50"]
    code, said = clusterrun(shared, *RUN, *slow, *often, "run_id=slow")
    assert code == 0, said
    (attempt,) = attempts(shared, "slow")
    assert [(n.kind, n.node, n.rank) for n in attempt.notices] == [("straggler", "node2", 2)]
    assert "node2: rank 2 is a straggler" in said


def test_a_zombie_publishes_nothing_more_starts_nothing_and_ends(shared: Path) -> None:
    """What is left of an attempt when the run goes on elsewhere: real workers and a conductor that lost the fence."""
    zombie = start(shared, [*RUN, "train.task_args.delay_s=0.15", "run_id=zombie"])
    try:
        wait_for("some steps", lambda: step_reached(shared, "zombie") >= 12)
        run = run_dir(shared, "zombie")
        taken = Fence(run.fence).take(2)
        said, _ = zombie.communicate(timeout=120)
    finally:
        zombie.kill()
    assert zombie.returncode != 0, said
    assert [info.step for info in Store(run.checkpoints).list()] == [10]
    assert "attempt 1 may no longer write" in (run.attempt(1).logs / "node0.0.err").read_text()
    assert len(attempts(shared, "zombie")) == 1
    assert attempts(shared, "zombie")[0].is_open, "its diary belongs to whoever holds the fence"
    assert Fence(run.fence).holder() == taken
