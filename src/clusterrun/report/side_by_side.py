"""Declared, detected, predicted, measured: the four numbers of a run beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.config.schema import Accelerator, InterNode
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.cost.catalog import Catalog
from clusterrun.measure import groups
from clusterrun.measure.collectives import busbw as busbw_of
from clusterrun.measure.collectives import size_text
from clusterrun.nccl.placing import placing
from clusterrun.report.bench_expected import Expected
from clusterrun.report.facts import RunFacts, measured_all_reduce
from clusterrun.report.html_wiring import inside_text, outside_text
from clusterrun.report.units import duration_text
from clusterrun.topology.classify import classify

NOTHING = "-"
COLUMNS = ("", "declared", "detected", "predicted", "measured")


@dataclass(frozen=True)
class Line:
    """One thing in four ways, in words; "-" where nobody said it."""

    what: str
    declared: str = NOTHING
    detected: str = NOTHING
    predicted: str = NOTHING
    measured: str = NOTHING

    def cells(self) -> tuple[str, str, str, str, str]:
        return self.what, self.declared, self.detected, self.predicted, self.measured


def side_by_side(f: RunFacts) -> list[Line]:
    """For the wiring in a node, the way between nodes, and a training step."""
    return [*_wiring(f), *_step(f)]


def could_be_faster(f: RunFacts) -> list[str]:
    """Other GPUs or NICs of the nodes, by what preflight detected on them; each once with the nodes it is for."""
    catalog, found = Catalog(user_config_dirs()), dict[str, list[str]]()
    for node, topology in f.topologies.items():
        for one in placing(topology, f.config, catalog, f.config.cluster.env):
            found.setdefault(f"{one.change}: predicted {one.speedup:.3g}x; {one.note}", []).append(node)
    return [f"faster on {', '.join(nodes[:4])}{', ...' * (len(nodes) > 4)}: {text}" for text, nodes in found.items()]


def _wiring(f: RunFacts) -> Iterator[Line]:
    cluster = f.config.cluster
    rates = {name: _rates(f, name) for name in (groups.ALL, groups.IN_NODE, groups.BETWEEN_NODES)}
    if cluster.nproc_per_node > 1:
        cpus = cluster.accelerator is Accelerator.cpu
        yield Line("in a node", "CPUs, loopback" if cpus else inside_text(cluster), _inside(f), *rates[groups.IN_NODE])
    if cluster.nodes > 1 and cluster.interconnect.inter_node is not InterNode.none:
        yield Line("between nodes", outside_text(cluster), _between(f), *rates[groups.BETWEEN_NODES])
    if cluster.nodes * cluster.nproc_per_node > 1:
        yield Line("all ranks", NOTHING, NOTHING, *rates[groups.ALL])


def _inside(f: RunFacts) -> str:
    found: dict[str, list[str]] = {}
    for node, topology in f.topologies.items():
        if topology.gpus:
            wiring = classify(topology)
            worst = "" if wiring.worst is None else f", worst link {wiring.worst}"
            found.setdefault(wiring.kind.value.replace("_", " ") + worst, []).append(node)
    if len(found) < 2:
        return "".join(found) or NOTHING
    return "; ".join(f"{what} ({', '.join(nodes[:4])}{', ...' * (len(nodes) > 4)})" for what, nodes in found.items())


def _between(f: RunFacts) -> str:
    """NICs as sysfs has them; without GPUs the interface on the way to the other nodes."""
    found: dict[str, None] = {}
    for topology in f.topologies.values():
        rates = [nic.rate_gbit_s for nic in topology.nics if nic.state in (None, "ACTIVE")]
        if rates:
            known = sorted({f"{rate:g}" for rate in rates if rate})
            found[f"{len(rates)} x {'/'.join(known) or '?'} Gbit/s"] = None
    if not found:
        for interface, speed in f.interfaces.values():
            found[f"{interface}, {f'{speed / 1000:g} Gbit/s' if speed and speed > 0 else 'rate not told'}"] = None
    return "; ".join(found) or NOTHING


def _rates(f: RunFacts, phase: str) -> tuple[str, str]:
    """Predicted and measured bus bandwidth of an all-reduce; predicted at some large size where nobody measured."""
    cluster = f.config.cluster
    expected = Expected(cluster)
    row = measured_all_reduce(f.run, f.config, phase)
    n = cluster.nproc_per_node
    ranks = {
        groups.ALL: range(cluster.nodes * n),
        groups.IN_NODE: range(n),
        groups.BETWEEN_NODES: range(0, cluster.nodes * n, n),
    }[phase]
    size = row.bytes if row else (1 << 28 if cluster.accelerator is Accelerator.cuda else 1 << 24)
    seconds = expected.seconds("all_reduce", row.ranks if row else ranks, size)
    of = size_text(size) + (", one rank of each" if phase == groups.BETWEEN_NODES and n > 1 else "")
    predicted = _rate(busbw_of("all_reduce", len(ranks), size, seconds), of) if seconds else NOTHING
    return predicted, _rate(row.busbw, of) if row else NOTHING


def _rate(bytes_per_s: float, of: str) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s ({of})"


def _off(ratio: float) -> str:
    return f" ({100 * (ratio - 1):+.0f} %)" if 0.5 < ratio < 2 else f" ({ratio:,.3g} times)"


def _step(f: RunFacts) -> Iterator[Line]:
    p: Mapping[str, Any] = f.plan.get("prediction") or {}
    known = bool(p.get("step_s")) and not p.get("why_not")
    if known or f.step_s:
        off = _off(f.step_s / p["step_s"]) if known and f.step_s else ""
        yield Line(
            "step",
            predicted=duration_text(p["step_s"]) if known else NOTHING,
            measured=duration_text(f.step_s) + off if f.step_s else NOTHING,
        )
    waited = f.waiting
    if known or waited is not None:
        yield Line(
            "waiting for gradients",
            predicted=f"{p['share']:.0%} of a step" if known else NOTHING,
            measured=f"{waited:.0%} of a step" if waited is not None else NOTHING,
        )
    if known or f.samples_per_s:
        yield Line(
            "samples/s",
            predicted=f"{p['samples_per_s']:,.0f}" if known else NOTHING,
            measured=f"{f.samples_per_s:,.0f}" if f.samples_per_s else NOTHING,
        )
