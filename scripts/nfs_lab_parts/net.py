"""The network of scripts/nfs_lab: one namespace with a bridge, a cable per guest, and what runs in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lab_commands import LabError, run, wait_until

LAB = Path("/run/clusterrun-nfs-lab")  # everything the lab makes lies there
NAME = "crnfslab"
NETNS = Path("/run/netns") / NAME
BRIDGE = "crnfs0"
SERVER = "10.78.0.1"
SHUT_WR = socket.SHUT_WR
_CLOSING = ("04", "09", "0B")  # FIN_WAIT1, LAST_ACK, CLOSING, as in net/tcp_states.h
_CLONE_NEWNET = 0x40000000
# A token bucket smaller than any packet lets none pass. Small kernels have no netem, which could say it plainly.
_MUTE = ["tbf", "rate", "8bit", "burst", "10b", "limit", "10b"]


class Cabled(Protocol):
    @property
    def cable(self) -> str: ...
    @property
    def control(self) -> str: ...
    @property
    def control_cable(self) -> str: ...


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, to append to an error."""
    with contextlib.suppress(OSError):
        text = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(" [<")]
        if text := text[-lines:]:  # without a dying kernel's stack
            return "\n".join(["", f"--- end of {log}", *text])
    return ""


# ---------------------------------------------------------------- the namespace


def make(guests: Sequence[Cabled]) -> None:
    run("ip", "netns", "add", NAME)
    lines = ["link set lo up", f"link add {BRIDGE} type bridge", f"addr add {SERVER}/24 dev {BRIDGE}"]
    lines.append(f"link set {BRIDGE} up")
    for guest in guests:
        lines += [
            f"tuntap add dev {guest.cable} mode tap",
            f"link set {guest.cable} master {BRIDGE} up",
            f"tuntap add dev {guest.control_cable} mode tap",
            f"addr add {guest.control.rpartition('.')[0]}.1/24 dev {guest.control_cable}",
            f"link set {guest.control_cable} up",
        ]
    run("ip", "-netns", NAME, "-batch", "-", stdin="\n".join(lines) + "\n")
    # What a killed server left unsent must not reach a guest later, as it would not after a power cut.
    with inside():
        Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text("1")


def unsent(port: int) -> bool:
    """Whether the kernel still tries to deliver what a process that is gone sent from this port."""
    with inside():
        tables = [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(int(row[1].rpartition(":")[2], 16) == port and row[3] in _CLOSING for row in rows)


def exists(guests: Sequence[Cabled]) -> bool:
    """False after a reboot, where /run outlives it."""
    try:
        with inside():
            there = [name for _, name in socket.if_nameindex()]
    except (OSError, LabError):
        return False
    return all(guest.cable in there for guest in guests)


def remove() -> None:
    """End everything inside, then the namespace."""

    def quiet() -> bool:
        left = pids()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    if not wait_until(quiet, 10):
        raise LabError(f"can't end these processes: {pids()}")
    if NETNS.exists():
        run("ip", "netns", "delete", NAME)


def pids() -> list[int]:
    """Every living process inside: the server, the guests and their processes."""
    try:
        ours = NETNS.stat()
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # also a zombie, which has no namespaces left
            if entry.name.isdigit() and os.path.samestat((entry / "ns/net").stat(), ours):
                found.append(int(entry.name))
    return sorted(found)


def pid_of(command: str, *arguments: str) -> int | None:
    """The process that was started inside with a command and these first arguments, not its children."""
    return next((pid for pid in running(command, *arguments) if os.getsid(pid) == pid), None)


def end(command: str, *arguments: str) -> None:
    """Kill what was started with a command and these first arguments, and all that it started."""
    sessions: set[int] = set()  # what outlives its first process still has its session

    def quiet() -> bool:
        sessions.update(os.getsid(pid) for pid in running(command, *arguments))
        left = [pid for pid in pids() if os.getsid(pid) in sessions]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return not left

    def quiet_now() -> bool:
        try:
            return quiet()
        except ProcessLookupError:  # one ended while we looked
            return False

    if not wait_until(quiet_now, 10):
        raise LabError(f"{command} {' '.join(arguments)} doesn't end")


def running(command: str, *arguments: str) -> Iterator[int]:
    """Processes inside that run a command with these first arguments."""
    for pid in pids():
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if os.path.basename(argv[0]) == command and tuple(argv[1 : 1 + len(arguments)]) == arguments:
                yield pid


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """This thread's new sockets belong to the lab's network."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise LabError(f"can't enter the lab's network: {os.strerror(ctypes.get_errno())} (root is needed)")

    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        try:
            there = os.open(NETNS, os.O_RDONLY)
        except FileNotFoundError:
            raise LabError("the lab is not up") from None
        try:
            enter(there)
            yield
        finally:
            enter(here)
            os.close(there)
    finally:
        os.close(here)


def connect(address: str, port: int, timeout: float) -> socket.socket:
    """A connection into the lab that notices a dead guest within half a minute."""
    try:
        with inside():
            connection = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise LabError(f"no answer from {address}:{port}: {error}") from None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        connection.setsockopt(socket.IPPROTO_TCP, option, 5)
    return connection


def connects(address: str, port: int) -> bool:
    try:
        connect(address, port, 1).close()
    except LabError:
        return False
    return True


def start(log: Path, *argv: str, env: dict[str, str] | None = None, wait: bool = False) -> None:
    """Start a program inside. With ``wait`` it detaches itself, and its first process must end well.

    It gets no pipe of ours, or whoever reads our output would wait for it, and a session of its own, so that a Ctrl-C
    meant for us passes it by.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["nsenter", f"--net={NETNS}", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **(env or {})},
            start_new_session=True,
        )
    if wait:
        try:
            code = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise LabError(f"{argv[0]} didn't start within 30 s{tail(log)}") from None
        if code != 0:
            raise LabError(f"{argv[0]} didn't start (exit code {code}){tail(log)}")


# ---------------------------------------------------------------- cables


def pull(cable: str) -> None:
    run("ip", "-netns", NAME, "link", "set", cable, "down")


def plug(cable: str) -> None:
    run("ip", "-netns", NAME, "link", "set", cable, "up")


def mute(cable: str) -> None:
    run("tc", "-netns", NAME, "qdisc", "replace", "dev", cable, "root", *_MUTE)


def unmute(cable: str) -> None:
    run("tc", "-netns", NAME, "qdisc", "delete", "dev", cable, "root", check=False)  # fails where there is nothing


def cable_state(cable: str) -> str:
    """up, down (pulled) or muted."""
    if "tbf" in run("tc", "-netns", NAME, "qdisc", "show", "dev", cable, check=False):
        return "muted"
    return "up" if "state UP" in run("ip", "-netns", NAME, "link", "show", cable, check=False) else "down"
