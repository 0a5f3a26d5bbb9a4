"""Functions run on several real Gloo ranks, one after the other in the same processes, which take seconds to start."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Scenario = Callable[[int, Path], None]


def _start(rank: int, world_size: int, port: int, directory: Path, scenarios: Sequence[Scenario]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    for scenario in scenarios:
        name = getattr(scenario, "__name__", "scenario")
        try:
            scenario(rank, directory / name)
        except BaseException as error:
            raise AssertionError(f"{name} on rank {rank}") from error
    dist.destroy_process_group()


def run_ranks(world_size: int, directory: Path, scenarios: Sequence[Scenario]) -> None:
    """Call each with its rank and a directory of its own (not made yet)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_start, args=(world_size, port, directory, list(scenarios)), nprocs=world_size)  # type: ignore[no-untyped-call]


def both(value: Any) -> list[Any]:
    """What every rank gives, in order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leftovers(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("."))
