"""The NFS lab as the tests use it: faults by name, and in each guest a process that answers requests."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAB = ROOT / "scripts" / "nfs_lab"
MOUNTS = Path("/run/nfs")  # in the guests
EXPORTS = Path("/run/clusterrun-nfs-lab/exports")  # the same on this machine: what the server really has


def lab(*arguments: str, timeout_s: float = 60) -> str:
    argv = [sys.executable, str(LAB), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"nfs_lab {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def run(guest: str, *argv: str, timeout_s: float = 60) -> str:
    """A command in a guest that must succeed."""
    return lab("run", "--timeout", str(timeout_s), guest, "--", *argv, timeout_s=timeout_s + 15)


def python(guest: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start this interpreter in a guest. Its end of the pipes is ours; killing it kills what runs in the guest."""
    settings = [part for name, value in (env or {}).items() for part in ("--env", f"{name}={value}")]
    argv = [sys.executable, str(LAB), "run", *settings, guest, "--", sys.executable, *arguments]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Guest:
    """A process in a guest that does what ``in_guest`` can do. Use it as a context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._answers: queue.Queue[str] = queue.Queue()
        self._unanswered = 0
        self._process = python(name, str(Path(__file__).with_name("in_guest.py")))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def is_idle(self) -> bool:
        """Whether it lives and owes no answer, so that another test can use it."""
        return self._process.poll() is None and self._unanswered == 0

    def ask(self, do: str, timeout_s: float = 60, **arguments: Any) -> dict[str, Any]:
        """Do something and say how it went. No answer in time is a failure: nothing may hang for ever."""
        self.begin(do, **arguments)
        return self.answer(timeout_s)

    def begin(self, do: str, **arguments: Any) -> None:
        self._unanswered += 1
        self._write(json.dumps({"do": do, **arguments}))

    def hold(self, do: str, at: tuple[str, str], **arguments: Any) -> None:
        """Begin something, and return when it is just about to do the system call ``at``."""
        self.begin(do, hold=at, **arguments)
        assert self.answer() == {"held": at[0]}

    def go_on(self) -> None:
        self._write("")

    def answer(self, timeout_s: float = 60) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} hangs: no answer within {timeout_s} s") from None
        found: dict[str, Any] = json.loads(line)
        if "held" not in found:
            self._unanswered -= 1
        return found

    def answered(self) -> bool:
        return not self._answers.empty()

    def _write(self, text: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(json.dumps({"exception": "the process in the guest has ended"}))
