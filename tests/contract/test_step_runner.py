"""Both step runners keep the promises of step_contract.py: on this machine, and inside a real Slurm job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract.step_contract import CLUSTER, CONTRACT, Place

from clusterrun.launch.local_steps import LocalSteps

SCRIPT = Path(__file__).with_name("step_contract.py")


@pytest.mark.parametrize("check", CONTRACT)
def test_local(check: str, tmp_path: Path) -> None:
    CONTRACT[check](Place(LocalSteps(CLUSTER), tmp_path))


@pytest.fixture(scope="session")
def job_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One job for all checks; what each had to say, '' for nothing."""
    if shutil.which("sbatch") is None:
        pytest.skip("no Slurm client on this machine")
    scratch = tmp_path_factory.mktemp("contract")
    results, log = scratch / "results.jsonl", scratch / "log"
    batch = scratch / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {SCRIPT} {results}\n")
    options = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=3", "--job-name=contract", "--no-requeue"]
    argv = ["sbatch", "--wait", *options, "--no-kill", f"--output={log}", str(batch)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert done.returncode == 0, said
    return {record["check"]: record["problem"] for record in map(json.loads, results.read_text().splitlines())}


@pytest.mark.slurm
@pytest.mark.parametrize("check", CONTRACT)
def test_slurm(check: str, job_results: dict[str, str]) -> None:
    assert not job_results[check], job_results[check]
