"""What a bench measured, as a person and as a machine reads it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterrun.ledger import Ledger
from clusterrun.measure import groups
from clusterrun.measure.collectives import busbw, size_text
from clusterrun.measure.fit import Fit, fit
from clusterrun.measure.results import MEASURED, Row
from clusterrun.report.bench_expected import Expected
from clusterrun.rundir import RunDir, read_json_lines

_GB = 1e9  # decimal, as nccl-tests and vendors count


@dataclass(frozen=True)
class Measured:
    """The rows of the last attempt, and who the ranks are."""

    run_id: str
    rows: tuple[Row, ...]
    nodes: dict[int, str]  # rank -> node
    device: str
    ending: str
    message: str
    directory: str
    problems: tuple[str, ...] = field(default=())

    def series(self) -> list[list[Row]]:
        """Rows of one phase, collective and group, by size, in the order they were measured."""
        found: dict[tuple[str, str, tuple[int, ...]], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.phase, row.collective, row.ranks), []).append(row)
        return [sorted(rows, key=lambda row: row.bytes) for rows in found.values()]

    def by_kind(self) -> dict[tuple[str, str], list[list[Row]]]:
        """(phase, collective) -> the series of its groups; pairs of a node are one kind."""
        found: dict[tuple[str, str], list[list[Row]]] = {}
        for rows in self.series():
            found.setdefault((rows[0].phase, rows[0].collective), []).append(rows)
        return found

    def where(self, ranks: Sequence[int]) -> str:
        """The nodes of some ranks, or node and local ranks within one."""
        nodes = list(dict.fromkeys(self.nodes.get(rank, "?") for rank in ranks))
        return ", ".join(nodes)


def read(run: RunDir) -> Measured:
    """What the last attempt of a bench wrote. Empty when it ended before it measured."""
    attempts = Ledger(run.ledger).attempts()
    last = attempts[-1] if attempts else None
    rows: list[Row] = []
    nodes: dict[int, str] = {}
    device, problems = "", []
    for path in run.attempt(last.number).event_files() if last else ():
        for record in read_json_lines(path):
            if record.get("kind") == "start":
                nodes.update(dict.fromkeys(record.get("ranks", [record["rank"]]), record["node"]))
                device = record["device"]
            elif record.get("kind") == MEASURED:
                rows.append(Row.from_json(record))
            elif record.get("kind") == "error":
                problems.append(f"rank {record['rank']}: {record['message']}")
    return Measured(
        run.id,
        tuple(rows),
        nodes,
        device,
        last.ending.value if last else "",
        last.message if last else "",
        str(run.root),
        tuple(problems),
    )


def as_json(measured: Measured, expected: Expected) -> dict[str, Any]:
    """Seconds, bytes, bytes per second."""
    return {
        "run": measured.run_id,
        "ending": measured.ending,
        "message": measured.message,
        "device": measured.device,
        "nodes": list(dict.fromkeys(measured.nodes[rank] for rank in sorted(measured.nodes))),
        "series": [_series_json(measured, rows, expected) for rows in measured.series()],
    }


def _series_json(measured: Measured, rows: Sequence[Row], expected: Expected) -> dict[str, Any]:
    line = fitted(rows)
    return {
        "phase": rows[0].phase,
        "collective": rows[0].collective,
        "ranks": list(rows[0].ranks),
        "nodes": list(dict.fromkeys(measured.nodes.get(rank, "") for rank in rows[0].ranks)),
        "limit_busbw": expected.limit(rows[0].ranks),
        "alpha_s": line.alpha_s if line else None,
        "beta_s_per_byte": line.beta_s_per_byte if line else None,
        "rows": [
            {
                "bytes": row.bytes,
                "seconds": row.seconds,
                "best_s": row.best_s,
                "algbw": row.algbw,
                "busbw": row.busbw,
                "iterations": row.iterations,
                "wrong": row.wrong,
                "predicted_s": expected.seconds(row.collective, row.ranks, row.bytes),
            }
            for row in rows
        ],
    }


def fitted(rows: Iterable[Row]) -> Fit | None:
    return fit([(row.bytes, row.seconds) for row in rows])


def show(measured: Measured, console: Console, expected: Expected) -> None:
    """A table for each group; groups of the same kind on several nodes together, the slowest one named."""
    for (phase, _), series in measured.by_kind().items():
        if phase == groups.PAIRS:
            _show_pairs(measured, series, console)
        else:
            _show_series(measured, series, console, expected)
    wrong = sum(row.wrong or 0 for row in measured.rows)
    if wrong:
        console.print(Text(f"WRONG RESULTS: {wrong} elements", style="bold red"))
    console.print(f"rows: {measured.directory}", markup=False, soft_wrap=True)


def _show_series(measured: Measured, series: Sequence[Sequence[Row]], console: Console, expected: Expected) -> None:
    first = series[0]
    predicted = [expected.seconds(row.collective, row.ranks, row.bytes) for row in first]
    limit = expected.limit(first[0].ranks)
    console.print(Text(title(measured, series), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["size", "time", "algbw GB/s", "busbw GB/s"]
    columns += ["predicted"] if any(predicted) else []
    columns += ["of limit"] if limit else []
    columns += ["wrong", *(["slowest"] if len(series) > 1 else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "slowest" else "right")
    for i, row in enumerate(first):
        rows = [one[i] for one in series if i < len(one)]
        middle = statistics.median_low([one.seconds for one in rows])
        shown = next(one for one in rows if one.seconds == middle)
        slowest = max(rows, key=lambda one: one.seconds)
        cells = [
            size_text(row.bytes),
            time_text(shown.seconds),
            f"{shown.algbw / _GB:.3g}",
            f"{shown.busbw / _GB:.3g}",
            *([_predicted(row, predicted[i])] if any(predicted) else []),
            *([f"{shown.busbw / limit:.0%}"] if limit else []),
            "not checked" if row.wrong is None else str(sum(one.wrong or 0 for one in rows)),
        ]
        if len(series) > 1:
            cells.append(f"{measured.where(slowest.ranks)} {slowest.busbw / _GB:.3g}")
        table.add_row(*cells)
    console.print(table)
    line = fitted(first)
    if line is not None:
        of = f" on {measured.where(first[0].ranks)}" if len(series) > 1 else ""
        console.print(f"{line_text(line, first[0])}{of}\n", markup=False, soft_wrap=True)


def _predicted(row: Row, seconds: float | None) -> str:
    return f"{busbw(row.collective, len(row.ranks), row.bytes, seconds) / _GB:.3g}" if seconds else "?"


def line_text(line: Fit, row: Row) -> str:
    """The fitted line in words. ``row``: any that it was fitted to."""
    off = f"time = alpha + beta x bytes, off by {line.worst:.0%} at most"
    if not line.beta_s_per_byte:
        return f"latency {time_text(line.alpha_s)}, larger sizes take no longer ({off})"
    rate = busbw(row.collective, len(row.ranks), 1, line.beta_s_per_byte) / _GB
    return f"latency {time_text(line.alpha_s)}, busbw of large sizes {rate:.3g} GB/s ({off})"


def title(measured: Measured, series: Sequence[Sequence[Row]]) -> str:
    row = series[0][0]
    n = len(row.ranks)
    what = {
        groups.ALL: f"all {n} ranks on {measured.where(row.ranks)}",
        groups.IN_NODE: f"the {n} ranks of a node, {len(series)} nodes at once",
        groups.BETWEEN_NODES: f"one rank of each of {n} nodes",
    }.get(row.phase, row.phase)
    return f"{row.collective}, {what}"


def _show_pairs(measured: Measured, series: Sequence[Sequence[Row]], console: Console) -> None:
    """For each node a matrix of busbw at the largest size."""
    by_node: dict[str, dict[tuple[int, int], Row]] = {}
    for rows in series:
        a, b = rows[-1].ranks
        by_node.setdefault(measured.nodes.get(a, "?"), {})[(a, b)] = rows[-1]
    for node, pairs in by_node.items():
        members = sorted({rank for pair in pairs for rank in pair})
        largest = size_text(next(iter(pairs.values())).bytes)
        name = next(iter(pairs.values())).collective
        console.print(Text(f"{name}, pairs of {node}, busbw GB/s at {largest}", style="bold"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for b in members:
            table.add_column(str(b - members[0]), justify="right")
        for a in members:
            cells = [
                "-" if a == b else f"{row.busbw / _GB:.3g}" if (row := pairs.get((min(a, b), max(a, b)))) else "?"
                for b in members
            ]
            table.add_row(str(a - members[0]), *cells)
        console.print(table)
        console.print()


def time_text(seconds: float) -> str:
    """1.23 s, 45.6 ms, 78.9 us."""
    for unit, word in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {word}"
    return f"{seconds / 1e-6:.2g} us"
