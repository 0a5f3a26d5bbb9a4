"""A rank that measures: joins the others and goes through the phases with them. Imports torch."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterrun.config.schema import Accelerator
from clusterrun.errors import ConfigError
from clusterrun.measure.groups import Phase
from clusterrun.measure.results import WAIT, Row
from clusterrun.measure.timing import Settings, measure

# Who waits for the others is ended by whoever started the ranks, which knows when one has died.
_LONG = datetime.timedelta(days=1)
_LEAVE_S = 10.0


def device_of(accelerator: Accelerator, local_rank: int) -> torch.device:
    """This rank's device. Raises ConfigError when torch sees no GPU."""
    if accelerator is not Accelerator.cuda:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"cluster.accelerator=cuda: torch {torch.__version__} on {socket.gethostname()} sees no GPU")
    device = torch.device("cuda", local_rank % count)  # modulo: Slurm may show each process only its own GPU
    torch.cuda.set_device(device)
    return device


def join(accelerator: Accelerator, timeout_s: float, store: Store | None = None) -> torch.device:
    """Join the other ranks: through ``store`` if given, else as torchrun's environment says.

    The group is not bound to the device: then NCCL makes the communicator of each small group by itself, and ranks
    outside of it need not take part.
    """
    device = device_of(accelerator, int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return device


def go_through(
    phases: Sequence[Phase],
    names: Sequence[str],
    sizes: Sequence[int],
    settings: Settings,
    device: torch.device,
    *,
    begin: Callable[[str, int, tuple[int, ...]], None],
    emit: Callable[[Row], None],
) -> None:
    """Measure all phases, all ranks in step. ``begin`` is told what this rank turns to: the phase, its number and the
    group, or WAIT; ``emit`` of each row, on the first rank of its group alone."""
    rank = dist.get_rank()
    # Groups that a later phase has again. torch names a group after its ranks, and a second one of the same name reads
    # the addresses that the first left in the store: with Gloo it then waits for sockets that nobody listens on.
    kept: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for number, phase in enumerate(phases):
        ranks = next((group for group in phase.groups if rank in group), None)
        begin(WAIT, number, ())
        _together(f"phase {number}")
        if ranks is None:
            continue
        begin(phase.name, number, ranks)
        whole = len(ranks) == dist.get_world_size()
        group = dist.group.WORLD if whole else kept.pop(ranks, None)
        if group is None:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        for name in names:
            for size in sizes:
                row = measure(name, size, phase.name, ranks, group, device, settings)
                if rank == ranks[0]:
                    emit(row)
        if any(ranks in later.groups for later in phases[number + 1 :]):
            kept[ranks] = group
        elif not whole:
            dist.destroy_process_group(group)
    begin(WAIT, len(phases), ())
    _together("end")
    _leave(rank)


def _together(place: str) -> None:
    """Wait until every rank is here. Through the store: no collective that would be measured by accident."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"clusterrun/{place}/count", 1) == dist.get_world_size():
        store.set(f"clusterrun/{place}/go", "1")
    store.wait([f"clusterrun/{place}/go"], _LONG)


def _leave(rank: int) -> None:
    """The first rank may hold the store: it stays until the others have read the last word in it."""
    store = dist.distributed_c10d._get_default_store()
    store.add("clusterrun/left", 1)
    end = time.monotonic() + _LEAVE_S
    while rank == 0 and store.add("clusterrun/left", 0) < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.01)
