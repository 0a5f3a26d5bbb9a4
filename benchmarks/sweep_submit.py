"""Submitting a sweep of many points over ten shapes to the lab, against plain submitit map_array of the same points.

All sides submit one array per shape to the same Slurm, held, so that nothing but the submission is measured, and have
their jobs cancelled. Ours composes, checks and plans each point, writes its run directory, and asks for the expected
starts. Two plain sides:

- a script of one's own: Hydra's sweeper and launcher give the configs, ``executor.map_array`` takes them;
- ``map_array`` alone, in an interpreter of its own that imports submitit and unpickles ready-made configs: nothing is
  composed or checked, and no point has a directory.

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
HELD = "cluster.slurm.extra.hold=true"

# What stands for a user's own script: Hydra's application with its own sweeper and launcher, then submitit.
PLAIN = """
import json, pickle, sys, time
import hydra, submitit
from clusterrun.config.compose import _register
from hydra.core.hydra_config import HydraConfig

_register()
configs = []

@hydra.main(config_path="pkg://clusterrun.conf", config_name="clusterrun", version_base="1.3")
def collect(config):
    configs.append(config)

began = time.perf_counter()
folder, sys.argv[1:] = sys.argv[1], sys.argv[2:]
collect()
composed = time.perf_counter()
from map_alone import submit, work
submit(folder, configs)
submitted = time.perf_counter()
print(json.dumps({"points": len(configs), "compose": composed - began, "submit": submitted - composed}))
from omegaconf import OmegaConf
with open(folder + "/configs.pkl", "wb") as file:  # for map_array alone, as plain dictionaries
    pickle.dump([OmegaConf.to_container(config, resolve=True) for config in configs], file)
"""

MAP_ALONE = """
import pickle, sys
import submitit

def work(config):
    return 0

def submit(folder, configs):
    shapes = {}
    for config in configs:
        shapes.setdefault(config["cluster"]["cpus_per_proc"], []).append(config)
    for cpus, members in shapes.items():
        executor = submitit.SlurmExecutor(folder=folder)
        executor.update_parameters(
            job_name="plain-sweep", nodes=1, cpus_per_task=cpus, time=60, partition="main", use_srun=False,
            array_parallelism=len(members), additional_parameters={"hold": True},
        )
        executor.map_array(work, members)

if __name__ == "__main__":
    with open(sys.argv[1] + "/configs.pkl", "rb") as file:
        submit(sys.argv[1], pickle.load(file))
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


def timed(argv: list[str], env: dict[str, str], job_name: str) -> tuple[float, str]:
    """Seconds, and what it printed. Its jobs are cancelled."""
    begin = time.perf_counter()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=env["CLUSTERRUN_SHARED_DIR"], check=False)
    seconds = time.perf_counter() - begin
    subprocess.run(["scancel", f"--name={job_name}"], check=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return seconds, done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        place = Path(scratch)
        env = {**os.environ, "CLUSTERRUN_SHARED_DIR": scratch}
        env["PATH"] = f"{counting_sbatch(place)}{os.pathsep}{env['PATH']}"
        (place / "calls").write_text("")
        (place / "plain.py").write_text(PLAIN)
        (place / "map_alone.py").write_text(MAP_ALONE)
        with_us, script, alone = [], [], []
        for i in range(ROUNDS):
            ours = [sys.executable, "-m", "clusterrun", "-m", *JOB, HELD, *GRID, f"run_id=bench-{i}"]
            seconds, _ = timed(ours, env, f"bench-{i}")
            with_us.append(seconds)
            calls = submissions(place)
            jobs = [json.loads(p.read_text())["job_id"] for p in (place / "sweeps" / f"bench-{i}").glob("*/job.json")]
            print(f"clusterrun: {len(set(jobs))} jobs, {calls} sbatch calls that submit, {seconds:.1f} s", flush=True)
            folder = str(place / f"plain-{i}")
            plain = [sys.executable, str(place / "plain.py"), folder, "-m", *JOB[1:], "cluster=lab"]
            seconds, said = timed([*plain, *GRID, f"hydra.sweep.dir={place}/hydra"], env, "plain-sweep")
            script.append(seconds)
            parts = json.loads(said.splitlines()[-1])
            print(
                f"Hydra's sweeper and map_array: {parts['points']} jobs, {submissions(place)} sbatch calls, "
                f"{seconds:.1f} s, of which composing {parts['compose']:.1f} s, map_array {parts['submit']:.1f} s",
                flush=True,
            )
            seconds, _ = timed([sys.executable, str(place / "map_alone.py"), folder], env, "plain-sweep")
            alone.append(seconds)
            print(f"map_array alone: {submissions(place)} sbatch calls, {seconds:.1f} s", flush=True)
    per_point = 1e3 * min(with_us) / POINTS
    ratio, literal = min(with_us) / min(script), min(with_us) / min(alone)
    print(
        f"sweep_submit ratio={ratio:.2f} against Hydra's sweeper and map_array, {literal:.2f} against map_array alone "
        f"(goal <= {GOAL}), {per_point:.1f} ms per point against {1e3 * min(alone) / POINTS:.1f}, sbatch calls {calls}"
    )
    return 0 if literal <= GOAL and calls == SHAPES else 1


if __name__ == "__main__":
    raise SystemExit(main())
