"""``clusterrun status``: how runs stand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.cli.common import add_shared_dir, shared_dir, verb_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from clusterrun.operate.status import RunStatus
    from clusterrun.rundir import RunDir

    Look = Callable[[], tuple[list[RunStatus], list[str]]]

_RECENT = 20  # ended runs that are shown without being asked for
_EVERY_S = 3.0


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "status",
        "How runs stand: all that live and the newest of the others, or those named.",
        "clusterrun status; clusterrun status last --watch; clusterrun status my-sweep --json",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN|SWEEP", help="id, the beginning of one, a path, or last")
    parser.add_argument("--all", action="store_true", help="also every run that ended long ago")
    parser.add_argument("--watch", action="store_true", help=f"show it again every {_EVERY_S:g} s, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_shared_dir(parser)
    options = parser.parse_args(argv)
    shared = shared_dir(options)

    def look() -> tuple[list[RunStatus], list[str]]:
        return _look(options.runs, shared, options.all or options.json)

    if options.json:
        rows, _ = look()
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return 0
    from rich.console import Console

    from clusterrun.report import status_view

    console = Console(highlight=False)
    if options.watch:
        return _watch(look, console, named=bool(options.runs))
    rows, notes = look()
    status_view.show([row.as_json() for row in rows], console, notes)
    return 0


def _look(names: list[str], shared: Path, everything: bool) -> tuple[list[RunStatus], list[str]]:
    from clusterrun.operate.find import all_runs, find_runs
    from clusterrun.operate.status import counts, status_of, with_goodput

    if names:
        found = find_runs(names, shared)
        rows = with_goodput(status_of(found))
        notes = [", ".join(f"{n} {state}" for state, n in counts(rows).items())] if len(rows) > 1 else []
        return rows, notes + _fell_back([one.run for one in found])
    rows = status_of(all_runs(shared))
    if not rows:
        return [], [f"no runs in {shared}"]
    if everything:
        return with_goodput(_newest_first(rows)), []
    shown, left_out = _recent([row for row in rows if not row.sweep])
    notes = _sweep_lines([row for row in rows if row.sweep])
    if left_out:
        notes.append(f"{left_out} older runs are not shown: clusterrun status --all")
    return with_goodput(shown), notes


def _fell_back(runs: list[RunDir]) -> list[str]:
    """What NCCL's logs say that is slower than declared, of the few runs that somebody asked for by name."""
    if len(runs) > _RECENT:
        return []
    from clusterrun.report.nccl_used import FELL_BACK, last_nccl_lines

    return [f"{run.id}: {line}" for run in runs for line in last_nccl_lines(run) if line.startswith(FELL_BACK)]


def _newest_first(rows: list[RunStatus]) -> list[RunStatus]:
    return sorted(rows, key=lambda row: (not row.state.lives, -(row.submitted or 0.0)))


def _recent(rows: list[RunStatus]) -> tuple[list[RunStatus], int]:
    """All that live, and the newest of the others; and how many are left out."""
    ordered = _newest_first(rows)
    living = sum(row.state.lives for row in ordered)
    shown = ordered[: living + _RECENT]
    return shown, len(ordered) - len(shown)


def _sweep_lines(rows: list[RunStatus]) -> list[str]:
    from clusterrun.operate.status import counts

    sweeps: dict[str, list[RunStatus]] = {}
    for row in rows:
        sweeps.setdefault(row.sweep or "", []).append(row)
    newest = sorted(sweeps.items(), key=lambda item: -max(row.submitted or 0.0 for row in item[1]))
    lines = []
    for name, points in newest[:_RECENT]:
        states = ", ".join(f"{n} {state}" for state, n in counts(points).items())
        lines.append(f"sweep {name}: {len(points)} point{'s' if len(points) != 1 else ''}: {states}")
    return lines


def _watch(look: Look, console: Console, named: bool) -> int:
    from rich.live import Live

    from clusterrun.report import status_view

    if not console.is_terminal:  # in a file or a pipe: a table whenever something has changed
        before: object = None
        while True:
            rows, notes = look()
            now = [(row.name, row.state, row.why, row.step) for row in rows]
            if now != before:
                before = now
                console.print(time.strftime("%H:%M:%S"))
                status_view.show([row.as_json() for row in rows], console, notes)
            if named and all(row.state.is_over for row in rows):
                return 0
            time.sleep(_EVERY_S)
    with Live(console=console, auto_refresh=False) as display:
        while True:
            rows, notes = look()
            shown = [row.as_json() for row in rows]
            display.update(status_view.live(shown, notes, console.width, console.height), refresh=True)
            if named and all(row.state.is_over for row in rows):
                return 0
            time.sleep(_EVERY_S)
