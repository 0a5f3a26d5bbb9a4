"""Publish a checkpoint and be killed at every single syscall of it, by strace. Prints what was found as JSON.

    python tests/crash_publish.py SCENARIO DIRECTORY

SCENARIO: "beside" (steps 1 and 2 are there, 3 is published, 1 is retired) or "over" (a damaged 3 is there, too).
Each case forks a child that waits, has strace attach to it and kill it at the k-th call of one syscall, and looks at
what is left; then the next attempt publishes again. Torch-free: the fork must be cheap.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from clusterrun.checkpoint.files import HashedFile
from clusterrun.checkpoint.manifest import FileRecord, Manifest
from clusterrun.checkpoint.retention import Keep
from clusterrun.checkpoint.store import Store, step_name

FILES = {"__0_0.distcp": b"weights" * 3000, "__1_0.distcp": b"more" * 50, ".metadata": b"layout"}
PR_SET_PTRACER = 0x59616D61


def publish(store: Store, step: int, attempt: int) -> None:
    temporary, nonce = store.new_temporary(step, attempt)
    records = []
    for name, content in FILES.items():
        file = HashedFile(temporary / name)
        file.write(content)
        records.append(FileRecord(name, *file.finish()))
    manifest = Manifest(step, 1, attempt, nonce, "", time.time(), {}, {}, tuple(records))
    store.publish(temporary, manifest, lambda text: None)
    store.retain(Keep(2), lambda text: None)


def prepare(store: Store, scenario: str) -> None:
    shutil.rmtree(store.directory, ignore_errors=True)
    for step in (1, 2):
        publish(store, step, 0)
    if scenario == "over":
        shutil.copytree(store.directory / step_name(2), store.directory / step_name(3))


def victim(store: Store, strace: list[str]) -> int:
    """Publish step 3 in a child under strace. Its exit status."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        publish(store, 3, 1)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    tracer = subprocess.Popen(["strace", "-qq", *strace, "-p", str(child)], stderr=subprocess.DEVNULL)
    status = Path(f"/proc/{child}/status")
    while "TracerPid:\t0" in status.read_text():
        assert tracer.poll() is None, "strace did not attach"
        time.sleep(0.001)
    os.kill(child, signal.SIGCONT)
    ended = os.waitpid(child, 0)[1]
    tracer.wait(10)
    return ended


def problems(store: Store, scenario: str) -> list[str]:
    """What is against the promise in the directory as the killed child left it, and after the next attempt's save."""
    valid = [info.step for info in store.list() if not store.verify(info)]
    invalid = [info.step for info in store.list() if store.verify(info)]
    found = []
    if valid not in ([2, 1], [3, 2, 1], [3, 2]):
        found.append(f"valid: {valid}")
    if invalid != ([3] if scenario == "over" and 3 not in valid and (store.directory / step_name(3)).exists() else []):
        found.append(f"damaged: {invalid}")
    if store.latest_step() != valid[0]:
        found.append(f"latest {store.latest_step()}, valid {valid}")
    store.remove_stale_temporaries(2)
    publish(store, 3, 2)
    left = sorted(name for name in os.listdir(store.directory) if not name.startswith(".bad-"))
    if left != ["LATEST", step_name(2), step_name(3)]:
        found.append(f"after the next attempt: {left}")
    found += [problem for info in store.list() for problem in store.verify(info)]
    return found


def main() -> None:
    scenario, directory = sys.argv[1], Path(sys.argv[2])
    store, log = Store(directory / "checkpoints", patience_s=0), directory / "log"
    prepare(store, scenario)
    assert victim(store, ["-o", str(log)]) == 0
    assert problems(store, scenario) == []
    calls = collections.Counter(re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE))
    wrong, survived = {}, []
    for name, count in sorted(calls.items()):
        for k in range(1, count + 1):
            prepare(store, scenario)
            ended = victim(store, ["-o", "/dev/null", "-e", f"inject={name}:signal=KILL:when={k}"])
            if not os.WIFSIGNALED(ended):
                survived.append(f"{name} {k}")
            if found := problems(store, scenario):
                wrong[f"{name} {k}"] = found
    print(json.dumps({"calls": calls, "survived": survived, "wrong": wrong}))


if __name__ == "__main__":
    main()
