"""Both step runners keep the promises of step_contract.py: on this machine, and inside a real Slurm job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.launch.local_steps import LocalSteps
from contract.step_contract import CLUSTER, CONTRACT, Place, is_running

SCRIPT = Path(__file__).with_name("step_contract.py")


@pytest.mark.parametrize("check", CONTRACT)
def test_local(check: str, tmp_path: Path) -> None:
    CONTRACT[check](Place(LocalSteps(CLUSTER), tmp_path))


def test_local_kill_ends_what_a_dead_task_left_behind(tmp_path: Path) -> None:
    """An agent that was killed leaves its workers. With Slurm this is the work of the site's ProctrackType."""
    place = Place(LocalSteps(CLUSTER), tmp_path)
    step = place.start("""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
say(child.pid)
os.kill(os.getpid(), signal.SIGKILL)
""")
    place.wait_for_lines(3)
    assert place.end_of(step) == 128 + 9
    pids = [int(line) for line in place.lines()]
    assert all(is_running(pid) for pid in pids)
    step.kill()
    assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture(scope="session")
def job_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One job for all checks; what each had to say, '' for nothing."""
    if shutil.which("sbatch") is None:
        pytest.skip("no Slurm client on this machine")
    scratch = tmp_path_factory.mktemp("contract")
    results, log = scratch / "results.jsonl", scratch / "log"
    batch = scratch / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {SCRIPT} {results}\n")
    options = [
        "--nodes=3",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--time=3",
        "--job-name=contract",
        "--no-requeue",
    ]
    argv = ["sbatch", "--wait", *options, "--no-kill", f"--output={log}", str(batch)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert done.returncode == 0, said
    return {record["check"]: record["problem"] for record in map(json.loads, results.read_text().splitlines())}


@pytest.mark.slurm
@pytest.mark.parametrize("check", CONTRACT)
def test_slurm(check: str, job_results: dict[str, str]) -> None:
    assert not job_results[check], job_results[check]
