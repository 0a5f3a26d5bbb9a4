"""The Slurm lab: up for the whole session. scripts/test takes it down again when it was not up before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_lab"


@pytest.fixture(scope="session")
def lab() -> Path:
    """The lab's script, with 4 healthy hosts of 8 GPUs behind it. A lab that can't come up is a failure, not a skip."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "up", "--nodes", "4", "--gpus", "8"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return SCRIPT
