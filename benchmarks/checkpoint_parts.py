"""What the checkpoint benchmarks share: a state as of a training run, a checkpointer, cold files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GIB = 2**30


def state(total: int = GIB) -> dict[str, Any]:
    """Random float32 tensors of ``total`` bytes, a third weights and two thirds Adam's: matrices and small vectors."""
    import torch

    torch.manual_seed(0)
    width, entries, left = 1024, dict[str, Any](), total // 4
    number = 0
    while left > 0:
        size = min(left, width * width * (4 if number % 3 else 1)) if number % 2 else min(left, width)
        for part in ("model", "optim", "optim"):
            share = min(left, size)
            if share:
                entries[f"{part}/{number}/{len(entries)}"] = torch.randn(share)
                left -= share
        number += 1
    return entries


def checkpointer(directory: Path) -> Any:
    """Of the process group that is joined."""
    import torch

    from clusterrun.checkpoint.retention import Keep
    from clusterrun.checkpoint.state import Checkpointer
    from clusterrun.checkpoint.store import Store

    return Checkpointer(Store(directory), 0, "", Keep(2), 600, torch.device("cpu"), lambda text: sys.exit(text))


@contextmanager
def joined() -> Iterator[int]:
    """The process group that torchrun, or nobody, set up; gives the rank."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def torchrun(ranks: int, *arguments: str) -> str:
    """Run a benchmark's part on so many ranks; what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def forget(path: Path) -> None:
    """Drop a file's pages from memory, so that it is read from the disk."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
