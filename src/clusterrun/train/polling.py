"""How ranks agree on stopping without paying for a collective in every step.

All ranks poll at the same ticks; a tick is one training step or one validation batch. A poll is one all-reduce of a
small float64 tensor: the stop flags, the losses that wait to be logged, other votes (about saving), and from rank 0 the
number of ticks to the next poll, chosen from its measured time per tick so that a poll comes about every
``POLL_EVERY_S``. So a tiny model polls every few hundred steps, and a model with slow steps after each one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

import torch
import torch.distributed as dist
from torch import Tensor

from clusterrun.pulse import Pulse
from clusterrun.train.stopping import STOP_SIGNALS, StopFlag

POLL_EVERY_S = 0.25
MOST_TICKS = 1000
GROWTH = 4  # the distance of polls grows at most so fast: the first ticks tell little about the later ones


@dataclass(frozen=True)
class Agreed:
    """A stop signal that any rank received, the mean over ranks of each loss, and the sum over ranks of each vote."""

    signal: Signals | None
    losses: list[float]
    votes: list[float]


class Poll:
    """When to poll, and the poll itself. Every rank must call the same methods in the same order."""

    def __init__(
        self, flag: StopFlag, device: torch.device, every_s: float = POLL_EVERY_S, pulse: Pulse | None = None
    ) -> None:
        self.flag, self.device, self.every_s = flag, device, every_s
        self._pulse = pulse or Pulse()
        self.world_size = dist.get_world_size()
        self.begin_phase()

    def begin_phase(self) -> None:
        """Training begins or validation begins: what a tick costs is not known yet, so poll after the first."""
        self._distance = 1
        self.exclude_pause()
        self._left = 1

    def exclude_pause(self) -> None:
        """The time since the last poll was not spent on ticks (a checkpoint was written): don't count it."""
        self._since = time.perf_counter()
        self._ticks = 0

    def tick(self) -> bool:
        """Count a tick, which is also a sign of life; whether it is time to poll."""
        self._pulse.tick()
        self._ticks += 1
        self._left -= 1
        return self._left <= 0

    def agree(self, losses: Sequence[Tensor] = (), votes: Sequence[float] = ()) -> Agreed:
        """A collective. Every rank brings as many losses and votes as every other.

        Sums of a few float32 losses are exact in float64, so a mean does not depend on what else is in the tensor.
        """
        mine = [float(self.flag.received == number) for number in STOP_SIGNALS]
        distance = float(self._next_distance()) if dist.get_rank() == 0 else 0.0
        both = torch.tensor([distance, *mine, *votes], dtype=torch.float64).to(self.device)
        if losses:
            both = torch.cat([both, torch.stack([loss.detach().reshape(()) for loss in losses]).double()])
        dist.all_reduce(both)
        values = both.tolist()
        self._left = self._distance = int(values[0])
        received, rest = values[1 : 1 + len(mine)], values[1 + len(mine) :]
        self.exclude_pause()
        signal = next((number for number, count in zip(STOP_SIGNALS, received, strict=True) if count), None)
        return Agreed(signal, [total / self.world_size for total in rest[len(votes) :]], rest[: len(votes)])

    def _next_distance(self) -> int:
        if not self._ticks:
            return self._distance
        per_tick = (time.perf_counter() - self._since) / self._ticks
        wanted = int(self.every_s / max(per_tick, 1e-9))
        return max(1, min(wanted, self._distance * GROWTH, MOST_TICKS))
