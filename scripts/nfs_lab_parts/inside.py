"""Runs inside a guest of scripts/nfs_lab, as its first process: NFS mounts, then commands for `nfs_lab run`.

A command comes over the control cable, which no fault touches: one line of JSON, then what the command reads. The
answer is frames of a kind (1 output, 2 error output, 3 exit code), a length and the content. Hanging up kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

# Each needs those before it.
MODULES = ["grace", "sunrpc", "lockd", "netfs", "fscache", "nfs_acl", "nfs", "nfsv3", "dns_resolver", "nfsv4"]
FRAME = struct.Struct("!BI")
OUTPUT, ERROR_OUTPUT, EXIT_CODE = 1, 2, 3
PORT = 7000


def sh(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=60)


def set_up(settings: dict[str, Any]) -> None:
    """File systems, names, network, NFS: what a node's boot does. The root is the host's, read-only."""
    sh("mount", "-t", "proc", "proc", "/proc")
    sh("mount", "-t", "sysfs", "sysfs", "/sys")
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for path in ("/dev/shm", "/dev/pts", "/run/tmp"):
        os.makedirs(path, exist_ok=True)
    sh("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    sh("mount", "-t", "devpts", "devpts", "/dev/pts")
    socket.sethostname(settings["name"])
    Path("/run/hosts").write_text(settings["hosts"])
    Path("/run/resolv.conf").write_text("options timeout:1 attempts:1\n")  # no name server: look-ups fail at once
    for name in ("hosts", "resolv.conf"):
        if os.path.exists(f"/etc/{name}"):
            sh("mount", "--bind", f"/run/{name}", f"/etc/{name}")
    found = {path.stem: path for path in Path(f"/usr/lib/uml/modules/{os.uname().release}").rglob("*.ko")}
    for module in MODULES:
        sh("insmod", str(found[module]))
    sh("ip", "link", "set", "lo", "up")
    for interface, address in (("eth0", settings["address"]), ("eth1", settings["control"])):
        sh("ip", "address", "add", f"{address}/24", "dev", interface)
        sh("ip", "link", "set", interface, "up")
    for point, source in settings["mounts"].items():
        os.makedirs(point)
        sh("mount", "-t", "nfs", "-o", settings["options"], source, point)


def serve(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    lock = threading.Lock()

    def send(kind: int, content: bytes) -> bool:
        """Whether the caller is still there, as far as known: a hang-up shows only at the second try."""
        with lock:
            try:
                connection.sendall(FRAME.pack(kind, len(content)) + content)
            except OSError:
                return False
            return True

    def pump(kind: int, stream: IO[bytes]) -> None:
        while content := os.read(stream.fileno(), 65536):
            send(kind, content)

    with connection, connection.makefile("rb") as received:
        line = received.readline()
        if not line:  # somebody only looked whether this guest answers
            return
        asked = json.loads(line)
        try:
            process = subprocess.Popen(
                asked["argv"],
                env=asked["env"],
                cwd=asked["cwd"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            send(ERROR_OUTPUT, f"{error.filename}: {error.strerror}\n".encode())
            send(EXIT_CODE, struct.pack("!i", 127))
            return
        assert process.stdin
        assert process.stdout
        assert process.stderr
        stdin = process.stdin

        def feed() -> None:
            """What the caller sends is the command's input. It closes its side at the end, or hangs up."""
            with contextlib.suppress(OSError):
                while content := received.read1(65536):
                    stdin.write(content)
                    stdin.flush()
            with contextlib.suppress(OSError):
                stdin.close()

        pumps = [
            threading.Thread(target=pump, args=(OUTPUT, process.stdout), daemon=True),
            threading.Thread(target=pump, args=(ERROR_OUTPUT, process.stderr), daemon=True),
            threading.Thread(target=feed, daemon=True),
        ]
        for thread in pumps:
            thread.start()
        while True:
            try:
                code = process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if not send(OUTPUT, b""):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    return
        for thread in pumps[:2]:
            thread.join(5)  # a child that it left behind may hold its output open
        send(EXIT_CODE, struct.pack("!i", 128 - code if code < 0 else code))


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    os.environ["PATH"] = settings["path"]
    set_up(settings)
    if os.fork() == 0:
        serve(settings["control"])
    while True:  # orphans become children of the first process, which must collect them
        os.wait()


if __name__ == "__main__":
    main()
