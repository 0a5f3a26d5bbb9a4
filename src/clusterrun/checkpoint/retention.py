"""Which checkpoints stay. A pure function of what is there and of the validation results. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clusterrun.config.schema import BestBy, CheckpointConfig

SMALLEST_KEEP = 2  # a damaged checkpoint needs a predecessor


@dataclass(frozen=True)
class Score:
    """A validation result: mean loss, and the value of the task's metric."""

    loss: float
    value: float


@dataclass(frozen=True)
class Keep:
    """What is retained: a checkpoint stays when any of the rules wants it.

    Attributes:
        last: so many of the newest, at least 2.
        every_steps: the first at or after each multiple of so many steps.
        best: so many with the best score, by ``best_by``; of equal ones the newest.
    """

    last: int
    every_steps: int | None = None
    best: int = 0
    best_by: BestBy = BestBy.loss

    @classmethod
    def of(cls, config: CheckpointConfig) -> Keep:
        return cls(config.keep, config.keep_every_steps, config.keep_best, config.best_by)

    def steps(self, present: Iterable[int], scores: Mapping[int, Score]) -> set[int]:
        """Those of the ``present`` steps that stay."""
        newest = sorted(present, reverse=True)
        kept = set(newest[: max(self.last, SMALLEST_KEEP)])
        if self.every_steps is not None:
            stretch = 0
            for step in reversed(newest):
                if step // self.every_steps > stretch:
                    stretch = step // self.every_steps
                    kept.add(step)
        return kept | set(self.ranking(newest, scores)[: self.best])

    def ranking(self, present: Iterable[int], scores: Mapping[int, Score]) -> list[int]:
        """The steps that have a score, best first. A score that is no number is none."""
        scored = [step for step in present if step in scores and self._order(scores[step]) is not None]
        return sorted(scored, key=lambda step: (self._order(scores[step]), -step))

    def is_among_the_best(self, step: int, present: Iterable[int], scores: Mapping[int, Score]) -> bool:
        """Whether a checkpoint of ``step``, if there were one, would be kept for its score."""
        return step in self.ranking({*present, step}, scores)[: self.best]

    def _order(self, score: Score) -> float | None:
        """Smaller is better."""
        value = {BestBy.loss: score.loss, BestBy.metric_min: score.value, BestBy.metric_max: -score.value}[self.best_by]
        return None if value != value else value
