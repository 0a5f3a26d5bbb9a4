"""The one door to subprocesses: argv lists, a time limit, and a failure that carries the output."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from clusterrun.errors import CommandError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, errors: bool = False) -> str:
    """Run to the end and return what was printed on standard output; with ``errors`` also on standard error.

    Raises:
        CommandError: not found, non-zero exit (the message holds the last lines it printed), or over time.
    """
    shown = shlex.join(argv)
    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        raise _not_started(argv[0], error) from None
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else (error.stdout or "")
        raise CommandError(f"{shown}: no answer in {timeout_s:g} s", output=text) from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-3:]
        raise CommandError(
            f"{shown}: exit {done.returncode}: {' / '.join(said)}",
            output=done.stdout + done.stderr,
            returncode=done.returncode,
        )
    return done.stdout + done.stderr if errors else done.stdout


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | int = subprocess.DEVNULL,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Raises:
        CommandError: the program is not there, or may not be run.
    """
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(argv[0], error) from None


def _not_started(program: str, error: OSError) -> CommandError:
    """Not there, not executable, a script without an interpreter, no memory to fork: never a traceback."""
    if isinstance(error, FileNotFoundError) and error.filename == program:
        return CommandError(f"{program}: command not found on this machine")
    return CommandError(
        f"{program}: can't be started: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
    )


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends. Linux only."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), number)
