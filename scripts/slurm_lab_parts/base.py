"""Paths, settings and nodes of the lab, and how it runs commands."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LAB = Path("/run/clusterrun-lab")
CONF = LAB / "slurm.conf"
CONTROLLER = "10.77.0.1"
WAIT_S = 30.0


class LabError(Exception):
    """What went wrong, in words for the user. Exit code 2: wrong machine or wrong arguments."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Settings:
    nodes: int
    gpus: int
    cpus: int
    memory_mb: int


class Node:
    def __init__(self, number: int) -> None:
        self.name = f"c{number}"
        self.address = f"10.77.0.{10 + number}"
        self.netns = f"crlab-c{number}"
        self.cable = f"crv{number}"  # the machine's end of its veth pair; the node's end is eth0
        self.log = LAB / self.name / "slurmd.log"


def nodes_of(settings: Settings) -> list[Node]:
    return [Node(number) for number in range(1, settings.nodes + 1)]


def lab_env() -> dict[str, str]:
    """A small, fixed environment, so that what starts the lab doesn't leak into daemons and jobs."""
    return {"PATH": os.environ.get("PATH", os.defpath), "SLURM_CONF": str(CONF), "LC_ALL": "C"}


def run(*argv: str, stdin: str = "", timeout: float = 30, check: bool = True) -> str:
    """Run a command that ends by itself, and return its output."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout, env=lab_env())
    except subprocess.TimeoutExpired:
        raise LabError(f"no answer within {timeout:g} s: {' '.join(argv)}") from None
    if check and done.returncode != 0:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(argv)}: {why}")
    return done.stdout


def run_ok(*argv: str) -> bool:
    try:
        run(*argv)
    except LabError:
        return False
    return True


def tail(log: Path, lines: int = 15) -> str:
    """The end of a daemon's log (else of what it said when it started), to append to an error."""
    for path in (log, log.with_suffix(".start")):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            if text:
                return "\n".join(["", f"--- end of {path}", *text])
    return ""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
