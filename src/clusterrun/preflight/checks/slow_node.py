"""Slow checks of the wires inside a node: all its ranks together, and each pair."""

from __future__ import annotations

from collections.abc import Iterator

from clusterrun.measure.blame import Blame, blame, usual_best
from clusterrun.measure.groups import IN_NODE, PAIRS
from clusterrun.measure.results import NodeMeasured, Row
from clusterrun.preflight.checks.per_gpu import several, topology_of
from clusterrun.preflight.checks.slow_parts import (
    FAIL,
    PASS,
    UNKNOWN,
    answers,
    health_of,
    judged_among,
    not_reached,
    rank_name,
    rate_text,
    slow_below,
)
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Finding


def all_reduce_in_node(e: Evidence) -> Iterator[Finding]:
    rows = {node: row for node, said in answers(e) for row in said.rows if row.phase == IN_NODE}
    judged = judged_among({node: row.best_busbw for node, row in rows.items()}, slow_below(e), "B/s")
    for node, said in answers(e):
        stuck = next((one for one in said.stuck if one.what == IN_NODE), None)
        if stuck:
            yield Finding("all_reduce_in_node", node, FAIL, f"all-reduce in the node: {stuck.why}", "see gpu_pairs")
        elif node not in rows:
            if e.cluster.nproc_per_node > 1:
                yield Finding("all_reduce_in_node", node, UNKNOWN, not_reached(said))
        elif rows[node].wrong:
            text = f"wrong results: {rows[node].wrong} elements of an all-reduce in the node"
            yield Finding("all_reduce_in_node", node, FAIL, text, "do not train on it")
        else:
            verdict, text = judged[node]
            yield Finding(
                "all_reduce_in_node", node, verdict, f"busbw {text}", "see gpu_pairs" if verdict is FAIL else ""
            )


def gpu_pairs(e: Evidence) -> Iterator[Finding]:
    """Pairs are held against those of the same wiring (NV18, PIX, ...), of all nodes."""
    if e.cluster.nproc_per_node < 2:
        return
    shares: dict[str, dict[tuple[int, int], float | None]] = {}
    found = {node: _pairs(said) for node, said in answers(e)}
    kinds = {(node, pair): _kind(e, node, pair) for node, pairs in found.items() for pair in pairs}
    for kind in set(kinds.values()):
        of_kind = {
            ((node, a), (node, b)): row.best_busbw
            for node, pairs in found.items()
            for (a, b), row in pairs.items()
            if row is not None and kinds[node, (a, b)] == kind
        }
        usual = usual_best(of_kind)
        for (one, other), rate in of_kind.items():
            if usual:
                shares.setdefault(one[0], {})[(one[1], other[1])] = rate / usual
    for node, said in answers(e):
        pairs = found[node]
        if not pairs:
            yield Finding("gpu_pairs", node, UNKNOWN, not_reached(said))
            continue
        hung = {pair: None for pair, row in pairs.items() if row is None}
        wrong = [pair for pair, row in pairs.items() if row is not None and row.wrong]
        who = blame({**shares.get(node, {}), **hung}, slow_below(e), expected=1.0)
        if wrong:
            text = several([f"{_pair(e, node, pair)}: wrong results" for pair in wrong], "; ")
            yield Finding("gpu_pairs", node, FAIL, text, "do not train on it")
        elif who.members or who.pairs:
            text = several(_named(e, node, who, pairs, kinds), "; ")
            yield Finding("gpu_pairs", node, FAIL, text, "link, bridge or slot of what is named")
        elif not shares.get(node):
            rates = ", ".join(rate_text(row.best_busbw, "B/s") for row in pairs.values() if row is not None)
            yield Finding("gpu_pairs", node, UNKNOWN, f"{rates}; no pair to hold it against")
        else:
            slowest = min(row.best_busbw for row in pairs.values() if row is not None)
            yield Finding("gpu_pairs", node, PASS, f"{len(pairs)} pairs, the slowest {rate_text(slowest, 'B/s')}")


def _pairs(said: NodeMeasured) -> dict[tuple[int, int], Row | None]:
    """Local ranks -> the row, None for a pair that did not come to an end. In a node of two, both are the pair."""
    found: dict[tuple[int, int], Row | None] = {}
    for row in said.rows:
        if row.phase == PAIRS or (row.phase == IN_NODE and len(row.ranks) == 2):
            found[row.ranks[0], row.ranks[1]] = row
    for stuck in said.stuck:
        if stuck.what == PAIRS or (stuck.what == IN_NODE and len(stuck.ranks) == 2):
            found[stuck.ranks[0], stuck.ranks[1]] = None
    return found


def _named(
    e: Evidence,
    node: str,
    who: Blame[int],
    pairs: dict[tuple[int, int], Row | None],
    kinds: dict[tuple[str, tuple[int, int]], str],
) -> list[str]:
    lines = []
    for member in who.members:
        own = [row for pair, row in pairs.items() if member in pair]
        rates = [row.best_busbw for row in own if row is not None]
        best = f"at best {rate_text(max(rates), 'B/s')}" if rates else "none comes to an end"
        lines.append(f"{rank_name(e, node, member)}: all its {len(own)} pairs are slow, {best}")
    for pair in who.pairs:
        row, kind = pairs[pair], kinds[node, pair]
        said = "does not come to an end" if row is None else rate_text(row.best_busbw, "B/s")
        lines.append(f"{_pair(e, node, pair)}{f' ({kind})' if kind else ''}: {said}")
    return lines


def _pair(e: Evidence, node: str, pair: tuple[int, int]) -> str:
    return "-".join(rank_name(e, node, local) for local in pair)


def _kind(e: Evidence, node: str, pair: tuple[int, int]) -> str:
    """How the two are joined, as nvidia-smi says it; "" where that is not known."""
    report, said = e.reports.get(node), e.slow.local.get(node) if e.slow else None
    topology = topology_of(report) if report else None
    if topology is None or said is None:
        return ""
    places = []
    for local in pair:
        device = next((one for one in said.devices if one.local == local), None)
        gpu = health_of(e, node, device) if device else None
        if gpu is None:
            return ""
        places.append(gpu.index)
    if max(places) >= len(topology.gpus):
        return ""
    link = topology.link(*places)
    return str(link) if link is not None else ""
