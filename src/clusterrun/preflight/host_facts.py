"""What a node says about itself beside its GPUs: limits, memory, names, network interface, leftovers, storage."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from clusterrun import network
from clusterrun.nccl.harm import relevant

T = TypeVar("T")

UNLIMITED = -1
_LOOKUP_PATIENCE_S = 2.0
_LEFTOVER_PATIENCE_S = 5.0  # Slurm's KillWait and more
_NODE_NAMES = ("CLUSTERRUN_NODE", "SLURMD_NODENAME")
_SAMPLES = 3
_CAP_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True)
class HostFacts:
    """One node. None means not known.

    Attributes:
        shm_bytes: size of /dev/shm.
        memlock_bytes, open_files: soft limits, -1 for unlimited.
        may_lock: CAP_IPC_LOCK, with which the limit of locked memory does not count.
        memory_bytes: what this step may use: the smallest limit of its control groups, else the machine's memory.
        threads: OMP_NUM_THREADS of the step.
        leftovers: processes of earlier attempts of this run, "pid: command line".
        lookup_s: seconds that the reverse look-up of the conductor's address took; lookup_problem: how it failed.
        environment: what the step has of the variables that NCCL and Gloo read; interfaces: network interfaces here.
        interface, mtu, speed_mbit_s: of the way to the conductor's host.
    """

    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    may_lock: bool | None = None
    open_files: int | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    leftovers: tuple[str, ...] | None = None
    lookup_s: float | None = None
    lookup_problem: str = ""
    interface: str | None = None
    environment: dict[str, str] | None = None
    interfaces: tuple[str, ...] | None = None
    mtu: int | None = None
    speed_mbit_s: int | None = None


@dataclass(frozen=True)
class StorageFacts:
    """The file system of the run directory as this node sees it.

    Attributes:
        kind, source, options: of its mount, from /proc/self/mountinfo.
        free_bytes, free_inodes: for this user; inodes None where the file system does not count them.
        fsync_s: median time to write and sync a small file, seconds; rename_s: to rename it.
        lock_problem: why an advisory lock could not be had, "" when it could, None when not tried.
        visible_s: seconds until the conductor's file was seen here with its right content, None when it never was
            (visible_tried) or nobody looked.
        problem: what went wrong; facts read before that are there.
    """

    kind: str | None = None
    source: str | None = None
    options: tuple[str, ...] | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    fsync_s: float | None = None
    rename_s: float | None = None
    lock_problem: str | None = None
    visible_s: float | None = None
    visible_tried: bool = False
    problem: str = ""


def read_host(head: str, address: str | None, run_dir: Path, attempt: int, *, root: Path = Path("/")) -> HostFacts:
    """``head`` is the conductor's address, ``address`` this node's own on the way to it."""
    lookup_s, lookup_problem = reverse_lookup(head)
    interface = network.interface_of(address) if address else None
    return HostFacts(
        shm_bytes=_shm_bytes(root / "dev/shm"),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        may_lock=_has_capability(root / "proc/self/status", _CAP_IPC_LOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        memory_bytes=memory_given(root),
        threads=int(os.environ["OMP_NUM_THREADS"]) if os.environ.get("OMP_NUM_THREADS", "").isdigit() else None,
        leftovers=settled_leftovers(run_dir, attempt),
        lookup_s=lookup_s,
        lookup_problem=lookup_problem,
        interface=interface,
        environment=relevant(os.environ),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        mtu=_number(root / "sys/class/net" / interface / "mtu") if interface else None,
        speed_mbit_s=_number(root / "sys/class/net" / interface / "speed") if interface else None,
    )


def reverse_lookup(
    address: str, look: Callable[[str], object] = socket.gethostbyaddr, patience_s: float = _LOOKUP_PATIENCE_S
) -> tuple[float | None, str]:
    """Seconds and problem of a reverse look-up, as torch's store makes one per client. Bounded: DNS may hang."""
    problem: list[str] = []

    def ask() -> None:
        try:
            look(address)
            problem.append("")
        except OSError as error:
            problem.append(f"{address}: {error.strerror or error}")

    begin = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience_s)
    return time.monotonic() - begin, problem[0] if problem else f"{address}: no answer within {patience_s:g} s"


def memory_given(root: Path) -> int | None:
    """Bytes this process may use: MemTotal, or the tightest control group limit (v2 or v1) if that is less."""
    found = [limit for limit in (_mem_total(root / "proc/meminfo"), *_cgroup_limits(root)) if limit is not None]
    return min(found, default=None)


def settled_leftovers(run_dir: Path, attempt: int, patience_s: float = _LEFTOVER_PATIENCE_S) -> tuple[str, ...] | None:
    """``leftovers`` that are still there after a while: right after a crash some are just ending."""
    end = time.monotonic() + patience_s
    found = leftovers(run_dir, attempt)
    while found and time.monotonic() < end:
        time.sleep(0.2)
        found = leftovers(run_dir, attempt)
    return found


