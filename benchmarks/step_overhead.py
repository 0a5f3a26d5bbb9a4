"""What our training loop costs: steps/s of the trainer against a bare DDP loop, two Gloo processes on this CPU.

    python benchmarks/step_overhead.py [--rounds 5] [--pairs 60] [--only ddp_linear]

Both loops have the same model, optimizer, data, batch and order (a shuffled permutation, one index operation a batch).
They take turns *in the same two processes*, under torchrun with OMP_NUM_THREADS=1: a window of steps of the trainer as
the worker makes it, with its polls, its events (every 10 steps, the default) and its signs of life, then one of the
bare loop. Neither validates nor saves. A pair of processes for each would measure something else: how their threads
come to lie on two cores decides a step's time for seconds, and makes two runs of the bare loop alone differ by up to
30 %. For the same reason the windows are short and many, and the time of all of a round's windows counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterrun import pulse
from clusterrun.config import frozen
from clusterrun.config.schema import CheckpointConfig, ClusterConfig, Optimizer, RunConfig, TrainConfig
from clusterrun.rundir import RunDir
from clusterrun.train import mesh, session
from clusterrun.train.events import EventLog
from clusterrun.train.optim import make_optimizer
from clusterrun.train.stopping import StopFlag
from clusterrun.train.trainer import Trainer

GOAL = 0.97
RANKS = 2
WINDOW_STEPS = 100
SETTLING_PAIRS = 10  # DDP's first steps and the first polls, which come close together


def configs() -> dict[str, RunConfig]:
    """The measured runs; ``max_steps`` is set later."""
    common: dict[str, Any] = {"epochs": 10**6, "validate_every_steps": 10**9, "log_every_steps": 10}
    small = {"layers": 1, "width": 64, "context": 64}
    trains = {
        "ddp_linear": TrainConfig(task="linear", batch_per_rank=32, **common),
        "gpt": TrainConfig(task="gpt", task_args=small, batch_per_rank=4, optimizer=Optimizer.adamw, lr=1e-3, **common),
    }
    cluster, checkpoint = ClusterConfig(nproc_per_node=RANKS), CheckpointConfig(every_steps=None)
    return {name: RunConfig(cluster=cluster, train=train, checkpoint=checkpoint) for name, train in trains.items()}


def bare_steps(trainer: Trainer) -> Iterator[None]:
    """What one would write by hand: DDP, an optimizer, and a permutation of the data per epoch."""
    config, task, data = trainer.config, trainer.task, trainer.data
    rank, batch = trainer.place.rank, trainer.batch.per_rank
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(task.build_model(data.spec), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.module, config.train)
    epoch = 0
    while True:
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(data.train) - RANKS * batch + 1, RANKS * batch):
            first = start + rank * batch
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, data.train.batch(order[first : first + batch])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield
        epoch += 1


@dataclass
class Turns:
    """Sits where the trainer's profiler sits, is asked before every step, and lets the bare loop have its turns.

    Attributes:
        pairs: milliseconds per step, (bare, ours), of neighbouring windows.
    """

    trainer: Trainer
    pairs: list[tuple[float, float]] = field(default_factory=list)
    problem: str = ""
    written: str = ""

    def __post_init__(self) -> None:
        self._bare = bare_steps(self.trainer)
        self._began: float | None = None

    def before(self, step: int) -> None:
        if step % WINDOW_STEPS != 1:
            return
        start = time.perf_counter()
        for _ in range(WINDOW_STEPS):
            next(self._bare)
        end = time.perf_counter()
        if self._began is not None:
            self.pairs.append((1000 * (end - start) / WINDOW_STEPS, 1000 * (start - self._began) / WINDOW_STEPS))
        self.trainer.poll.exclude_pause()  # or it would take our steps for slower, and poll less often
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Nothing to do at the end of a run."""


def worker(run_dir: RunDir, answer: Path) -> None:
    """A rank: the trainer as ``clusterrun.train.worker`` makes it, and the bare loop in its turns."""
    flag = StopFlag()
    flag.install()
    config = frozen.load(run_dir.config)
    place = mesh.join(config.cluster.accelerator, session.COLLECTIVE_TIMEOUT_S)
    events = EventLog(run_dir.attempt(0).event_file("bench", place.rank), place.rank)
    trainer = session.make_trainer(config, run_dir, 0, place, events, flag)
    turns = Turns(trainer)
    trainer.profiler = turns  # type: ignore[assignment]
    trainer.run()
    if place.rank == 0:
        answer.write_text(json.dumps(turns.pairs[SETTLING_PAIRS:]))
    torch.distributed.barrier()
    os._exit(0)  # an ordinary exit of torch 2.13 aborts in one of four runs here: "terminate called without ..."


def measure(config: RunConfig, pairs: int) -> list[tuple[float, float]]:
    """Milliseconds per step, (bare, ours), of so many pairs of windows in one pair of processes."""
    config.train.max_steps = (pairs + SETTLING_PAIRS) * WINDOW_STEPS + 1
    with tempfile.TemporaryDirectory(prefix="clusterrun-bench-") as place:
        run, answer, signs = RunDir.create(Path(place), "bench"), Path(place) / "answer.json", Path(place) / "pulse"
        run.config.write_text(frozen.to_yaml(config))
        run.attempt(0).make()
        signs.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", pulse.DIRECTORY: str(signs)}
        command += [__file__, "--worker", str(run.root), str(answer)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [(bare, ours) for bare, ours in json.loads(answer.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes, one after another")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of windows in each")
    parser.add_argument("--only", choices=list(configs()), help="measure this one alone")
    parser.add_argument("--worker", nargs=2, metavar=("RUN_DIR", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(RunDir.open(Path(args.worker[0])), Path(args.worker[1]))
        return
    for name, config in configs().items():
        if args.only not in (None, name):
            continue
        ratios: list[float] = []
        for number in range(args.rounds):
            pairs = measure(config, args.pairs)
            bare, ours = (statistics.mean(times) for times in zip(*pairs, strict=True))
            ratios.append(bare / ours)
            print(
                f"{name}, round {number + 1}: ms per step: bare {bare:.3f} ours {ours:.3f}, {ratios[-1]:.3f}",
                flush=True,
            )
        ratio = statistics.median(ratios)
        print(f"step_overhead {name} ratio={ratio:.3f} (goal >= {GOAL})", flush=True)


if __name__ == "__main__":
    main()
