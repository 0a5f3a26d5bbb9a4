"""What the slow checks (preflight=full) look at: all that was measured, on the nodes that passed the fast ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterrun.measure.groups import NODE_PAIR, RAIL
from clusterrun.measure.results import WAIT, Job, NodeMeasured


@dataclass(frozen=True)
class NodePair:
    """Two nodes measured together.

    Attributes:
        rate: busbw of an all-reduce over all their ranks, bytes per second; None when it did not come to an end.
        wrong: elements of the result that were wrong.
        rails: local rank -> the same with that rank of each node alone, where that was looked at.
        why: what happened instead of a rate.
        alone: measured in a group of the two nodes alone, nobody else being busy with them.
    """

    a: str
    b: str
    rate: float | None
    wrong: int = 0
    rails: Mapping[int, float | None] = field(default_factory=dict)
    why: str = ""
    alone: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.a, self.b


@dataclass(frozen=True)
class SlowEvidence:
    """Attributes:
    asked: the nodes that were to measure themselves.
    local: what those that answered measured.
    paired: the nodes that were to measure with each other.
    pairs: what came of it; a later measurement of the same pair takes the place of an earlier one.
    """

    asked: tuple[str, ...] = ()
    local: Mapping[str, NodeMeasured] = field(default_factory=dict)
    paired: tuple[str, ...] = ()
    pairs: tuple[NodePair, ...] = ()

    def newest(self) -> dict[tuple[str, str], NodePair]:
        return {pair.key: pair for pair in self.pairs}


def node_pairs(job: Job, per_node: int, answers: Iterable[NodeMeasured]) -> list[NodePair]:
    """The pairs of nodes that were measured in one job, from what all its nodes said."""
    rates: dict[tuple[str, str], float | None] = {}
    wrong: dict[tuple[str, str], int] = {}
    why: dict[tuple[str, str], str] = {}
    rails: dict[tuple[str, str], dict[int, float | None]] = {}

    def place(ranks: tuple[int, ...]) -> tuple[str, str]:
        first, second = sorted({rank // per_node for rank in ranks})
        return job.nodes[first], job.nodes[second]

    for measured in answers:
        for row in measured.rows:
            if row.phase == NODE_PAIR:
                rates[place(row.ranks)] = row.best_busbw
                wrong[place(row.ranks)] = row.wrong or 0
            elif row.phase == RAIL:
                rails.setdefault(place(row.ranks), {})[row.ranks[0] % per_node] = row.best_busbw
    for measured in answers:
        for stuck in measured.stuck:
            if stuck.what == NODE_PAIR:
                rates.setdefault(place(stuck.ranks), None)
                why[place(stuck.ranks)] = stuck.why
            elif stuck.what == RAIL:
                rails.setdefault(place(stuck.ranks), {}).setdefault(stuck.ranks[0] % per_node, None)
            elif len(job.nodes) == 2 and not rates and stuck.what == WAIT:
                # The two of them never came together: that is what was to be found out.
                rates[(job.nodes[0], job.nodes[1])] = None
                why[(job.nodes[0], job.nodes[1])] = f"the two never met: {stuck.why}"
    return [
        NodePair(*key, rate, wrong.get(key, 0), rails.get(key, {}), "" if rate is not None else why.get(key, ""))
        for key, rate in rates.items()
    ]
