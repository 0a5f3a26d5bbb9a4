"""Submitting a sweep of many points over ten shapes to the lab, against plain submitit map_array of the same points.

Both compose the points with Hydra from the same command line, submit one array per shape to the same Slurm, and have
their jobs cancelled. The plain side is what a script of one's own does: Hydra's sweeper and launcher give the configs,
``executor.map_array`` takes them. Ours also plans, checks and writes a run directory for each point, and asks for the
expected starts. The time of the submission alone, without composing, is printed too.

Goal: at most 1.2x per point, and one sbatch per shape (and MaxArraySize block). Needs the lab (scripts/slurm_lab up).
POINTS=1000 ROUNDS=1 by default.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POINTS = int(os.environ.get("POINTS", "1000"))
ROUNDS = int(os.environ.get("ROUNDS", "1"))
SHAPES = 10
GOAL = 1.2
GRID = [f"cluster.cpus_per_proc=range(1,{SHAPES + 1})", f"seed=range(0,{POINTS // SHAPES})"]
JOB = ["+cluster=lab", "cluster.nodes=1", "cluster.nproc_per_node=1", "train=ddp_linear"]

# What stands for a user's own script: Hydra's application with its own sweeper and launcher, then submitit.
PLAIN = """
import json, sys, time
import hydra, submitit
from clusterrun.config.compose import _register
from hydra.core.hydra_config import HydraConfig

_register()
configs = []

@hydra.main(config_path="pkg://clusterrun.conf", config_name="clusterrun", version_base="1.3")
def collect(config):
    configs.append(config)

def work(config):
    return 0

began = time.perf_counter()
folder, sys.argv[1:] = sys.argv[1], sys.argv[2:]
collect()
composed = time.perf_counter()
shapes = {}
for config in configs:
    shapes.setdefault(config.cluster.cpus_per_proc, []).append(config)
for cpus, members in shapes.items():
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(
        job_name="plain-sweep", nodes=1, cpus_per_task=cpus, time=60, partition="main", use_srun=False,
        array_parallelism=len(members),
    )
    executor.map_array(work, members)
print(json.dumps({"points": len(configs), "compose": composed - began, "submit": time.perf_counter() - composed}))
"""


def counting_sbatch(place: Path) -> Path:
    """A directory for PATH whose sbatch keeps count."""
    (place / "bin").mkdir()
    script = place / "bin" / "sbatch"
    script.write_text(f'#!/bin/sh\necho "$1" >> {place}/calls\nexec {shutil.which("sbatch")} "$@"\n')
    script.chmod(0o755)
    return place / "bin"


def submissions(place: Path) -> int:
    lines = (place / "calls").read_text().splitlines()
    (place / "calls").write_text("")
    return sum(1 for line in lines if line != "--test-only")


def main() -> int:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        env = {**os.environ, "CLUSTERRUN_SHARED_DIR": scratch}
        env["PATH"] = f"{counting_sbatch(place)}{os.pathsep}{env['PATH']}"
        (place / "calls").write_text("")
        (place / "plain.py").write_text(PLAIN)
        with_us, without = [], []
        for i in range(ROUNDS):
            begin = time.perf_counter()
            ours = [sys.executable, "-m", "clusterrun", "-m", *JOB, *GRID, f"run_id=bench-{i}"]
            done = subprocess.run(ours, env=env, capture_output=True, text=True, cwd=scratch, check=False)
            with_us.append(time.perf_counter() - begin)
            subprocess.run(["scancel", f"--name=bench-{i}"], check=True)
            if done.returncode:
                raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
            calls = submissions(place)
            jobs = [json.loads(p.read_text())["job_id"] for p in (place / "sweeps" / f"bench-{i}").glob("*/job.json")]
            print(
                f"clusterrun: {len(set(jobs))} jobs, {calls} sbatch calls that submit, {with_us[-1]:.1f} s", flush=True
            )
            plain = [sys.executable, str(place / "plain.py"), str(place / f"plain-{i}"), "-m", *JOB[1:], "cluster=lab"]
            plain += [*GRID, f"hydra.sweep.dir={place}/hydra"]
            begin = time.perf_counter()
            done = subprocess.run(plain, env=env, capture_output=True, text=True, cwd=scratch, check=False)
            without.append(time.perf_counter() - begin)
            subprocess.run(["scancel", "--name=plain-sweep"], check=True)
            if done.returncode:
                raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
            parts = json.loads(done.stdout.splitlines()[-1])
            print(
                f"plain submitit: {parts['points']} jobs, {submissions(place)} sbatch calls, {without[-1]:.1f} s, "
                f"of which composing {parts['compose']:.1f} s, map_array {parts['submit']:.1f} s",
                flush=True,
            )
    ratio = min(with_us) / min(without)
    per_point = 1e3 * min(with_us) / POINTS
    print(f"sweep_submit ratio={ratio:.2f} (goal <= {GOAL}), {per_point:.1f} ms per point, sbatch calls {calls}")
    return 0 if ratio <= GOAL and calls == SHAPES else 1


if __name__ == "__main__":
    raise SystemExit(main())
