"""Saving as a training loop sees it: what is due, one save in flight at most, what to say and when to give up.

Every rank makes the same calls in the same order. What only one rank knows (its clock, whether its part of a save is
written) goes into ``votes``, which the loop adds up over the ranks in a collective that it makes anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from clusterrun.checkpoint.cadence import Cadence
from clusterrun.checkpoint.retention import Score
from clusterrun.checkpoint.state import Checkpointer, Saved
from clusterrun.config.schema import CheckpointConfig, OnOvertake
from clusterrun.errors import CheckpointError

# Between tries to save the end, seconds: twice as long each time, up to the second.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True)
class State:
    """What is saved: entries that are equal on all ranks, entries of this rank alone, and the rest as JSON."""

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    rest: Mapping[str, Any]


@dataclass
class Saver:
    """
    Attributes:
        grace_s: seconds a run that is told to stop has for saving.
        report: takes (saved, reason) of every save that ended.
        say, warn: lines for people, on rank 0.
        saved_step: the newest step in a checkpoint, None when there is none.
    """

    checkpointer: Checkpointer
    config: CheckpointConfig
    cadence: Cadence
    grace_s: float
    report: Callable[[Saved, str], None]
    say: Callable[[str], None]
    warn: Callable[[str], None]
    saved_step: int | None
    _reason: str = field(init=False, default="")
    _failures: int = field(init=False, default=0)
    _warned_of_grace_s: float = field(init=False, default=0.0)

    @property
    def in_flight(self) -> bool:
        return self.checkpointer.in_flight is not None

    def due_at(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for a save here; the same on all ranks."""
        return self.cadence.due_at(step)

    def votes(self) -> list[float]:
        """To be added up over all ranks and given to ``heard``."""
        due = self.checkpointer.rank == 0 and not self.in_flight and self.cadence.due_by_time()
        return [float(self.checkpointer.has_ended), float(due)]

    def heard(self, votes: Sequence[float]) -> bool:
        """Take in the sums of the votes: end a save that all ranks have written. Whether one is due by time."""
        ended, due = votes
        if self.in_flight and ended == self.checkpointer.world_size:
            self.land()
        return due > 0

    def save(self, step: int, reason: str, take: Callable[[], State], *, last: bool = False) -> None:
        """Save unless this step is saved already, or is 0, where a fresh start gives the same.

        Args:
            take: makes the state; its values need not be copies.
            last: training ends here: not in the background, and one in flight is waited for.

        Raises:
            CheckpointError: more saves failed in a row than ``checkpoint.max_failed_saves`` allows.
        """
        if self.in_flight:
            if self.checkpointer.in_flight == step and not last:
                return
            if self.config.on_overtake is OnOvertake.skip and not last:
                flying = self.checkpointer.in_flight
                self.warn(
                    f"step {step} is not saved: the checkpoint of step {flying} is still being written "
                    "(checkpoint.on_overtake=skip)"
                )
                return
            self.land()
        if step in (0, self.saved_step):
            return
        self._reason = reason
        self.cadence.began()
        state = take()
        if self.config.async_save and not last:
            self.checkpointer.start(step, state.shared, state.rest, state.own)
        else:
            self._took(self.checkpointer.save(step, state.shared, state.rest, state.own))
        self.cadence.began()

    def save_end(self, step: int, take: Callable[[], State]) -> None:
        """Save the last step of all. No later save can make up for it, so a failed one is tried again.

        Raises:
            CheckpointError: not saved in ``checkpoint.timeout_s`` of waiting, or as ``save``.
        """
        waited, pause = 0.0, _PAUSE_S  # counted, not measured: all ranks make the same tries
        self.save(step, "end", take, last=True)
        while step not in (0, self.saved_step) and waited < self.config.timeout_s:
            time.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE_S)
            self.save(step, "end", take, last=True)
        self.require(step, "training has ended")

    def land(self) -> None:
        """Wait for the save in flight, if there is one, and report how it ended. Raises as ``save``."""
        if self.in_flight:
            self._took(self.checkpointer.finish())

    def require(self, step: int, what: str = "told to stop") -> None:
        """Raises CheckpointError when the step is not saved: who stops must not say that it can go on from here."""
        if step not in (0, self.saved_step):
            raise CheckpointError(
                f"{what}, but step {step} could not be saved; the newest checkpoint is of step {self.saved_step}"
            )

    def would_be_among_the_best(self, step: int, score: Score) -> bool:
        """Remember a validation result; whether its step is to be saved for it. A collective if ``keep_best`` > 0."""
        if not self.config.keep_best:
            return False
        wanted = torch.zeros(1, device=self.checkpointer.device)
        if self.checkpointer.rank == 0:
            store = self.checkpointer.store
            store.add_score(step, score, self.warn)
            present = [info.step for info in store.list() if store.looks_whole(info)]
            wanted += self.checkpointer.keep.is_among_the_best(step, present, store.scores(self.warn))
        dist.broadcast(wanted, src=0)
        return bool(wanted.item())

    def _took(self, saved: Saved) -> None:
        self.report(saved, self._reason)
        if not saved.ok:
            self._failures += 1
            most = self.config.max_failed_saves
            if most is not None and self._failures >= most:
                raise CheckpointError(
                    f"{self._failures} saves in a row failed (checkpoint.max_failed_saves={most}), the last at step "
                    f"{saved.step}: {saved.problem}; the newest checkpoint is of step {self.saved_step}"
                )
            return
        self._failures = 0
        self.saved_step = saved.step
        if (chosen := self.cadence.measured(saved.stall_s, saved.seconds)) is not None:
            self.say(chosen)
        self._check_grace(saved)

    def _check_grace(self, saved: Saved) -> None:
        """A run that is told to stop waits for the save in flight and then makes another."""
        needed = saved.seconds * (2 if self.config.async_save else 1)
        if needed > self.grace_s and needed > 1.2 * self._warned_of_grace_s:
            self._warned_of_grace_s = needed
            self.warn(
                f"saving takes up to {needed:.0f} s, but a run that is told to stop has {self.grace_s:.0f} s for it: "
                "what was done since the last checkpoint would be lost; raise cluster.signal_lead_s"
            )
