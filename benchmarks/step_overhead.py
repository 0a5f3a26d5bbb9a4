"""What our training loop costs: steps/s of the real worker against a bare DDP loop, two Gloo processes on this CPU.

    python benchmarks/step_overhead.py [--rounds 6] [--seconds 5] [--only ddp_linear]

Both use the same model, optimizer, data, batch and order (a shuffled permutation, one index operation per batch), under
torchrun with OMP_NUM_THREADS=1. Ours runs through ``clusterrun.train.worker`` and logs every 10 steps, the default; its
times come from its step events, which cover all that is done between them. Neither validates nor saves in that time.

Rounds alternate. Each run is cut into windows of 200 steps, without the first second; a window of ours holds about one
poll. Of all windows of a side the time at the lower quartile counts: what others do on a shared machine only ever makes
a window longer, by far more than what is measured here, while overhead of the loop is in every window.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.schema import CheckpointConfig, ClusterConfig, Optimizer, RunConfig, TrainConfig
from clusterrun.rundir import RunDir, read_json_lines

GOAL = 0.97
RANKS = 2
LOG_EVERY = 10
WINDOW_STEPS = 200
SETTLE_S = 1.0


def configs() -> dict[str, RunConfig]:
    """The measured runs; ``max_steps`` is set later, to fill the time."""
    common: dict[str, Any] = {"epochs": 10**6, "validate_every_steps": 10**9, "log_every_steps": LOG_EVERY}
    small = {"layers": 1, "width": 64, "context": 64}
    trains = {
        "ddp_linear": TrainConfig(task="linear", batch_per_rank=32, **common),
        "gpt": TrainConfig(task="gpt", task_args=small, batch_per_rank=4, optimizer=Optimizer.adamw, lr=1e-3, **common),
    }
    cluster, checkpoint = ClusterConfig(nproc_per_node=RANKS), CheckpointConfig(every_steps=None)
    return {name: RunConfig(cluster=cluster, train=train, checkpoint=checkpoint) for name, train in trains.items()}


def torchrun(*arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)


def ours(config: RunConfig, steps: int, directory: Path) -> list[float]:
    """Seconds of every ``LOG_EVERY`` steps in the worker."""
    config.train.max_steps = steps
    run = RunDir.create(directory, "bench")
    run.config.write_text(frozen.to_yaml(config))
    attempt = run.attempt(0)
    attempt.make()
    torchrun("-m", "clusterrun.train.worker", "--run-dir", str(run.root), "--attempt", "0")
    (file,) = attempt.event_files(rank=0)
    steps_logged = [event for event in read_json_lines(file) if event["kind"] == "step"]
    return [
        event["step_time_s"] * LOG_EVERY
        for before, event in pairwise(steps_logged)
        if event["step"] - before["step"] == LOG_EVERY
    ]


def bare(name: str, steps: int, directory: Path) -> list[float]:
    """Seconds of every ``LOG_EVERY`` steps in the loop below."""
    answer = directory / "answer.json"
    torchrun(__file__, "--bare", name, str(steps), str(answer))
    marks: list[float] = json.loads(answer.read_text())
    return [end - start for start, end in pairwise(marks)]


def bare_loop(name: str, steps: int, answer: Path) -> None:
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
    done, marks = 0, []
    while done < steps:
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(done))
        for start in range(0, len(data.train) - RANKS * batch + 1, RANKS * batch):
            first = start + rank * batch
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, data.train.batch(order[first : first + batch])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if done % LOG_EVERY == 0:
                marks.append(time.perf_counter())
    if rank == 0:
        answer.write_text(json.dumps(marks))
    dist.destroy_process_group()
    os._exit(0)  # an ordinary exit of torch 2.13 aborts in one of four runs here: "terminate called without ..."


def windows(parts: list[float]) -> list[float]:
    """Milliseconds per step in windows of ``WINDOW_STEPS``, from the times of ``LOG_EVERY`` steps each."""
    settled, elapsed = 0, 0.0
    while elapsed < SETTLE_S:
        elapsed += parts[settled]
        settled += 1
    size = WINDOW_STEPS // LOG_EVERY
    rest = parts[settled:]
    return [sum(rest[i : i + size]) / WINDOW_STEPS * 1000 for i in range(0, len(rest) - size + 1, size)]


def quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each run")
    parser.add_argument("--only", choices=list(configs()), help="measure this one alone")
    parser.add_argument("--bare", nargs=3, metavar=("NAME", "STEPS", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare_loop(args.bare[0], int(args.bare[1]), Path(args.bare[2]))
        return
    for name, config in configs().items():
        if args.only in (None, name):
            measure(name, config, args.rounds, args.seconds)


def measure(name: str, config: RunConfig, rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="clusterrun-bench-") as directory:
        few = bare(name, 3 * WINDOW_STEPS, Path(directory))
    steps = int((seconds + SETTLE_S) / (statistics.median(few) / LOG_EVERY)) + 2 * WINDOW_STEPS
    found: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(rounds):
        for which in ("bare", "ours") if number % 2 else ("ours", "bare"):
            with tempfile.TemporaryDirectory(prefix="clusterrun-bench-") as directory:
                place = Path(directory)
                found[which] += windows(bare(name, steps, place) if which == "bare" else ours(config, steps, place))
        medians = {which: statistics.median(times) for which, times in found.items()}
        fastest = {which: quartile(times) for which, times in found.items()}
        print(
            f"{name}, {number + 1} round(s): ms per step, lower quartile: bare {fastest['bare']:.3f} "
            f"ours {fastest['ours']:.3f}; median: bare {medians['bare']:.3f} ours {medians['ours']:.3f}",
            flush=True,
        )
    ratio = fastest["bare"] / fastest["ours"]
    print(f"step_overhead {name} ratio={ratio:.3f} (goal >= {GOAL})", flush=True)


if __name__ == "__main__":
    main()
