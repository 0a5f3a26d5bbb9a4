"""The process group and the device mesh: one dimension now, data parallel."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from clusterrun.config.schema import Accelerator
from clusterrun.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where this process stands: the mesh, its rank in it, and the device it computes on."""

    mesh: DeviceMesh
    rank: int
    world_size: int
    device: torch.device
    backend: str


def join(accelerator: Accelerator, timeout_s: float) -> Place:
    """Join the other workers, as torchrun's environment says. Call once, before anything else touches the GPU.

    Raises:
        ConfigError: accelerator=cuda, but torch sees no GPU.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if accelerator is Accelerator.cuda:
        count = torch.cuda.device_count()
        if not count:
            here = f"torch {torch.__version__} on {socket.gethostname()}"
            raise ConfigError(f"cluster.accelerator=cuda: {here} sees no GPU")
        # modulo: Slurm may show each process only its own GPU, numbered 0
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Place(data_parallel_mesh(device.type, world_size), rank, world_size, device, dist.get_backend())


def data_parallel_mesh(device_type: str, world_size: int) -> DeviceMesh:
    """All ranks along one dimension, "dp"."""
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
