"""The report of a sweep as a page: how the job scales, point by point."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from clusterrun.report import svg
from clusterrun.report.html_page import block, facts, page, section, table, tiles
from clusterrun.report.html_run import state_badge
from clusterrun.report.scaling import COLUMNS, ScalingPoint, cells
from clusterrun.report.svg import Bar, Part, Series, bar_chart, both, line_chart

_MOST_SERIES = 7


def sweep_page(sweep: str, points: Sequence[ScalingPoint], command: Sequence[str], directory: str) -> str:
    """The whole document. ``command``: as it was asked for."""
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    states = Counter(point.state for point in points)
    said = " ".join(f"{state_badge(state)} {count}" for state, count in states.most_common())
    subtitle = f"Sweep of {len(points)} points: {said}"
    body = [tiles(_tiles(points)), *_curves(points), _communication(points), _table(points), _about(command, directory)]
    return page(sweep, subtitle, body, written)


def _tiles(points: Sequence[ScalingPoint]) -> list[tuple[str, str]]:
    found = []
    fast = max((p for p in points if p.samples_per_s), key=lambda p: p.samples_per_s or 0, default=None)
    if fast is not None and fast.samples_per_s is not None:
        found.append(
            (f"samples per second at most ({fast.nodes} x {fast.nproc_per_node})", svg.number(fast.samples_per_s))
        )
    wide = max((p for p in points if p.efficiency is not None), key=lambda p: p.world_size, default=None)
    several = len({p.world_size for p in points}) > 1
    if several and wide is not None and wide.efficiency is not None and wide.speedup is not None:
        found.append((f"speed-up with {wide.world_size} workers", f"{wide.speedup:.2f}"))
        found.append((f"efficiency with {wide.world_size} workers", f"{wide.efficiency:.0%}"))
    talk = max((p for p in points if p.communication is not None), key=lambda p: p.communication or 0, default=None)
    if talk is not None and talk.communication is not None:
        found.append((f"communicates at most ({talk.nodes} x {talk.nproc_per_node})", f"{talk.communication:.0%}"))
    # By the loss: whether more of a metric is better, its task alone knows.
    measured = [p for p in points if p.value is not None and p.loss is not None]
    best = min(measured, key=lambda p: p.loss or 0.0, default=None)
    if best is not None:
        found.append((f"{best.metric} where the loss is lowest ({best.name})", f"{best.value:.4f}"))
    return found


def lines(points: Sequence[ScalingPoint]) -> list[tuple[str, list[ScalingPoint]]]:
    """Points as lines over world size: one per series and number of nodes, since the wiring differs between nodes."""
    groups: dict[tuple[str, int], list[ScalingPoint]] = {}
    for point in points:
        if point.samples_per_s:
            groups.setdefault((point.series, point.nodes), []).append(point)
    named = []
    for (series, nodes), members in groups.items():
        name = f"{nodes} node{'s' if nodes > 1 else ''}" + (f", {series}" if series else "")
        named.append((name, sorted(members, key=lambda p: p.world_size)))
    return named


def _curves(points: Sequence[ScalingPoint]) -> list[str]:
    groups = lines(points)
    worlds = sorted({p.world_size for _, members in groups for p in members})
    if len(worlds) < 2:
        return [_throughput_bars(points)]
    shown = groups[:_MOST_SERIES]
    first = min((p for _, members in groups for p in members), key=lambda p: (p.world_size, p.nodes))
    assert first.samples_per_s is not None
    per = first.samples_per_s / first.world_size
    speed = [
        Series(name, [p.world_size for p in m], [p.samples_per_s or 0.0 for p in m], i, "both")
        for i, (name, m) in enumerate(shown)
    ]
    speed.append(Series("as if nothing were lost", worlds, [per * w for w in worlds], svg.COLOURS - 1, "dashed"))
    efficiency = [
        Series(name, [p.world_size for p in m], [100 * (p.efficiency or 0.0) for p in m], i, "both")
        for i, (name, m) in enumerate(shown)
    ]
    names = [(s.colour, s.name) for s in speed]
    more = len(groups) - len(shown)
    hint = f"{more} more lines are in the table." if more > 0 else ""
    return [
        section(
            "How throughput grows with workers",
            svg.legend(names),
            both(
                lambda width, label: line_chart(
                    width, label, speed, "workers", "samples/s", log_x=True, log_y=True, height=330
                ),
                "samples per second over the number of workers, both axes logarithmic",
            ),
            hint=hint,
        ),
        section(
            "Efficiency",
            svg.legend(names[:-1]),
            both(
                lambda width, label: line_chart(
                    width, label, efficiency, "workers", "%", log_x=True, from_zero=True, height=250
                ),
                "efficiency in percent over the number of workers",
            ),
            hint="Speed-up over how many times more workers, against the point with the fewest of its series.",
        ),
    ]


def _throughput_bars(points: Sequence[ScalingPoint]) -> str:
    bars = [
        Bar(p.name, [Part(p.samples_per_s, 2, f"{p.samples_per_s:,.0f} samples/s")], note=svg.number(p.samples_per_s))
        for p in points
        if p.samples_per_s
    ]
    if not bars:
        return ""
    return section("Throughput", both(lambda w, label: bar_chart(w, label, bars, ""), "samples per second by point"))


def _communication(points: Sequence[ScalingPoint]) -> str:
    bars = []
    for p in points:
        if p.communication is None or p.step_s is None:
            continue
        talk, rest = 1e3 * p.step_s * p.communication, 1e3 * p.step_s * (1 - p.communication)
        parts = [Part(talk, 1, f"gradients travel: {talk:.3g} ms"), Part(rest, 0, f"everything else: {rest:.3g} ms")]
        name = f"{p.nodes} x {p.nproc_per_node}" + (f" {p.series}" if p.series else "")
        bars.append(Bar(name, parts, note=f"{p.communication:.0%}"))
    if not bars:
        return ""
    return section(
        "What communication costs",
        svg.legend([(1, "gradients travel (partly behind computing)"), (0, "everything else")]),
        both(lambda width, label: bar_chart(width, label, bars[:60], " ms"), "milliseconds of a step by point"),
        hint="Milliseconds of an optimizer step (rank 0) by nodes x workers; beside a bar: the share of communication.",
    )


def _table(points: Sequence[ScalingPoint]) -> str:
    rows = []
    for point in points:
        shown = [escape(cell) for cell in cells(point)]
        shown[0] = f'<span title="{escape(point.run, quote=True)}">{shown[0]}</span>'
        shown[1] = state_badge(point.state)
        shown.append("-" if point.loss is None else f"{point.loss:.4f}")
        shown.append("-" if point.value is None else f"{point.value:.4f}")
        rows.append(shown)
    metric = next((p.metric for p in points if p.metric), None) or "metric"
    columns = (*COLUMNS, "loss", metric)
    return section("All points", table(columns, rows, numbers=range(3, len(columns)), label="all points"))


def _about(command: Sequence[str], directory: str) -> str:
    again = (
        ["<h3>Submit it again (what is done stays done)</h3>", block(shlex.join(command), wrap=True)] if command else []
    )
    return section("About this sweep", facts([("directory", directory)]), *again)
