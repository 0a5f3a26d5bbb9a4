"""Runs in a guest of the NFS lab: does with the real store what the tests ask, one JSON line per request and answer.

No part of the store is replaced. To hit a fault between two system calls, a request can name an audit event of Python
(``os.rename`` and a part of its arguments): just before it happens this process says "held", and waits for a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from clusterrun.checkpoint.files import HashedFile
from clusterrun.checkpoint.manifest import FileRecord, Manifest
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.store import Store

BLOCK = 1 << 20
held_at: tuple[str, str] | None = None
readers: dict[str, BinaryIO] = {}


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def hold(event: str, arguments: tuple[Any, ...]) -> None:
    global held_at
    if held_at is not None and event == held_at[0] and held_at[1] in str(arguments):
        held_at = None
        say(held=event)
        sys.stdin.readline()


def publish(directory: str, step: int, mib: int = 1, attempt: int = 0, patience_s: float = 30) -> dict[str, Any]:
    """A checkpoint of two files, written and published as the ranks and rank 0 do it."""
    store, warnings, temporary = Store(Path(directory), patience_s), [], None
    try:
        temporary, nonce = store.new_temporary(step, attempt)
        records = []
        for rank in range(2):
            path = temporary / f"__{rank}_0.distcp"
            stream = HashedFile(path)
            try:
                for block in range(mib):
                    stream.write(bytes([step % 256, rank, block % 256, 7]) * (BLOCK // 4))
                records.append(FileRecord(path.name, *stream.finish()))
            except BaseException:
                stream.abandon()
                raise
        about = {"world_size": 2, "attempt": attempt, "config_hash": "c0ffee", "created": time.time()}
        manifest = Manifest(step=step, nonce=nonce, versions={}, trainer={}, files=tuple(records), **about)
        info = store.publish(temporary, manifest, warnings.append)
    except OSError as error:
        if temporary is not None:
            store.discard(temporary)
        return {"error": error.errno, "text": str(error), "warnings": warnings}
    return {"step": info.step, "mine": info.manifest is not None and info.manifest.nonce == nonce, "warnings": warnings}


def choose(directory: str) -> dict[str, Any]:
    """What a resume would take, as Checkpointer.find looks: the newest first, all its files read."""
    store, rejected = Store(Path(directory)), []
    began = time.monotonic()
    for info in store.list():
        problems = store.verify(info)
        if not problems:
            return {"step": info.step, "rejected": rejected, "seconds": time.monotonic() - began}
        rejected += problems
    return {"step": None, "rejected": rejected, "seconds": time.monotonic() - began}


def retain(directory: str, last: int) -> dict[str, Any]:
    warnings: list[str] = []
    removed = Store(Path(directory)).retain(Keep(last=last), warnings.append)
    return {"removed": [info.step for info in removed], "warnings": warnings}


def verify(directory: str, step: int) -> dict[str, Any]:
    store = Store(Path(directory), patience_s=0)
    info = next(info for info in store.list() if info.step == step)
    return {"problems": store.verify(info)}


def set_aside(directory: str, step: int) -> dict[str, Any]:
    store = Store(Path(directory))
    info = next(info for info in store.list() if info.step == step)
    return {"name": store.set_aside(info).name}


def names(directory: str) -> dict[str, Any]:
    return {"names": sorted(os.listdir(directory))}


def look(path: str) -> dict[str, Any]:
    return {"there": os.path.exists(path)}


def read(path: str, size: int) -> dict[str, Any]:
    """Read on in a file that stays open, with nothing in the page cache."""
    try:
        if path not in readers:
            readers[path] = open(path, "rb", buffering=0)  # noqa: SIM115 - it stays open for the next request
        os.posix_fadvise(readers[path].fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return {"read": len(readers[path].read(size))}
    except OSError as error:
        return {"error": error.errno, "text": str(error)}


def end_node(node: str) -> dict[str, Any]:
    """Kill a step's processes on this node, as Slurm does; workers live in sessions of their own."""
    from clusterrun.launch.local_steps import processes_with

    found = processes_with("CLUSTERRUN_NODE", node)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return {"ended": len(found)}


def main() -> None:
    global held_at
    sys.addaudithook(hold)
    done_here = (publish, choose, retain, verify, set_aside, names, look, read, end_node)
    actions: dict[str, Callable[..., dict[str, Any]]] = {action.__name__: action for action in done_here}
    for line in sys.stdin:
        asked = json.loads(line)
        held_at = tuple(asked.pop("hold")) if "hold" in asked else None
        with contextlib.suppress(BrokenPipeError):
            try:
                say(**actions[asked.pop("do")](**asked))
            except Exception as error:  # for the test to see, instead of a closed pipe
                say(exception=f"{type(error).__name__}: {error}", error=getattr(error, "errno", None))
        held_at = None


if __name__ == "__main__":
    main()
