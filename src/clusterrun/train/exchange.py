"""How gradients travel between ranks: DDP's buckets, and what they are cast to on the way."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterrun.config.schema import GradCompression, TrainConfig
from clusterrun.train.mesh import Place


def distributed(module: nn.Module, place: Place, train: TrainConfig) -> DistributedDataParallel:
    """The module in DDP. A collective."""
    group = place.mesh.get_group("dp")
    model = DistributedDataParallel(
        module,
        device_ids=[place.device.index] if place.device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=train.bucket_mb,
    )
    if train.grad_compression is not GradCompression.none:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            GradCompression.bf16: default_hooks.bf16_compress_hook,
            GradCompression.fp16: default_hooks.fp16_compress_hook,
        }
        model.register_comm_hook(group, hooks[train.grad_compression])
    return model


def bucket_bytes(model: DistributedDataParallel) -> list[int]:
    """Sizes of the gradient buckets in the order in which they are sent; empty until DDP tells the final ones."""
    said = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return [int(size) for size in str(said.get("rebuilt_bucket_sizes") or "").split(",") if size.strip()]
