"""A DDP run over two NFS clients: two kernels, one rank each, Gloo over their network, checkpoints on the export.

Rank 0's node loses power in the middle and is booted again; in the next attempt both kernels read what was saved, and
the run ends with the bits of an undisturbed one. Run by hand, since importing torch under User Mode Linux takes too
long for the suite:

    pytest tests/nfs/nfs_training.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest
from guests import EXPORTS, MOUNTS, Guest, lab, python

from clusterrun.checkpoint.store import Store
from clusterrun.config import frozen
from clusterrun.config.schema import CheckpointConfig, ClusterConfig, DataConfig, RunConfig, TrainConfig
from clusterrun.launch.commands import step_environment, training_argv
from clusterrun.rundir import RUNS, RunDir
from support import TESTS, assert_same_bits, events, final_state, wait_for

pytestmark = pytest.mark.nfs

ADDRESSES = {"n1": "10.78.0.11", "n2": "10.78.0.12"}
STEPS, SAVED_EVERY = 12, 3
Agents = list[subprocess.Popen[str]]
SHARED = EXPORTS / "main"  # on this machine what MOUNTS / "main" is in the guests


class Training:
    """A run directory on the export, and the agents of its attempts, started as srun would: one on each node."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.config = RunConfig(
            run_id=run_id,
            cluster=ClusterConfig(nodes=2, nproc_per_node=1, shared_dir=str(MOUNTS / "main")),
            train=TrainConfig(
                task="slow_task:SlowLinear",
                task_args={"delay_s": 0.1},
                max_steps=STEPS,
                batch_per_rank=8,
                momentum=0.9,
                log_every_steps=1,
            ),
            data=DataConfig(samples=640),
            checkpoint=CheckpointConfig(every_steps=SAVED_EVERY, keep=10),
        )
        self.run = RunDir.create(SHARED, run_id)
        self.run.config.write_text(frozen.to_yaml(self.config))

    def start(self, attempt: int, nodes: Sequence[str]) -> Agents:
        self.run.attempt(attempt).make()
        there = RunDir(MOUNTS / "main" / RUNS / self.id)
        argv = training_argv(self.config, there, attempt, f"{ADDRESSES[nodes[0]]}:29{attempt:03d}", f"{self.id}-secret")
        agents = []
        for index, node in enumerate(nodes):
            env = {"CLUSTERRUN_NODE": node, "CLUSTERRUN_NODE_INDEX": str(index), "PYTHONPATH": str(TESTS)}
            agents.append(python(node, *argv[1:], env={**env, **step_environment(self.config)}))
        return agents

    def to_the_end(self, attempt: int, nodes: Sequence[str]) -> None:
        agents = self.start(attempt, nodes)
        try:
            wait_for("all agents done, or one failed", lambda: ended(agents), timeout_s=300)
            assert [agent.returncode for agent in agents] == [0, 0], self.said(attempt)
        finally:
            stop(agents)

    def said(self, attempt: int) -> str:
        logs = sorted(self.run.attempt(attempt).logs.glob("*.err"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def saved(self) -> int:
        """The newest checkpoint, as the server has it."""
        return Store(self.run.checkpoints).latest_step() or 0


def ended(agents: Agents) -> bool:
    codes = [agent.poll() for agent in agents]
    return None not in codes or any(codes)


def stop(agents: Agents) -> None:
    for agent in agents:
        agent.kill()
        agent.communicate()


@pytest.mark.timeout(900)
def test_the_writing_node_loses_power_and_the_other_resumes(nfs_lab: None) -> None:
    whole = Training("whole")
    whole.to_the_end(1, ["n1", "n2"])

    cut = Training("cut")
    agents = cut.start(1, ["n1", "n2"])
    try:
        wait_for("two checkpoints", lambda: cut.saved() >= 2 * SAVED_EVERY or ended(agents), timeout_s=300)
        assert not ended(agents), cut.said(1)
        lab("fault", "power-cut", "n1")  # rank 0, with all that its kernel had not yet sent
        with Guest("n2") as n2:
            assert n2.ask("end_node", node="n2")["ended"] >= 2  # agent and worker
    finally:
        stop(agents)
    at = cut.saved()
    assert 2 * SAVED_EVERY <= at < STEPS

    lab("up")
    cut.to_the_end(2, ["n2", "n1"])  # the rendezvous is on the node that lived
    assert events(SHARED, cut.id, "start")[-1]["resumed_from"] == at
    assert_same_bits(final_state(SHARED, whole.id), final_state(SHARED, cut.id))
