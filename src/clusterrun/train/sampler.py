"""Which samples make a batch: a pure function of (seed, epoch, samples consumed), the same for every world size.

Torch-free. The order of an epoch comes from raw Philox numbers, whose stream numpy guarantees never to change, so a run
resumed under another numpy sees the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clusterrun.errors import ConfigError


@dataclass
class Position:
    """How far training has come.

    Attributes:
        step: optimizer steps done.
        epoch: the epoch the next sample belongs to, from 0.
        consumed: samples of that epoch already trained on, over all ranks.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0

    def advance(self, samples: int, global_batch: int) -> None:
        """One optimizer step was done, of an epoch with so many samples."""
        self.step += 1
        self.consumed += global_batch
        self.begin_epoch_if_ended(samples, global_batch)

    def begin_epoch_if_ended(self, samples: int, global_batch: int) -> None:
        """Go on to the next epoch when no whole global batch is left: an incomplete last batch is dropped."""
        if self.consumed + global_batch > samples:
            self.epoch += 1
            self.consumed = 0

    @property
    def at_epoch_end(self) -> bool:
        """Whether the step before was the last of its epoch."""
        return self.step > 0 and self.consumed == 0


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The order of all samples in an epoch: a permutation of 0..samples-1, shape [samples]."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(samples)
    # The low bits are the sample's index: sorting is several times faster than argsort, and there are no ties.
    mask = np.uint64((1 << max(1, samples - 1).bit_length()) - 1)
    keys = np.sort((keys & ~mask) | np.arange(samples, dtype=np.uint64))
    return (keys & mask).astype(np.int64)


def rank_slice(position: Position, rank: int, per_rank: int) -> slice:
    """Where rank's samples of the next global batch lie in the epoch's order."""
    start = position.consumed + rank * per_rank
    return slice(start, start + per_rank)


def check_batch(samples: int, global_batch: int) -> None:
    """Raise ConfigError when an epoch has not even one whole global batch."""
    if samples < global_batch:
        raise ConfigError(
            f"the training data has {samples} samples, fewer than one global batch of {global_batch}: "
            "lower train.batch_per_rank or train.global_batch, or use more data"
        )


def total_steps(position: Position, samples: int, global_batch: int, epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of the whole run, as seen from ``position``, whose world size may differ from before.

    ``epochs`` passes over the data, cut short by ``max_steps``.
    """
    here = replace(position)
    here.begin_epoch_if_ended(samples, global_batch)
    left = 0
    if here.epoch < epochs:
        left = (samples - here.consumed) // global_batch + (epochs - here.epoch - 1) * (samples // global_batch)
    total = here.step + left
    return total if max_steps is None else max(here.step, min(total, max_steps))
