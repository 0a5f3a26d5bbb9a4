"""Batch sizes: one rule, used by the plan and by the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.schema import TrainConfig
from clusterrun.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Samples per optimizer step. ``global_ = per_rank * world_size`` and ``per_rank = micro * accumulate``."""

    global_: int
    per_rank: int
    micro: int


def batch_sizes(train: TrainConfig, world_size: int) -> BatchSizes:
    """Resolve ``train.batch_per_rank`` or ``train.global_batch`` for a world size.

    Raises:
        ConfigError: both or neither given, or not divisible by world size x accumulate.
    """
    if (train.batch_per_rank is None) == (train.global_batch is None):
        raise ConfigError(
            "train.batch_per_rank and train.global_batch: give exactly one "
            f"(they are {train.batch_per_rank} and {train.global_batch}); set the other to null"
        )
    if train.batch_per_rank is not None:
        per_rank = train.batch_per_rank
        if per_rank % train.accumulate:
            raise ConfigError(
                f"train.batch_per_rank={per_rank}: not divisible by train.accumulate={train.accumulate}; "
                f"nearest that is: {_nearest_multiple(per_rank, train.accumulate)}"
            )
    else:
        assert train.global_batch is not None
        unit = world_size * train.accumulate
        if train.global_batch % unit:
            raise ConfigError(
                f"train.global_batch={train.global_batch}: not divisible by world size {world_size} x "
                f"train.accumulate={train.accumulate}; nearest that is: {_nearest_multiple(train.global_batch, unit)}"
            )
        per_rank = train.global_batch // world_size
    return BatchSizes(global_=per_rank * world_size, per_rank=per_rank, micro=per_rank // train.accumulate)


def _nearest_multiple(value: int, unit: int) -> int:
    return max(1, (value + unit // 2) // unit) * unit
