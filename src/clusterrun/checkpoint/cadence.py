"""When to save: every N steps, every T minutes, or as Young and Daly would. Torch-free.

Time is rank 0's clock alone; the other ranks learn from it that a save is due.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clusterrun.config.schema import CheckpointConfig
from clusterrun.ledger import Attempt, Ending

FIRST_AUTO_S = 60.0  # auto saves once so early, to measure what a save costs
NEWEST = 5  # saves whose median stall counts
# Hours of one worker between failures, as long as a run has seen none itself: 7.9 h at 1,024 GPUs (Kokolis et al.,
# "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024).
WORKER_HOURS_PER_FAILURE = 7.9 * 1024
_FAILURES = (Ending.killed, Ending.crashed, Ending.node_lost)  # others save before they end


@dataclass(frozen=True)
class FailureRate:
    """Mean time between failures of the whole run, seconds, and where the figure comes from."""

    mtbf_s: float
    why: str

    @classmethod
    def of(cls, config: CheckpointConfig, attempts: Sequence[Attempt], workers: int) -> FailureRate:
        """As configured; else what the attempts so far have seen, with one failure in the time that is expected of
        so many workers added to it (a Gamma prior)."""
        if config.mtbf_h is not None:
            return cls(config.mtbf_h * 3600, "as configured")
        failures = sum(attempt.ending in _FAILURES for attempt in attempts[:-1])  # the last one is this
        hours = max(0.0, time.time() - attempts[0].started) / 3600 if attempts else 0.0
        expected = WORKER_HOURS_PER_FAILURE / workers
        why = f"{failures} failures in {hours:.1f} h, and one in {expected:.0f} h is expected of {workers} workers"
        return cls((hours + expected) / (failures + 1) * 3600, why)


@dataclass
class Cadence:
    """Whether a save is due. Steps are the same on all ranks; ``due_by_time`` asks rank 0's clock."""

    config: CheckpointConfig
    rate: FailureRate
    clock: Callable[[], float] = time.monotonic
    _last: float = field(init=False)
    _stalls: list[float] = field(init=False, default_factory=list)
    _told_s: float | None = field(init=False, default=None)
    _busy_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._last = self.clock()

    def due_at(self, step: int) -> bool:
        every = self.config.every_steps
        return every is not None and step % every == 0

    def due_by_time(self) -> bool:
        interval = self.interval_s
        return interval is not None and self.clock() - self._last >= interval

    @property
    def interval_s(self) -> float | None:
        """Seconds of training between saves; None when they do not go by time.

        auto: sqrt(2 C M), C the loop's stall for a save and M the mean time between failures (Young 1974; Daly's
        higher-order terms do not matter while C << M); not shorter than it takes to write one.
        """
        if self.config.every_minutes is not None:
            return self.config.every_minutes * 60
        if not self.config.auto:
            return None
        if not self._stalls:
            return FIRST_AUTO_S
        stall = statistics.median(self._stalls[-NEWEST:])
        return max(math.sqrt(2 * stall * self.rate.mtbf_s), self._busy_s)

    def began(self) -> None:
        """A save was begun, by whatever rule: time counts from here. Again when its stall is over."""
        self._last = self.clock()

    def measured(self, stall_s: float, seconds: float) -> str | None:
        """A save succeeded. For auto: what it chose, when that is new by more than a fifth."""
        self._stalls.append(stall_s)
        self._busy_s = seconds
        chosen = self.interval_s
        if not self.config.auto or chosen is None:
            return None
        if self._told_s is not None and abs(chosen - self._told_s) <= 0.2 * self._told_s:
            return None
        self._told_s = chosen
        stall = statistics.median(self._stalls[-NEWEST:])
        return (
            f"checkpoint.auto: saving every {_readable(chosen)}, which costs {stall / chosen:.2%} of the time: a save "
            f"stops training for {stall:.3g} s, a failure comes every {_readable(self.rate.mtbf_s)} ({self.rate.why})"
        )


def _readable(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
