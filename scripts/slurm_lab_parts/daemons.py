"""The lab's daemons: starting them, finding them without pid files, ending them; munged among them."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab_commands import LabError, wait_until

from slurm_lab_parts.base import CONF, LAB, WAIT_S, lab_env, run_ok, tail

MUNGE_DIR = LAB / "munge"
MADE_KEY = LAB / "made-munge-key"  # exists if the munge key below is ours to remove
MUNGE_KEY = Path("/etc/munge/munge.key")


def start_daemons(starts: dict[Path, Sequence[str]], user: str | None = None) -> None:
    """Start daemons that detach themselves, all at once, and wait until each has detached.

    Keys are log files. The daemons get no pipe of ours, or whoever reads our output would wait for
    them, and a session of their own, so that a Ctrl-C or hang-up meant for us passes them by.
    """
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    for log, argv in starts.items():
        with log.with_suffix(".start").open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=lab_env(),
                start_new_session=True,
                umask=0o022,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        running.append((log, process))
    for log, process in running:
        try:
            code = process.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise LabError(f"{log.stem} of {log.parent.name} didn't start within {WAIT_S:g} s{tail(log)}") from None
        if code != 0:
            raise LabError(f"{log.stem} of {log.parent.name} didn't start (exit code {code}){tail(log)}")


def argv_of(pid: int) -> list[str]:
    """Empty for a zombie, a kernel thread and a process that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def daemon_name(argv: Sequence[str]) -> str | None:
    """Which of the lab's daemons a command line is: `slurmctld`, `munged` or a node's name.

    Each is started with a path of the lab's in its arguments, so this can't be wrong about a
    recycled pid as a pid file can, and works when pid files are lost or not yet written.
    """
    match [os.path.basename(argv[0]), *argv[1:]] if argv else []:
        case ["slurmctld", "-f", conf] if conf == str(CONF):
            return "slurmctld"
        case ["slurmd", "-f", conf, "-N", name] if conf == str(CONF):
            return name
        case ["munged", log] if log == f"--log-file={MUNGE_DIR}/munged.log":
            return "munged"
    return None


def daemons() -> dict[str, int]:
    """The lab's running daemons, by name."""
    # A helper that a daemon forks has the same command line for a moment; the daemon came first.
    return {name: pid for pid in sorted(pids(), reverse=True) if (name := daemon_name(argv_of(pid)))}


def kill(targets: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_daemon(name: str, number: signal.Signals) -> None:
    kill([pid for daemon, pid in daemons().items() if daemon == name], number)
    if not wait_until(lambda: name not in daemons(), 10):
        raise LabError(f"{name} (pid {daemons().get(name)}) doesn't end")


def munge_answers() -> bool:
    return run_ok("munge", "--no-input")


def start_munge() -> None:
    """One munged serves all nodes, since its socket is a file. Use one that runs, else start ours.

    It is the machine's default socket and key, not a private pair: that way plain `sbatch` works,
    and Slurm finds it without further settings.
    """
    if munge_answers():
        return
    owner = "munge"
    try:
        uid, gid = pwd.getpwnam(owner)[2:4]
    except KeyError:
        raise LabError("no user 'munge': apt-get install --reinstall munge", 2) from None
    for directory in (Path("/run/munge"), MUNGE_DIR):
        directory.mkdir(exist_ok=True)
        os.chown(directory, uid, gid)
        directory.chmod(0o755)
    if not MUNGE_KEY.exists():
        MADE_KEY.touch()
        descriptor = os.open(MUNGE_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(descriptor, "wb") as key:
            os.fchown(descriptor, uid, gid)
            key.write(os.urandom(128))
    log = MUNGE_DIR / "munged.log"
    start_daemons({log: ["munged", f"--log-file={log}"]}, user=owner)
    if not wait_until(munge_answers, 5):
        raise LabError(f"munged doesn't answer{tail(log)}")
