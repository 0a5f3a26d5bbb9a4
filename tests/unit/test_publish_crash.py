"""Killed at every syscall of a publish, by strace: the old or the new checkpoint is there, whole, and no other used."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "crash_publish.py"


@pytest.mark.parametrize("scenario", ["beside", "over"])
def test_killed_at_every_syscall(scenario: str) -> None:
    memory = Path("/dev/shm")  # a kill leaves the same there as on a disk, whose fsyncs take most of the time
    with tempfile.TemporaryDirectory(prefix="clusterrun-test-", dir=memory if memory.is_dir() else None) as directory:
        done = subprocess.run(
            [sys.executable, SCRIPT, scenario, directory], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["survived"] == []  # so every one of the cases did kill
    assert {"mkdir", "openat", "write", "fsync", "rename", "unlinkat"} <= set(found["calls"])
    assert sum(found["calls"].values()) > 80
