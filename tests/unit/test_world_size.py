"""Resuming with 4, then 2, then 3 ranks: every sample of the epoch is used once, and the state goes on bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from clusterrun.config import frozen
from clusterrun.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    Optimizer,
    RunConfig,
    TrainConfig,
)
from clusterrun.rundir import RunDir, read_json_lines
from clusterrun.train import mesh, session, snapshot
from clusterrun.train.events import EventLog
from clusterrun.train.stopping import StopFlag
from clusterrun.train.task import Batch, DataSpec
from clusterrun.train.tasks import Classifier

WORLDS, GLOBAL, SAMPLES = (4, 2, 3), 12, 250
STOP_AFTER = (5, 7, None)  # optimizer steps in each attempt; the rest of two epochs of 20 steps in the last


class Noting(Classifier):
    """Notes the samples it is given, by their first feature, and is told to stop after some steps."""

    def __init__(self, stop_after: int | None) -> None:
        self.flag, self.stop_after = StopFlag(), stop_after
        self.seen: list[list[float]] = []

    def build_model(self, data: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Linear(data.features, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, data.classes))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.seen.append(batch[0][:, 0].tolist())
        if self.stop_after is not None and len(self.seen) == self.stop_after + 1:  # the first call is the warm-up
            self.flag.received = signal.SIGTERM
        return super().loss(model, batch)


def state_of(trainer: Any) -> dict[str, list[float]]:
    return {k: v.double().flatten().tolist() for k, v in snapshot.take(trainer.module, trainer.optimizer).items()}


def on_rank(rank: int, ports: list[int], directory: Path) -> None:
    """All attempts in the same processes, whose start takes seconds; those beyond the world size sit one out."""
    torch.set_num_threads(1)
    for number, (world, port) in enumerate(zip(WORLDS, ports, strict=True)):
        if rank < world:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
            answer = attempt(rank, world, directory, number)
            (directory / f"{number}.{rank}.json").write_text(json.dumps(answer))
            dist.destroy_process_group()


def attempt(rank: int, world: int, directory: Path, number: int) -> dict[str, Any]:
    """One attempt; the samples of each step and the state at its begin and end."""
    place = mesh.Place(mesh.data_parallel_mesh("cpu", world), rank, world, torch.device("cpu"), "gloo")
    run = RunDir(directory / "run")
    task = Noting(STOP_AFTER[number])
    file = run.attempt(number).event_file("node", rank)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(session, "load_task", lambda *_: task)
        made = session.make_trainer(frozen.load(run.config), run, number, place, EventLog(file, rank), task.flag)
        made.poll.every_s = 0
        begin = made.position.step
        before = state_of(made)
        made.run()
    answer = {"begin": begin, "end": made.position.step, "seen": task.seen[1:]}
    return {**answer, "before": before, "after": state_of(made)}


def test_four_then_two_then_three(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    config = RunConfig(
        seed=3,
        cluster=ClusterConfig(nproc_per_node=4),
        train=TrainConfig(task="noting", global_batch=GLOBAL, epochs=2, optimizer=Optimizer.adamw, lr=1e-3),
        data=DataConfig(samples=SAMPLES),
        checkpoint=CheckpointConfig(every_steps=2, async_save=True),
    )
    run.config.write_text(frozen.to_yaml(config))
    steps: list[list[float]] = []  # the samples of every step, over all ranks
    after: dict[str, list[float]] = {}
    for number in range(len(WORLDS)):
        run.attempt(number).make()
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in WORLDS]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in sockets]
    spawn(on_rank, args=(ports, tmp_path), nprocs=max(WORLDS))  # type: ignore[no-untyped-call]
    for number, world in enumerate(WORLDS):
        of_rank = [json.loads((tmp_path / f"{number}.{rank}.json").read_text()) for rank in range(world)]
        assert all(answer["begin"] == len(steps) for answer in of_rank)
        assert all(len(samples) == GLOBAL // world for answer in of_rank for samples in answer["seen"])
        done = of_rank[0]["end"] - of_rank[0]["begin"]
        assert STOP_AFTER[number] in (None, done)
        steps += [list(chain.from_iterable(answer["seen"][i] for answer in of_rank)) for i in range(done)]
        assert all(answer["before"] == after for answer in of_rank) or number == 0
        after = of_rank[0]["after"]
        assert all(answer["after"] == after for answer in of_rank)
    assert len(steps) == 40
    train = set(chain.from_iterable(steps))
    for epoch in (steps[:20], steps[20:]):
        used = list(chain.from_iterable(epoch))
        assert len(used) == len(set(used)) == 240  # none twice; the 10 left over make no global batch
    assert len(train) <= SAMPLES
    resumed = [list(read_json_lines(run.attempt(n).event_file("node", 0))) for n in (1, 2)]
    notes = [event["message"] for events in resumed for event in events if event["kind"] == "warning"]
    assert ["written by 4 ranks, now there are 2" in notes[0], "written by 2 ranks, now there are 3" in notes[1]]
    assert len(notes) == 2
