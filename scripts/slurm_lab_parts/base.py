"""Paths, settings and nodes of the lab, and how it runs commands."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import lab_commands

LAB = Path("/run/clusterrun-lab")
CONF = LAB / "slurm.conf"
CONTROLLER = "10.77.0.1"
WAIT_S = 30.0


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
    """A command that ends by itself, in the lab's environment; its output."""
    return lab_commands.run(*argv, stdin=stdin, timeout=timeout, check=check, env=lab_env())


def run_ok(*argv: str) -> bool:
    return lab_commands.run_ok(*argv, env=lab_env())


def tail(log: Path, lines: int = 15) -> str:
    """The end of a daemon's log (else of what it said when it started), to append to an error."""
    for path in (log, log.with_suffix(".start")):
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            if text:
                return "\n".join(["", f"--- end of {path}", *text])
    return ""