def leftovers(run_dir: Path, attempt: int, proc: Path = Path("/proc")) -> tuple[str, ...] | None:
    """This user's living processes of this run, on this node, that belong to another attempt; None: can't be listed.

    Hosts of the Slurm lab and simulated nodes share one /proc: a process of another node is that node's business.
    """
    own = {os.environ.get(name) for name in _NODE_NAMES} - {None}
    found, readable = [], False
    for directory in proc.glob("[0-9]*"):
        try:
            argv = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            readable = True
            if directory.stat().st_uid != os.geteuid():
                continue
            environment = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
            # Our own processes carry run and attempt in their arguments; a script's workers in what they inherited.
            if f"--run-dir={run_dir}" not in argv and f"CLUSTERRUN_RUN_DIR={run_dir}" not in environment:
                continue
        except OSError:  # ended meanwhile
            continue
        node = {value for name, _, value in (item.partition("=") for item in environment) if name in _NODE_NAMES}
        if own and node and not own & node:
            continue
        marks = [item for item in (*argv, *environment) if item.startswith(("--attempt=", "CLUSTERRUN_ATTEMPT="))]
        if any(item.partition("=")[2] != str(attempt) for item in marks):
            found.append(f"{directory.name}: {' '.join(argv).strip()[:120]}")
    return tuple(found) if readable else None


def read_storage(directory: Path, token_file: Path, token: str, within_s: float) -> StorageFacts:
    """``directory`` is this attempt's, on shared storage; ``token_file`` was written there by the conductor."""
    kind, source, options = _mount_of(directory)
    facts = StorageFacts(kind, source, options)
    try:
        space = os.statvfs(directory)
        inodes = space.f_favail if space.f_files else None
        facts = replace(facts, free_bytes=space.f_bavail * space.f_frsize, free_inodes=inodes)
        if token:
            facts = replace(facts, visible_tried=True, visible_s=wait_for_token(token_file, token, within_s))
        fsync_s, rename_s = _latencies(directory)
        return replace(facts, fsync_s=fsync_s, rename_s=rename_s, lock_problem=_try_lock(directory))
    except OSError as error:
        return replace(facts, problem=f"{error.filename or directory}: {error.strerror}")


def within(patience_s: float, read: Callable[[], T]) -> T | None:
    """What ``read`` gives, or None when a file system hangs. Its thread then stays behind: end by os._exit."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(patience_s)
    return found[0] if found else None


def wait_for_token(path: Path, token: str, within_s: float) -> float | None:
    """Seconds until the file opens with the right content. By open, never by stat: attribute caches lie."""
    begin = time.monotonic()
    while True:
        try:
            if path.read_text() == token:
                return time.monotonic() - begin
        except OSError:
            os.listdir(path.parent)  # makes an NFS client look again at a name that it remembers as missing
        if time.monotonic() - begin > within_s:
            return None
        time.sleep(0.05)


def _latencies(directory: Path) -> tuple[float, float]:
    path = directory / f".latency-{os.getpid()}-{socket.gethostname()}"
    renamed = path.with_name(path.name + ".renamed")
    syncs = []
    try:
        for _ in range(_SAMPLES):
            begin = time.monotonic()
            with path.open("w") as file:
                file.write("x" * 512)
                file.flush()
                os.fsync(file.fileno())
            syncs.append(time.monotonic() - begin)
        begin = time.monotonic()
        path.rename(renamed)
        return sorted(syncs)[_SAMPLES // 2], time.monotonic() - begin
    finally:
        path.unlink(missing_ok=True)
        renamed.unlink(missing_ok=True)


def _try_lock(directory: Path) -> str:
    import fcntl

    path = directory / f".lock-{os.getpid()}-{socket.gethostname()}"
    try:
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)
    return ""


def _mount_of(path: Path) -> tuple[str | None, str | None, tuple[str, ...] | None]:
    """Type, source and options (of mount and file system) of the mount that holds a path."""
    best: tuple[int, str, str, tuple[str, ...]] | None = None
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None, None, None
    for line in lines:
        left, _, right = line.partition(" - ")
        point, own = _unescaped(left.split()[4]), left.split()[5]
        kind, source, *rest = right.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and (best is None or len(point) >= best[0]):
            best = (len(point), kind, source, tuple({*own.split(","), *(rest[0].split(",") if rest else ())}))
    return (best[1], best[2], tuple(sorted(best[3]))) if best else (None, None, None)


def _unescaped(text: str) -> str:
    """mountinfo writes blank, tab, line end and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _shm_bytes(path: Path) -> int | None:
    try:
        if os.stat(path).st_dev == os.stat(path.parent).st_dev:
            return None  # a plain directory: not memory, and its size is the disk's
        space = os.statvfs(path)
    except OSError:
        return None
    return space.f_blocks * space.f_frsize


def _has_capability(status: Path, number: int) -> bool | None:
    """Whether this process has a capability in effect (CapEff of /proc/self/status, a hexadecimal mask)."""
    try:
        line = next(line for line in status.read_text().splitlines() if line.startswith("CapEff:"))
        return bool(int(line.split()[1], 16) >> number & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _mem_total(path: Path) -> int | None:
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith("MemTotal:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def _cgroup_limits(root: Path) -> list[int]:
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = top / path.lstrip("/")
        while True:  # a limit anywhere above binds too
            limit = _number(here / name)
            if limit is not None and limit < 2**60:  # v1 writes a huge number for "none"
                found.append(limit)
            if here == top or top not in here.parents:
                break
            here = here.parent
    return found


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value >= 0 else None  # /sys/class/net/*/speed is -1 where unknown
