"""How a job scales: the points of a sweep side by side. Pure, but for reading the runs.

Speed-up is throughput over that of the point with the fewest workers in the same series; efficiency is speed-up over
how many times more workers there are. Points of a series differ in nodes and workers per node alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterrun.config import frozen
from clusterrun.config.schema import RunConfig
from clusterrun.report.facts import RunFacts, busbw
from clusterrun.report.wide import print_wide

_SHAPE = ("cluster.nodes", "cluster.nproc_per_node", "cluster.spare_nodes")  # what points of a series differ in


@dataclass(frozen=True)
class ScalingPoint:
    """One point. Shares and efficiency are 0 to 1; None: not known."""

    name: str
    run: str
    state: str
    nodes: int
    nproc_per_node: int
    world_size: int
    series: str  # what it is compared within; "" when there is one series only
    samples_per_s: float | None
    step_s: float | None
    speedup: float | None
    efficiency: float | None
    communication: float | None
    busbw_gb_s: float | None  # GB/s, as nccl-tests counts
    loss: float | None
    metric: str | None
    value: float | None
    overrides: tuple[str, ...]


def scaling(points: Sequence[tuple[str, tuple[str, ...], RunFacts]]) -> list[ScalingPoint]:
    """Compare points, given as (name, overrides, facts)."""
    found = []
    keys = [_series(facts.config) for _, _, facts in points]
    for (name, overrides, facts), key in zip(points, keys, strict=True):
        bandwidth = busbw(facts.run, facts.config)
        found.append(
            ScalingPoint(
                name=name,
                run=facts.run.id,
                state=facts.state,
                nodes=facts.config.cluster.nodes,
                nproc_per_node=facts.config.cluster.nproc_per_node,
                world_size=facts.config.world_size,
                series=key,
                samples_per_s=facts.samples_per_s,
                step_s=facts.step_s,
                speedup=None,
                efficiency=None,
                communication=facts.communication,
                busbw_gb_s=bandwidth / 1e9 if bandwidth is not None else None,
                loss=facts.result.get("loss"),
                metric=facts.result.get("metric"),
                value=facts.result.get("value"),
                overrides=overrides,
            )
        )
    names = _series_names(found)
    return [replace(point, series=names[point.series]) for point in compared(found)]


def compared(points: Sequence[ScalingPoint]) -> list[ScalingPoint]:
    """Fill in speed-up and efficiency."""
    base: dict[str, ScalingPoint] = {}
    for point in points:
        if point.samples_per_s:
            known = base.get(point.series)
            if known is None or (point.world_size, point.nodes) < (known.world_size, known.nodes):
                base[point.series] = point
    return [_against(point, base.get(point.series)) for point in points]


def _against(point: ScalingPoint, base: ScalingPoint | None) -> ScalingPoint:
    if base is None or not base.samples_per_s or not point.samples_per_s:
        return point
    speedup = point.samples_per_s / base.samples_per_s
    return replace(point, speedup=speedup, efficiency=speedup / (point.world_size / base.world_size))


def _series(config: RunConfig) -> str:
    """Everything but nodes and workers per node."""
    plain = frozen.to_dict(config)
    for name in ("wait", "run_id", "sweep", "name"):
        plain.pop(name, None)
    for name in ("nodes", "nproc_per_node", "spare_nodes"):
        plain["cluster"].pop(name)
    return json.dumps(plain, sort_keys=True, default=str)


def _series_names(points: Sequence[ScalingPoint]) -> dict[str, str]:
    """Short names: the overrides that all points of a series have and not all points of the sweep."""
    members: dict[str, list[ScalingPoint]] = {}
    for point in points:
        members.setdefault(point.series, []).append(point)
    if len(members) <= 1:
        return dict.fromkeys(members, "")
    everywhere = set.intersection(*(set(p.overrides) for p in points))
    names: dict[str, str] = {}
    for number, (series, own) in enumerate(members.items(), start=1):
        same = set.intersection(*(set(p.overrides) for p in own)) - everywhere
        items = [item.partition("=") for item in own[0].overrides if item in same]
        told = [f"{key.rpartition('.')[2]}={value}" for key, _, value in items if key not in _SHAPE]
        names[series] = " ".join(told) or f"series {number}"
    return names


def as_json(points: Sequence[ScalingPoint], sweep: str) -> dict[str, Any]:
    return {"sweep": sweep, "points": [asdict(point) for point in points]}


def as_csv(points: Sequence[ScalingPoint]) -> str:
    out = io.StringIO()
    fields = [name for name in ScalingPoint.__dataclass_fields__ if name != "overrides"]
    writer = csv.DictWriter(out, fields, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in asdict(point).items()} for point in points)
    return out.getvalue()


COLUMNS = ("point", "state", "nodes x workers", "samples/s", "speed-up", "efficiency", "communication", "busbw GB/s")


def cells(point: ScalingPoint) -> tuple[str, ...]:
    """A row below COLUMNS; "-" for what is not known."""
    return (
        point.name,
        point.state,
        f"{point.nodes} x {point.nproc_per_node}",
        "-" if point.samples_per_s is None else f"{point.samples_per_s:,.0f}",
        "-" if point.speedup is None else f"{point.speedup:.2f}",
        "-" if point.efficiency is None else f"{point.efficiency:.0%}",
        "-" if point.communication is None else f"{point.communication:.0%}",
        "-" if point.busbw_gb_s is None else f"{point.busbw_gb_s:.3g}",
    )


def show(points: Sequence[ScalingPoint], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    metrics = sorted({p.metric for p in points if p.metric and p.value is not None})
    for i, column in enumerate((*COLUMNS, *metrics)):
        table.add_column(column, justify="left" if i < 3 else "right", no_wrap=True)
    for point in points:
        own = [f"{point.value:.4f}" if point.metric == m and point.value is not None else "-" for m in metrics]
        table.add_row(*map(Text, [*cells(point), *own]))
    print_wide(console, table)
