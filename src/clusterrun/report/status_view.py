"""A table of runs, narrow enough for a terminal and whole in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from clusterrun.report.follow import clock

_STYLES = {
    "done": "green",
    "running": "cyan",
    "saving": "cyan",
    "requeued": "yellow",
    "pending": "yellow",
    "stopped": "yellow",
    "cancelled": "yellow",
    "failed": "bold red",
    "unknown": "bold red",
}
_MOST_NODES = 3
_WIDTH = 400  # columns: a table squeezed into a narrow terminal loses cells; long lines are wrapped by the terminal

_COLUMNS = ("run", "state", "step", "loss", "samples/s", "ETA", "goodput", "nodes", "age", "why")
# What a narrow terminal goes without, first to last; only why is cut, down to so many characters.
_DISPENSABLE = ("age", "goodput", "nodes", "loss", "samples/s", "ETA")
_LEAST_WHY = 16

Row = Mapping[str, Any]  # as RunStatus.as_json() gives it


def table(rows: Sequence[Row]) -> Table:
    """One line per run: state, progress, speed, nodes; then why, which is the longest."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        shown.add_column(name, no_wrap=True, justify="left" if name in ("run", "state", "nodes", "why") else "right")
    for row in rows:
        state = str(row["state"])
        shown.add_row(
            Text(f"{row['sweep']}/{row['id']}" if row["sweep"] else str(row["id"])),
            Text(state, style=_STYLES.get(state, "")),
            *map(Text, (_step(row), _number(row["loss"], ".4f"), _number(row["samples_per_s"], ",.0f"))),
            *map(Text, (clock(row["eta_s"]) if row["eta_s"] is not None else "-", _percent(row["goodput_percent"]))),
            *map(Text, (nodes(row["nodes"]), age(row["submitted"]), _why(row))),
        )
    return shown


def show(rows: Sequence[Row], console: Console, notes: Sequence[str] = ()) -> None:
    """Print the table, and what there is to say below it."""
    if rows:
        print_whole(table(rows), console)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True, highlight=False)


def print_whole(what: Table, console: Console) -> None:
    """Every cell, however narrow the terminal is, which wraps long lines itself."""
    if not console.is_terminal:  # plain text needs none of rich's care, which takes a millisecond a row
        for line in _plain(what):
            console.file.write(line + "\n")
        return
    wide = console.render(what, console.options.update_width(_WIDTH))
    console.print(Segments(_without_trailing_blanks(wide)), end="", soft_wrap=True)


def _plain(what: Table) -> list[str]:
    columns = [[str(column.header), *map(str, column.cells)] for column in what.columns]
    widths = [max(map(len, cells)) for cells in columns]
    right = [column.justify == "right" for column in what.columns]
    rows = zip(*columns, strict=True)
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def live(rows: Sequence[Row], notes: Sequence[str], width: int, height: int) -> Group:
    """The same, for a display of so many columns and lines that is drawn again and again."""
    room = max(1, height - len(notes) - 3)
    left_out = [f"{len(rows) - room} more runs don't fit here"] if len(rows) > room else []
    return Group(_fitting(table(rows[:room]), width), *(Text(note) for note in (*left_out, *notes)))


def _fitting(shown: Table, width: int) -> Table:
    """Without columns that one can do without, as far as the others would be cut."""
    needs = {
        str(column.header): max(len(str(cell)) for cell in (column.header, *column.cells)) + 2
        for column in shown.columns
    }
    needs["why"] = min(needs["why"], _LEAST_WHY)
    for name in _DISPENSABLE:
        if sum(needs.values()) > width:
            needs.pop(name)
    for column in list(shown.columns):
        if str(column.header) not in needs:
            shown.columns.remove(column)
        elif column.header != "why":
            column.min_width = needs[str(column.header)] - 2
    return shown


def nodes(names: Sequence[str]) -> str:
    """c1,c2 or c1,c2,.. (8)"""
    if len(names) <= _MOST_NODES:
        return ",".join(names) or "-"
    return f"{','.join(names[: _MOST_NODES - 1])},.. ({len(names)})"


def age(since: float | None, now: float | None = None) -> str:
    """How long ago, in its two largest units: 45 s, 12 min, 3 h, 5 d."""
    if since is None:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - since)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _why(row: Row) -> str:
    parts = [str(row["why"])] if row["why"] else []
    if row["state"] in ("pending", "requeued") and row["expected_start"]:
        parts.append(f"expected {str(row['expected_start']).replace('T', ' ')}")
    if row["state"] == "done" and row["metric"] and row["value"] is not None:
        parts.append(f"{row['metric']} {row['value']:.4f}")
    return "; ".join(parts).partition("\n")[0]


def _step(row: Row) -> str:
    if row["step"] is None:
        return "-"
    return f"{row['step']}/{row['total_steps']}" if row["total_steps"] else str(row["step"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _without_trailing_blanks(segments: Any) -> list[Any]:
    """rich fills each line with blanks to the width; files and copies are better without."""
    from rich.segment import Segment

    lines = Segment.split_lines(segments)
    found: list[Any] = []
    for line in lines:
        while line and not line[-1].text.strip() and not line[-1].control:
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        found += [*line, Segment.line()]
    return found
