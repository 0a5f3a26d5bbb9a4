"""Sweeps on the real Slurm: one array per resource shape, and nothing lost when the submitting process is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.ledger import Attempt, Ending, Ledger
from clusterrun.rundir import RunDir, SweepDir
from support import environment, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]

GRID = [
    "+cluster=lab",
    "cluster.nproc_per_node=1",
    "train=ddp_linear",
    "cluster.cpus_per_proc=1,2",
    "cluster.nodes=1,2",
    "train.lr=0.05,0.1",
]
# Points that last a while, so that something can happen to them.
SLOW = ["train.task=slow_task:SlowLinear", "train.max_steps=40"]


class Sweeps:
    """The command, with an sbatch in its PATH that keeps count, and may kill the command at one of its calls."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        real = shutil.which("sbatch")
        for part in ("bin", "cwd"):
            (shared / part).mkdir()
        self.calls_file = shared / "calls"
        script = f"""#!/bin/sh
echo "$@" >> {self.calls_file}
{real} "$@" || exit $?
case "$1" in --test-only) exit 0 ;; esac
[ "$(grep -vc test-only {self.calls_file})" = "$KILL_AT" ] && kill -9 $PPID
exit 0
"""
        (shared / "bin" / "sbatch").write_text(script)
        (shared / "bin" / "sbatch").chmod(0o755)

    def __call__(self, *arguments: str, kill_at: int = 0, command: str = "-m") -> tuple[int, str]:
        self.calls_file.write_text("")
        env = {**environment(self.shared), "KILL_AT": str(kill_at)}
        env["PATH"] = f"{self.shared / 'bin'}{os.pathsep}{env['PATH']}"
        argv = [sys.executable, "-m", "clusterrun", command, *arguments]
        cwd = self.shared / "cwd"
        done = subprocess.run(
            argv, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
        )
        assert not list(cwd.iterdir())
        return done.returncode, done.stdout

    @property
    def submissions(self) -> int:
        """Calls of sbatch that submit."""
        return sum(1 for line in self.calls_file.read_text().splitlines() if not line.startswith("--test-only"))

    def runs(self, sweep: str) -> list[RunDir]:
        return [RunDir(p.parent) for p in sorted(SweepDir.of(self.shared, sweep).root.glob("*/config.yaml"))]

    def story(self, sweep: str) -> dict[str, list[Attempt]]:
        return {run.id: Ledger(run.ledger).attempts() for run in self.runs(sweep)}


@pytest.fixture
def sweeps(tmp_path: Path) -> Sweeps:
    return Sweeps(tmp_path)


def test_one_sbatch_per_shape_and_a_killed_controller_loses_nothing(sweeps: Sweeps) -> None:
    small = [*GRID, "train.max_steps=20", "run_id=scaling"]
    code, _ = sweeps(*small, kill_at=2)
    assert code == -9
    assert sweeps.submissions == 2
    recorded = [run for run in sweeps.runs("scaling") if run.job.exists()]
    assert len(sweeps.runs("scaling")) == 8
    assert len(recorded) == 2  # the first array's; the second's was killed before it could be written down

    code, said = sweeps(*small, "wait=true")
    assert code == 0, said
    assert sweeps.submissions == 3  # one for each shape that was not yet in the queue
    assert "8 points of 4 resource shapes" in said
    assert re.search(r"lr=0\.05 +\S+ +\d+_0 +2 x 1 +1 +2 +(20\d\d-\S+|unknown)", said), said
    story = sweeps.story("scaling")
    assert {run: [a.ending for a in attempts] for run, attempts in story.items()} == {
        run: [Ending.done] for run in story
    }
    jobs = {json.loads(run.job.read_text())["job_id"] for run in sweeps.runs("scaling")}
    assert len(jobs) == 8
    assert {a.job_id for attempts in story.values() for a in attempts} == jobs
    assert all(run.submission.read_text().startswith("#!/bin/bash") for run in sweeps.runs("scaling"))

    code, said = sweeps(*small, "wait=true")
    assert code == 0, said
    assert sweeps.submissions == 0
    assert said.count(" done ") >= 8
    queue = ["squeue", "--noheader", "--name=scaling", "--format=%F"]
    orphan = set(subprocess.run(queue, capture_output=True, text=True, check=True, timeout=30).stdout.split())
    assert len(orphan) <= 1  # the array that nobody wrote down; it ends by itself, and trains nothing
    subprocess.run(["scancel", "--name=scaling"], check=True, timeout=30)


def test_a_requeue_concerns_one_task_of_the_array(sweeps: Sweeps) -> None:
    slow = [
        "+cluster=lab",
        "train=ddp_linear",
        *SLOW,
        "train.task_args.delay_s=0.2",
        "seed=1,2",
        "cluster.nodes=1",
        "cluster.nproc_per_node=1",
    ]
    code, said = sweeps(*slow, "run_id=requeued")
    assert code == 0, said
    assert sweeps.submissions == 1
    runs = {json.loads(run.job.read_text())["job_id"]: run for run in sweeps.runs("requeued")}
    one = sorted(runs)[1]
    assert one.endswith("_1")
    wait_for("the task trains", lambda: any(a.nodes for a in Ledger(runs[one].ledger).attempts()), timeout_s=90)
    subprocess.run(["scontrol", "requeue", one], check=True, timeout=30)
    code, said = sweeps(*slow, "run_id=requeued", "wait=true")
    assert code == 0, said
    assert sweeps.submissions == 0  # all were queued or running
    story = {job: Ledger(run.ledger).attempts() for job, run in runs.items()}
    assert [len(story[job]) for job in sorted(story)] == [1, 2], story
    assert [a.job_id for a in story[one]] == [one, one]
    assert story[one][0].ending is Ending.requeued
    assert all(attempts[-1].ending is Ending.done for attempts in story.values())


def test_a_refused_shape_hides_no_other(sweeps: Sweeps) -> None:
    code, said = sweeps(
        "+cluster=lab", "train.max_steps=3", "cluster.slurm.partition=high,nowhere", "seed=1,2", "run_id=partly"
    )
    assert code == 2, said
    assert "2 points not submitted: sbatch refused:" in said
    assert len(re.findall(r"partition=high seed=\d +\S+ +\d+_[01] ", said)) == 2, said
    subprocess.run(["scancel", "--name=partly"], check=True, timeout=30)
