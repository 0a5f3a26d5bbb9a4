"""What our training loop costs: steps/s of the real worker against a bare DDP loop, two Gloo processes on this CPU.

    python benchmarks/step_overhead.py [--rounds 3] [--seconds 15] [--only ddp_linear]

Both use the same model, optimizer, data, batch and order (a shuffled permutation, one index operation per batch), under
torchrun with OMP_NUM_THREADS=1. Ours runs through ``clusterrun.train.worker`` and logs every 10 steps, the default. In
the measured time neither validates nor saves.

A shared machine's speed drifts by more than what is measured here. So both are alive at once and take turns: every half
second the workers of one are stopped (SIGSTOP) and those of the other go on (SIGCONT). Speed is steps over the time a
side was allowed to run. The result is the median over rounds of the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.schema import CheckpointConfig, ClusterConfig, Optimizer, RunConfig, TrainConfig
from clusterrun.rundir import RunDir, read_json_lines

GOAL = 0.97
RANKS = 2
TURN_S = 0.5


def configs() -> dict[str, RunConfig]:
    """The measured runs; ``max_steps`` is set later, to fill the time."""
    common: dict[str, Any] = {"epochs": 10**6, "validate_every_steps": 10**9}
    small = {"layers": 1, "width": 64, "context": 64}
    trains = {
        "ddp_linear": TrainConfig(task="linear", batch_per_rank=32, **common),
        "gpt": TrainConfig(task="gpt", task_args=small, batch_per_rank=4, optimizer=Optimizer.adamw, lr=1e-3, **common),
    }
    cluster, checkpoint = ClusterConfig(nproc_per_node=RANKS), CheckpointConfig(every_steps=None)
    return {name: RunConfig(cluster=cluster, train=train, checkpoint=checkpoint) for name, train in trains.items()}


@dataclass
class Side:
    """A torchrun whose workers write JSON lines: one of kind "ready" before the first step, "step" after the last."""

    arguments: list[str]
    report: Path
    steps: int
    turns: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        """Start, and stop the workers at the first step."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *self.arguments], env=environment, stdout=subprocess.DEVNULL)
        began = time.time()
        while self._time("ready") is None:
            if self.process.poll() is not None:
                raise SystemExit(f"ended before the first step: {' '.join(self.arguments)}")
            time.sleep(0.002)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.workers = [int(pid) for pid in children.split()]
        self._signal(signal.SIGSTOP)
        self.turns.append((began, time.time()))

    def turn(self) -> None:
        began = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(TURN_S)
        self._signal(signal.SIGSTOP)
        self.turns.append((began, time.time()))

    def finished(self) -> bool:
        return self._time("step") is not None

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self.process.wait()

    def rate(self) -> float:
        """Steps per second of its own turns."""
        begin, end = self._time("ready"), self._time("step")
        assert begin is not None
        assert end is not None
        return self.steps / sum(max(0.0, min(until, end) - max(since, begin)) for since, until in self.turns)

    def _time(self, kind: str) -> float | None:
        for event in read_json_lines(self.report):
            if event["kind"] == kind and (kind != "step" or event["step"] == self.steps):
                return float(event["t"])
        return None

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.workers:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def bare_side(name: str, steps: int, directory: Path) -> Side:
    report = directory / "bare.jsonl"
    return Side([__file__, "--bare", name, str(steps), str(report)], report, steps)


def our_side(config: RunConfig, steps: int, directory: Path) -> Side:
    run = RunDir.create(directory, "ours")
    config.train.max_steps = steps
    run.config.write_text(frozen.to_yaml(config))
    attempt = run.attempt(0)
    attempt.make()
    os.environ["CLUSTERRUN_NODE"] = "bench"
    arguments = ["-m", "clusterrun.train.worker", "--run-dir", str(run.root), "--attempt", "0"]
    return Side(arguments, attempt.event_file("bench", 0), steps)


def measure(name: str, config: RunConfig, steps: int) -> tuple[float, float]:
    """Steps per second, bare and ours, of one round."""
    with tempfile.TemporaryDirectory(prefix="clusterrun-bench-") as directory:
        bare, ours = bare_side(name, steps, Path(directory)), our_side(config, steps, Path(directory))
        for side in (bare, ours):
            side.start()
        while not (bare.finished() and ours.finished()):
            for side in (bare, ours):
                side.turn()
        for side in (bare, ours):
            side.end()
        return bare.rate(), ours.rate()


def bare_loop(name: str, steps: int, report: Path) -> None:
    """What one would write by hand: DDP, an optimizer, and a permutation of the data per epoch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from clusterrun.train.data import load_data
    from clusterrun.train.optim import make_optimizer
    from clusterrun.train.task import load_task

    config = configs()[name]
    assert config.train.task is not None
    assert config.train.batch_per_rank is not None
    dist.init_process_group("gloo")
    rank, batch = dist.get_rank(), config.train.batch_per_rank
    task = load_task(config.train.task, config.train.task_args)
    data = load_data(config.data, config.seed, task.context, torch.device("cpu"))
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(task.build_model(data.spec), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model.module, config.train)
    task.loss(model, data.train.batch(torch.arange(batch))).backward()  # not measured, nor is our warm-up
    times = [("ready", 0, time.time())]
    if rank == 0:
        report.write_text(_line(*times[0]))
    done = 0
    while done < steps:
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(done))
        for start in range(0, len(data.train) - RANKS * batch + 1, RANKS * batch):
            first = start + rank * batch
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, data.train.batch(order[first : first + batch])).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    if rank == 0:
        report.write_text(_line(*times[0]) + _line("step", steps, time.time()))
    dist.destroy_process_group()


def _line(kind: str, step: int, t: float) -> str:
    return json.dumps({"kind": kind, "step": step, "t": t}) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="running time of each side in a round")
    parser.add_argument("--only", choices=list(configs()), help="measure this one alone")
    parser.add_argument("--bare", nargs=3, metavar=("NAME", "STEPS", "REPORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare_loop(args.bare[0], int(args.bare[1]), Path(args.bare[2]))
        return
    for name, config in configs().items():
        if args.only not in (None, name):
            continue
        steps = max(50, int(measure(name, config, 500)[0] * args.seconds))
        ratios = []
        for _ in range(args.rounds):
            bare, ours = measure(name, config, steps)
            ratios.append(ours / bare)
            print(f"{name}: bare {bare:.1f}  ours {ours:.1f} steps/s  ratio {ratios[-1]:.3f}", flush=True)
        print(f"step_overhead {name} ratio={statistics.median(ratios):.2f} (goal >= {GOAL})", flush=True)


if __name__ == "__main__":
    main()
