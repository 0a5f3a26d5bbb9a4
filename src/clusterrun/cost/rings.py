"""Which links an all-reduce ring has to cross: the best ring through all GPUs of a node."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 10  # GPUs: a search over all rings; nodes have at most 8, few have 10


def best_ring(rates: Sequence[Sequence[float]]) -> float | None:
    """The slowest link of the ring whose slowest link is fastest, in the unit of ``rates`` (symmetric, [gpus][gpus]).

    None for more than ``MOST`` GPUs and fewer than two.
    """
    n = len(rates)
    if not 2 <= n <= MOST:
        return None
    if n == 2:
        return rates[0][1]
    thresholds = sorted({rates[i][j] for i in range(n) for j in range(i)}, reverse=True)
    return next(rate for rate in thresholds if _has_ring(rates, rate))


def _has_ring(rates: Sequence[Sequence[float]], least: float) -> bool:
    """Whether a ring through all uses only links of at least this rate (Held and Karp's dynamic program)."""
    n = len(rates)
    reach = {(1, 0)}  # visited GPUs as bits, and the last of them; rings begin at GPU 0
    for _ in range(n - 1):
        reach = {
            (seen | 1 << j, j) for seen, at in reach for j in range(1, n) if not seen >> j & 1 and rates[at][j] >= least
        }
    return any(rates[at][0] >= least for _, at in reach)
