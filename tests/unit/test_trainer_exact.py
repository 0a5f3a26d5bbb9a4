"""The promise: stopped and resumed any number of times, a run ends with the bits of an undisturbed one. 3 Gloo ranks.

With 3 ranks an all-reduce adds up in an order that depends on where in a bucket a value lies, so wrong buckets show.
Every second disturbed run saves in the background, the undisturbed ones do not. Every "attempt" here makes a new model,
optimizer and trainer from what is on disk; real processes are stopped and started in test_trainer_worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import signal
import socket
from dataclasses import dataclass, field
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
    GradCompression,
    Optimizer,
    Precision,
    RunConfig,
    Schedule,
    TrainConfig,
)
from clusterrun.rundir import RunDir, read_json_lines
from clusterrun.train import mesh, session, snapshot, trainer
from clusterrun.train.events import EventLog
from clusterrun.train.stopping import StopFlag
from clusterrun.train.task import Batch, DataSpec
from clusterrun.train.tasks import Classifier

WORLD, STEPS, ROUNDS = 3, 40, 2


@dataclass
class Variant:
    train: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    batch_norm: bool = False


VARIANTS = {
    "sgd_momentum": Variant({"momentum": 0.9, "weight_decay": 0.01}),
    "adamw_dropout": Variant({"optimizer": Optimizer.adamw, "lr": 1e-3}, dropout=0.2),
    "fp16_accumulate_clip": Variant(
        {
            "optimizer": Optimizer.adamw,
            "lr": 1e-3,
            "precision": Precision.fp16,
            "accumulate": 2,
            "clip_grad_norm": 0.5,
        },
        dropout=0.1,
    ),
    "fp16_gradients": Variant({"momentum": 0.9, "grad_compression": GradCompression.fp16}),
    "bf16_batch_norm_cosine": Variant(
        {"momentum": 0.9, "precision": Precision.bf16, "schedule": Schedule.cosine, "warmup_steps": 5},
        dropout=0.1,
        batch_norm=True,
    ),
}


class Deep(Classifier):
    """Six layers, so that DDP has several buckets. Rank 1 is told to stop in the ``stop_at``-th call of loss()."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.flag = StopFlag()
        self.stop_at: int | None = None
        self.calls = 0

    def build_model(self, data: DataSpec) -> nn.Module:
        layers: list[nn.Module] = []
        width = data.features
        for _ in range(5):
            layers.append(nn.Linear(width, 200))
            layers += [nn.BatchNorm1d(200)] if self.variant.batch_norm else []
            layers += [nn.ReLU(), nn.Dropout(self.variant.dropout)]
            width = 200
        return nn.Sequential(*layers, nn.Linear(width, data.classes))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls += 1
        if self.calls == self.stop_at and dist.get_rank() == 1:
            self.flag.received = signal.SIGTERM
        return super().loss(model, batch)


@dataclass
class Outcome:
    """What must be the same: a digest of all tensors of this rank, and every logged number of a step."""

    digest: str
    numbers: dict[tuple[str, int], Any]
    stopped_after: list[int]


def train(root: Path, variant: Variant, stops: list[int], async_save: bool = False) -> Outcome:
    """Train to the end in len(stops) + 1 attempts."""
    rank = dist.get_rank()
    place = mesh.Place(mesh.data_parallel_mesh("cpu", WORLD), rank, WORLD, torch.device("cpu"), "gloo")
    config = RunConfig(
        seed=5,
        cluster=ClusterConfig(nproc_per_node=WORLD),
        train=TrainConfig(
            task="deep",
            batch_per_rank=8,
            epochs=10,
            max_steps=STEPS,
            log_every_steps=3,
            validate_every_steps=7,
            bucket_mb=0.2,
            **variant.train,
        ),
        data=DataConfig(samples=300),
        checkpoint=CheckpointConfig(every_steps=7, async_save=async_save),
    )
    run = RunDir(root)
    if rank == 0:
        run.checkpoints.mkdir(parents=True)
        run.config.write_text(frozen.to_yaml(config))
        for number in range(len(stops) + 1):
            run.attempt(number).make()
    dist.barrier()
    numbers: dict[tuple[str, int], Any] = {}
    stopped_after = []
    for number, stop in enumerate([*stops, None]):
        task = Deep(variant)
        task.stop_at = stop
        file = run.attempt(number).event_file("node", rank)
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.setattr(session, "load_task", lambda *_, task=task: task)
            made = session.make_trainer(config, run, number, place, EventLog(file, rank), task.flag)
            made.poll.every_s = 0  # after every step, so that a stop takes effect where it was asked for
            signalled = made.run()
        assert (signalled is None) == (stop is None)
        stopped_after.append(made.position.step)
        for event in read_json_lines(file):
            if event["kind"] in ("step", "eval"):
                value = (event["loss"], event.get("lr"), event.get("value"))
                key = (event["kind"], event["step"])
                assert numbers.setdefault(key, value) == value, f"{key} was logged twice, differently"
    buckets = made.model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    assert len(buckets["rebuilt_bucket_sizes"].split(",")) >= 3
    digest = hashlib.sha256()
    state = {**snapshot.take(made.module, made.optimizer), **snapshot.take_random(rank, place.device)}
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return Outcome(digest.hexdigest(), numbers, stopped_after)


def on_rank(rank: int, port: int, root: Path, names: list[str], warm_up: bool, answers: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    if not warm_up:
        trainer.Trainer.warm_up = lambda self: None  # type: ignore[method-assign]
    found = {}
    for name in names:
        choose = random.Random(name)
        undisturbed = train(root / name, VARIANTS[name], [])
        accumulate = VARIANTS[name].train.get("accumulate", 1)
        for number in range(ROUNDS):
            stops = [choose.randint(1, 14 * accumulate) for _ in range(choose.randint(1, 3))]
            outcome = train(root / f"{name}-{number}", VARIANTS[name], stops, async_save=number % 2 == 1)
            found[f"{name}: {outcome.stopped_after}"] = (
                outcome.digest == undisturbed.digest,
                outcome.numbers == undisturbed.numbers,
            )
    (answers / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_ranks(tmp_path: Path, names: list[str], warm_up: bool) -> list[dict[str, list[bool]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(on_rank, args=(port, tmp_path / "runs", names, warm_up, tmp_path), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]


def test_stopped_and_resumed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for of_rank in run_ranks(tmp_path, list(VARIANTS), warm_up=True):
        assert of_rank == {case: [True, True] for case in of_rank}
        assert len(of_rank) == len(VARIANTS) * ROUNDS


def test_without_the_warm_up_they_do_not(tmp_path: Path) -> None:
    """So the test above can see what the warm-up is for; should DDP change, the warm-up may go."""
    first, *_ = run_ranks(tmp_path, ["sgd_momentum"], warm_up=False)
    assert not all(same for same, _ in first.values())
