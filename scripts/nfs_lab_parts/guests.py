"""The guests of scripts/nfs_lab: booting them and running commands in them. ``inside`` is their end of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lab_commands import LabError, run, wait_until

from nfs_lab_parts import net, server
from nfs_lab_parts.inside import EXIT_CODE, FRAME, OUTPUT, PORT
from nfs_lab_parts.net import LAB

MOUNTS = "/run/nfs"  # in the guests
OPTIONS = "vers=4.2,hard"
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOT_S = 60.0
OUT_OF_TIME, LOST = 124, 125  # exit codes of our own
_HERE = Path(__file__).resolve().parent
_XSTATE = LAB / "xstate.so"


class Guest(NamedTuple):
    name: str
    address: str
    cable: str  # tap of its eth0, in the bridge
    control: str  # its address on a second cable, for commands; the other end is .1
    control_cable: str

    @property
    def mark(self) -> str:
        """In its processes' command line."""
        return f"umid=clusterrun-{self.name}"

    @property
    def console(self) -> Path:
        return LAB / f"{self.name}.console"


GUESTS = [Guest(f"n{i}", f"10.78.0.{10 + i}", f"crn{i}", f"10.79.{i}.2", f"crc{i}") for i in (1, 2)]


def named(name: str) -> Guest:
    for guest in GUESTS:
        if guest.name == name:
            return guest
    raise LabError(f"no guest {name!r}: they are {' and '.join(g.name for g in GUESTS)}", 2)


def pid(guest: Guest) -> int | None:
    return net.pid_of("linux.uml", guest.mark)


def end(guest: Guest) -> None:
    """At once, as a power cut would: what its kernel has not sent is lost."""
    net.end("linux.uml", guest.mark)


def answers(guest: Guest, patience_s: float = 0) -> bool:
    """Whether it takes commands, which it does once it has its mounts. A busy machine may need some patience."""
    return wait_until(lambda: net.connects(guest.control, PORT), patience_s)


def needs_xstate() -> bool:
    """Whether the CPU has more state than User Mode Linux keeps; see xstate.c."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text().split()


def make(memory_mb: int) -> None:
    """What booting needs: a memory disk for the guests' memory, since /dev/shm is small in containers."""
    for part in ("uml", "memory"):
        (LAB / part).mkdir()
    size = f"size={len(GUESTS) * memory_mb + 64}m,mode=700"
    run("mount", "-t", "tmpfs", "-o", size, "nfslab-memory", str(LAB / "memory"))
    if needs_xstate():
        run("cc", "-O2", "-shared", "-fPIC", "-o", str(_XSTATE), str(_HERE / "xstate.c"), timeout=60)


def start(memory_mb: int, guests: Sequence[Guest]) -> None:
    """Boot them side by side, and wait until each has its mounts and takes commands."""
    hosts = ["127.0.0.1 localhost", f"{net.SERVER} server", *(f"{g.address} {g.name}" for g in GUESTS)]
    for guest in guests:
        told = {
            "name": guest.name,
            "address": guest.address,
            "control": guest.control,
            "hosts": "\n".join(hosts) + "\n",
            "path": SEARCH,
            "mounts": {f"{MOUNTS}/{export}": f"{net.SERVER}:/{export}" for export in server.EXPORTS},
            "options": OPTIONS,
        }
        told_in = LAB / f"{guest.name}.json"
        told_in.write_text(json.dumps(told))
        first = LAB / f"{guest.name}.init"  # a script, since a kernel's command line takes no odd characters
        argv = [sys.executable, str(_HERE / "inside.py"), str(told_in)]
        first.write_text(f"#!/bin/sh\nexec {shlex.join(argv)}\n")
        first.chmod(0o755)
        guest.console.unlink(missing_ok=True)
        uml = ["linux.uml", guest.mark, f"uml_dir={LAB}/uml/", f"mem={memory_mb}M"]
        uml += ["rootfstype=hostfs", "rootflags=/", "ro", f"init={first}", "con=null", "con0=fd:0,fd:1"]
        for number, cable in enumerate((guest.cable, guest.control_cable)):
            # A fixed address, or those who knew the guest before it was booted again would not find it.
            uml.append(f"eth{number}=tuntap,{cable},02:00:00:00:0{number}:{GUESTS.index(guest) + 1:02x}")
        env = {"TMPDIR": str(LAB / "memory"), **({"LD_PRELOAD": str(_XSTATE)} if needs_xstate() else {})}
        net.start(guest.console, *uml, env=env)
    for guest in guests:
        _wait_for(guest)


def _wait_for(guest: Guest) -> None:
    began = time.monotonic()
    while not answers(guest):
        waited_s = time.monotonic() - began
        if waited_s > BOOT_S or (waited_s > 2 and pid(guest) is None):  # its process takes a moment to appear
            hint = "User Mode Linux needs ptrace"
            raise LabError(f"guest {guest.name} did not come up ({hint}){net.tail(guest.console, 25)}")
        time.sleep(0.1)


def run_in(guest: Guest, argv: Sequence[str], settings: Sequence[str], cwd: str, timeout_s: float | None) -> int:
    """Run a command in a guest, with our input and output, and return its exit code or one of our own."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    with net.connect(guest.control, PORT, 10) as connection, connection.makefile("rb") as received:
        asked = {"argv": list(argv), "env": _environment(settings), "cwd": cwd}
        connection.sendall(json.dumps(asked).encode() + b"\n")

        def feed() -> None:
            with contextlib.suppress(OSError):
                while content := os.read(0, 65536):
                    connection.sendall(content)
                connection.shutdown(net.SHUT_WR)

        threading.Thread(target=feed, daemon=True).start()
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return _complain(OUT_OF_TIME, f"not done within {timeout_s:g} s, killed: {shlex.join(argv)}")
            connection.settimeout(left_s)
            try:
                head = received.read(FRAME.size)
                kind, length = FRAME.unpack(head)
                content = received.read(length)
            except TimeoutError:
                continue
            except Exception as error:  # half a frame, or a reset
                return _complain(LOST, f"lost guest {guest.name} ({error}){net.tail(guest.console)}")
            if kind == EXIT_CODE:
                return int.from_bytes(content, "big", signed=True)
            stream = sys.stdout if kind == OUTPUT else sys.stderr
            stream.buffer.write(content)
            stream.flush()


def _complain(code: int, text: str) -> int:
    print(f"nfs_lab: {text}", file=sys.stderr)
    return code


def _environment(settings: Sequence[str]) -> dict[str, str]:
    env = {"PATH": SEARCH, "HOME": "/run/tmp", "TMPDIR": "/run/tmp", "LC_ALL": "C.UTF-8"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # the root is read-only
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise LabError(f"--env {setting!r}: not NAME=VALUE", 2)
        env[name] = value
    return env
