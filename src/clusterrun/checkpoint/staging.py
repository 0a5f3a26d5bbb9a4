"""What a rank writes of a state that all ranks have, and its copy in host memory for a save in the background."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from clusterrun.errors import CheckpointError


def my_share(shared: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """This rank's entries of a state that is equal on all ranks: about as many bytes as every other's.

    The largest entries go first, each to who has least. Sharded tensors are everybody's: each rank has its own part.
    """
    loads = [0] * world_size
    mine: dict[str, Any] = {}
    for key, value in sorted(shared.items(), key=lambda item: (-_bytes(item[1]), item[0])):
        least = loads.index(min(loads))
        loads[least] += _bytes(value)
        if least == rank or isinstance(value, DTensor):
            mine[key] = value
    return mine


def fingerprint(shared: Mapping[str, Any]) -> str:
    """A digest of keys, shapes and types. Ranks whose fingerprints differ would not write all there is."""
    what = [(key, str(getattr(value, "shape", "")), str(getattr(value, "dtype", ""))) for key, value in shared.items()]
    return xxhash.xxh3_64_hexdigest(repr(sorted(what)).encode())


class HostCopies:
    """Buffers in host memory that are used again from save to save: touching new memory takes longer than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of all entries as they are now, tensors of the CPU too.

        Raises:
            CheckpointError: an entry is sharded.
        """
        copies: dict[str, Any] = {}
        on_gpu = False
        for key, value in entries.items():
            if isinstance(value, DTensor):
                raise CheckpointError(f"checkpoint.async_save=true: {key} is sharded; save it with async_save=false")
            if not isinstance(value, Tensor):
                copies[key] = copy.deepcopy(value)
                continue
            on_gpu = on_gpu or value.is_cuda
            copies[key] = self._buffer(key, value)
            copies[key].copy_(value.detach(), non_blocking=value.is_cuda)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _buffer(self, key: str, value: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            # pinned: else a copy from a GPU is half as fast, and not asynchronous
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[key] = buffer
        return buffer


def _bytes(value: Any) -> int:
    return int(value.numel() * value.element_size()) if isinstance(value, Tensor) else 0
