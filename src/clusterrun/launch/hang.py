"""Who is behind when nothing moves: a pure function of what the agents of all nodes saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.launch.lookout import RankState
from clusterrun.pulse import Stage

_WORDS = {"T": "is stopped (SIGSTOP, or a debugger)", "t": "is stopped (SIGSTOP, or a debugger)"}
_STUCK = "is stuck in the kernel (state D), which is mostly storage that does not answer"
# In these a rank works by itself; in any other it may be waiting for the one that is behind.
_ALONE = (Stage.data.name, Stage.compute.name)


@dataclass(frozen=True)
class Blame:
    """What to tell. ``node`` and ``rank`` are None when nobody stands out; ``silent`` are nodes without a word."""

    message: str
    step: int | None
    node: str | None = None
    rank: int | None = None
    silent: tuple[str, ...] = ()


def states(reports: Mapping[str, Any]) -> dict[str, list[RankState]]:
    """Node -> its ranks, from the agents' messages; one that makes no sense counts as none."""
    found = {}
    for node, report in reports.items():
        try:
            found[node] = [RankState(**rank) for rank in report["ranks"]]
        except (TypeError, KeyError):
            continue
    return found


def blame(nodes: Sequence[str], reports: Mapping[str, Sequence[RankState]]) -> Blame:
    """The node or the ranks that the others wait for. What says most comes first: a node without a word, a process
    that is stopped, one stuck in the kernel, then whoever has done least."""
    everyone = [(node, rank) for node, ranks in reports.items() for rank in ranks]
    step = max((rank.step for _, rank in everyone), default=0) or None
    quiet = max((rank.quiet_s for _, rank in everyone), default=0.0)
    begin = f"no step ended for {quiet:.0f} s (step {step})"
    silent = [node for node in nodes if node not in reports]
    if silent and everyone:
        return Blame(f"{begin}: no word from {', '.join(silent)}", step, silent[0], silent=tuple(silent))
    for letters, words in (("Tt", None), ("D", _STUCK)):
        these = [(node, rank) for node, rank in everyone if rank.state and rank.state in letters]
        if these and len(these) < len(everyone):
            node, rank = these[0]
            return Blame(f"{begin}: {_names(these)} {words or _WORDS[rank.state]}", step, node, rank.rank)
    behind = _behind(everyone)
    if behind:
        node, rank = behind[0]
        what = f"in '{rank.stage}' of step {rank.step}"
        return Blame(f"{begin}: {_names(behind)} is behind, {what}; the others wait", step, node, rank.rank)
    return Blame(f"{begin}: no rank is behind the others; see the stacks in the logs", step)


def _behind(everyone: list[tuple[str, RankState]]) -> list[tuple[str, RankState]]:
    """Those with the fewest ticks, or among equals those that work while all others may be waiting; [] when all do."""
    if not everyone:
        return []
    least = min((rank.step, rank.ticks) for _, rank in everyone)
    last = [(node, rank) for node, rank in everyone if (rank.step, rank.ticks) == least]
    if len(last) == len(everyone):
        last = [(node, rank) for node, rank in everyone if rank.stage in _ALONE]
    return last if len(last) < len(everyone) else []


def _names(these: Sequence[tuple[str, RankState]]) -> str:
    named = [f"rank {rank.rank} on {node}" for node, rank in these[:4]]
    return ", ".join(named) + (f" and {len(these) - 4} more" if len(these) > 4 else "")
