"""Ranks that are slower than their peers.

Step times tell nothing: DDP makes every rank wait for the slowest in each step. What differs is a rank's own time, that
of a step without the wait for other ranks' gradients, which each worker measures (``train.stepclock``).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

_LEAST_S = 0.002  # a rank that is slower by less is within what a clock and a scheduler do


@dataclass(frozen=True)
class Straggler:
    rank: int
    factor: float  # own time over the median of its peers
    own_s: float
    peers_s: float
    data_share: float  # how much of what it takes longer goes into fetching data, from 0 to 1

    def __str__(self) -> str:
        why = ", most of it waiting for data" if self.data_share > 0.5 else ""
        return (
            f"rank {self.rank} is a straggler: a step takes it {1000 * self.own_s:.1f} ms of its own, "
            f"{self.factor:.1f} times its peers' {1000 * self.peers_s:.1f} ms{why}"
        )


@dataclass
class Stragglers:
    """Tells of each straggler once, and again when it had recovered in between.

    Attributes:
        factor: slower than the median of the peers by so much; 0 tells nothing.
        for_s: for so long without a break, in seconds.
    """

    factor: float
    for_s: float
    _since: dict[int, float] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def update(self, now: float, own: Mapping[int, tuple[float, float]]) -> list[Straggler]:
        """``own``: rank -> seconds of its own in a step, of which for data; all from about the same time."""
        known = {rank: times for rank, times in own.items() if times[0] > 0}
        found = []
        for rank, (own_s, data_s) in known.items():
            peers = [times for other, times in known.items() if other != rank]
            if not peers or self.factor == 0:
                continue
            usual = statistics.median(times[0] for times in peers)
            if own_s <= self.factor * usual or own_s - usual < _LEAST_S:
                self._since.pop(rank, None)
                self._told.discard(rank)
                continue
            since = self._since.setdefault(rank, now)
            if rank in self._told or now - since < self.for_s:
                continue
            self._told.add(rank)
            usual_data = statistics.median(times[1] for times in peers)
            share = min(1.0, max(0.0, (data_s - usual_data) / (own_s - usual)))
            found.append(Straggler(rank, own_s / usual, own_s, usual, share))
        return found
