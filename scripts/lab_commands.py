"""What scripts/slurm_lab and scripts/nfs_lab share: running commands, waiting, and an error in words for the user."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping


class LabError(Exception):
    """What went wrong, in words for the user. Exit code 2: wrong machine or wrong arguments."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def run(
    *argv: str, timeout: float = 30, check: bool = True, stdin: str = "", env: Mapping[str, str] | None = None
) -> str:
    """Run a command that ends by itself, and return its output. ``env``: nothing but the path when None."""
    env = env or {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired:
        raise LabError(f"no answer within {timeout:g} s: {' '.join(argv)}") from None
    if check and done.returncode != 0:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(argv)}: {why}")
    return done.stdout


def run_ok(*argv: str, env: Mapping[str, str] | None = None) -> bool:
    try:
        run(*argv, env=env)
    except LabError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
