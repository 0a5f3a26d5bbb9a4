"""Latency and rate from times over sizes: t = alpha + beta x bytes. Torch-free."""

from __future__ import annotations

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
    """Least squares of relative errors, so that small sizes count as much as large ones. None for fewer than 2 sizes.

    Neither term may be negative: a fit that wants it so has the other alone.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        return None
    # Minimise sum of (alpha/t + beta s/t - 1)^2: normal equations of two unknowns.
    u = [1 / t for _, t in points]
    v = [s / t for s, t in points]
    uu, vv, uv = _dot(u, u), _dot(v, v), _dot(u, v)
    determinant = uu * vv - uv * uv
    alpha = (sum(u) * vv - sum(v) * uv) / determinant
    beta = (sum(v) * uu - sum(u) * uv) / determinant
    if alpha < 0:
        alpha, beta = 0.0, sum(v) / vv
    elif beta < 0:
        alpha, beta = sum(u) / uu, 0.0
    worst = max(abs((alpha + beta * s) / t - 1) for s, t in points)
    return Fit(alpha, beta, worst)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
