"""From rates of pairs to the member, or the pair, that is slow. Pure and torch-free.

A member is to blame when every pair it takes part in is slow; a pair, when both its members are fast with others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)
_MANY = 64


@dataclass(frozen=True)
class Blame(Generic[Member]):
    """``expected``: the rate the pairs were held against, None when there was none to be had."""

    expected: float | None
    members: tuple[Member, ...]
    pairs: tuple[tuple[Member, Member], ...]

    @property
    def suspects(self) -> set[Member]:
        return {*self.members, *(member for pair in self.pairs for member in pair)}


def blame(
    rates: Mapping[tuple[Member, Member], float | None], below: float, expected: float | None = None
) -> Blame[Member]:
    """Who is slow.

    Args:
        rates: of each pair that was measured; None for one that hung or failed, which is slow whatever is expected.
        below: a rate below this share of the expected one is slow.
        expected: None takes what is usual (``usual_best``).
    """
    if expected is None:
        expected = usual_best(rates)
    slow = [pair for pair, rate in rates.items() if rate is None or (expected and rate < below * expected)]
    fast = {member for pair in rates.keys() - set(slow) for member in pair}
    counts = Counter(member for pair in slow for member in pair)
    members: list[Member] = []
    left = list(slow)
    while left:
        # A member with a single pair can't be told from its partner, unless that is fast elsewhere.
        able = [
            member
            for member in dict.fromkeys(m for pair in left for m in pair)
            if member not in fast and (counts[member] > 1 or any(set(pair) - {member} <= fast for pair in left))
        ]
        able = [m for m in able if any(m in pair for pair in left)]
        if not able:
            break
        worst = max(able, key=lambda member: (counts[member], sum(member in pair for pair in left)))
        members.append(worst)
        left = [pair for pair in left if worst not in pair]
    return Blame(expected, tuple(members), tuple(left))


def usual_best(rates: Mapping[tuple[Member, Member], float | None]) -> float | None:
    """The median over all members of the best rate that each reaches with anybody: one slow member drags down its
    partners' pairs, but not their best. None when there are fewer than two pairs, or none was measured."""
    best: dict[Member, float] = {}
    for pair, rate in rates.items():
        for member in pair:
            best[member] = max(best.get(member, 0.0), rate or 0.0)
    if len(rates) < 2:
        return None
    return statistics.median(best.values()) or None


def usual_among(own: float, peers: Sequence[float]) -> tuple[float | None, float]:
    """The median of the peers' values, and three times their spread (of a normal distribution, by the median of the
    absolute deviations): a value that is within it is no outlier."""
    if not peers:
        return None, 0.0
    middle = statistics.median(peers)
    return middle, 3 * 1.4826 * statistics.median([abs(value - middle) for value in peers])


def is_slow(own: float, peers: Sequence[float], below: float) -> bool | None:
    """Whether a value is too far below its peers'. None: no peers."""
    middle, spread = usual_among(own, peers)
    if middle is None:
        return None
    return own < below * middle and own < middle - spread


def outliers(values: Mapping[Member, float], below: float) -> dict[Member, tuple[bool | None, float | None]]:
    """For each value whether it is too far below the others', and what is usual among them; (None, None) for one alone.

    Among many values one's own does not move the median: then it is taken once, over all.
    """
    if len(values) > _MANY:
        everybody = list(values.values())
        middle, spread = usual_among(0.0, everybody)
        assert middle is not None
        return {key: (own < below * middle and own < middle - spread, middle) for key, own in values.items()}
    found: dict[Member, tuple[bool | None, float | None]] = {}
    for key, own in values.items():
        peers = [value for other, value in values.items() if other != key]
        found[key] = is_slow(own, peers, below), usual_among(own, peers)[0]
    return found
