"""Latency and rate from times over sizes: t = alpha + beta x bytes. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """``alpha_s``: seconds of an empty operation. ``beta_s_per_byte``: its inverse is the algbw of a huge one.

    ``worst``: largest relative error of the line over the sizes it was fitted to.
    """

    alpha_s: float
    beta_s_per_byte: float
    worst: float

    def seconds(self, size: int) -> float:
        return self.alpha_s + self.beta_s_per_byte * size


def fit(points: Sequence[tuple[int, float]]) -> Fit | None:
    """The line of least absolute relative error: small sizes count as much as large ones, and a size that stands out
    (a burst that a switch lets through, a change of protocol) does not bend it. None for fewer than 2 sizes.

    It goes through two of the points, or through one when a term is 0 (neither may be negative): all are tried.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    lines = [(t, 0.0) for _, t in points] + [(0.0, t / s) for s, t in points]
    for (s, t), (other_s, other_t) in itertools.combinations(points, 2):
        if s != other_s:
            beta = (other_t - t) / (other_s - s)
            lines.append((t - beta * s, beta))
    best = min((line for line in lines if min(line) >= 0), key=lambda line: sum(_errors(line, points)))
    return Fit(*best, worst=max(_errors(best, points)))


def _errors(line: tuple[float, float], points: Sequence[tuple[int, float]]) -> list[float]:
    return [abs((line[0] + line[1] * s) / t - 1) for s, t in points]
