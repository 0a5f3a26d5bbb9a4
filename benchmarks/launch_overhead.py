"""From submission to the first training step on the Slurm lab, against a bare sbatch + srun torchrun of the same step.

Both train the same task with the same worker; ours adds the conductor, preflight on every node and the run directory.
Goal: at most 1.15x. Needs the lab (scripts/slurm_lab up). Which of the two comes first alternates, and both begin on
nodes that are done with the job before: most of a start is six imports of torch on a few busy cores, and its length
differs by a tenth from one time to the next whoever starts it.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.validate import validated
from clusterrun.rundir import RunDir

ROUNDS = int(os.environ.get("ROUNDS", "8"))
GOAL = 1.15
JOB = ["+cluster=lab", "cluster.nodes=2", "cluster.nproc_per_node=2", "train=ddp_linear", "train.max_steps=20"]


def printed(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def first_step(run: RunDir, job: str) -> float:
    """Unix time at which rank 0 was ready for its first step; waits for the job to end and its nodes to be idle."""
    end = time.monotonic() + 120
    while printed("squeue", "-h", "-j", job) or printed("sinfo", "-h", "-N", "-t", "completing"):
        if time.monotonic() > end:
            raise SystemExit(f"job {job} does not end; see {run.root}")
        time.sleep(0.2)
    (events,) = run.attempt(1).event_files(0)
    for line in events.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "ready":
            return float(record["t"])
    raise SystemExit(f"{events}: no first step")


def ours(shared: Path, name: str) -> float:
    begin = time.time()
    argv = [sys.executable, "-m", "clusterrun", *JOB, f"run_id={name}"]
    subprocess.run(argv, check=True, capture_output=True)
    run = RunDir.open(shared / "runs" / name)
    return first_step(run, json.loads(run.job.read_text())["job_id"]) - begin


def bare(shared: Path, name: str) -> float:
    run = RunDir.create(shared, name)
    run.config.write_text(frozen.to_yaml(validated(compose(JOB))))
    run.attempt(1).make()
    worker = f"-m clusterrun.train.worker --run-dir {shlex.quote(str(run.root))} --attempt 1"
    torchrun = (
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
    )
    script = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=a100:2 --partition=main --time=60
#SBATCH --output={run.root}/bare.out
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
srun --cpus-per-task=2 {torchrun} --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:29400 {worker}
"""
    begin = time.time()
    sent = subprocess.run(["sbatch", "--parsable"], input=script, check=True, capture_output=True, text=True)
    return first_step(run, sent.stdout.strip()) - begin


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CLUSTERRUN_SHARED_DIR"] = scratch
        shared = Path(scratch)
        ours(shared, "warm-up")
        with_us: list[float] = []
        without: list[float] = []
        for i in range(ROUNDS):
            turns = [(ours, with_us), (bare, without)]
            for start, times in turns if i % 2 == 0 else reversed(turns):
                times.append(start(shared, f"{start.__name__}-{i}"))
            print(f"round {i + 1}: clusterrun {with_us[-1]:.2f} s, bare {without[-1]:.2f} s", flush=True)
    ratio = statistics.median(with_us) / statistics.median(without)
    print(f"launch_overhead ratio={ratio:.2f} (goal <= {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
