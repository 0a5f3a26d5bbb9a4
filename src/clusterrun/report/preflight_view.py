"""A preflight and the list of refused nodes, as a person and as a machine reads them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterrun.rundir import AttemptDir

_STYLES = {"PASS": "green", "WARN": "yellow", "UNKNOWN": "magenta", "FAIL": "bold red"}


@dataclass(frozen=True)
class NodeResult:
    """One node's part of a preflight.

    Attributes:
        findings: as written by the conductor: check, node, verdict, finding, advice.
        refused: the reason why it can't train, None when it can.
    """

    node: str
    findings: tuple[dict[str, str], ...]
    chosen: bool
    refused: str | None


def read_results(attempt: AttemptDir) -> list[NodeResult]:
    """What the conductor wrote for each node, by node name."""
    results = []
    for path in sorted(attempt.preflight.glob("*.json")):
        value = json.loads(path.read_text())
        results.append(NodeResult(path.stem, tuple(value["findings"]), value["chosen"], value.get("refused")))
    return results


def as_json(results: Sequence[NodeResult]) -> dict[str, Any]:
    return {
        "nodes": [
            {"node": r.node, "chosen": r.chosen, "refused": r.refused, "findings": list(r.findings)} for r in results
        ]
    }


def show(results: Sequence[NodeResult], console: Console) -> None:
    """A line per node, and below it whatever did not pass."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "result", "checks", "what did not pass"):
        table.add_column(column, overflow="fold")
    for result in results:
        counts = Counter(f["verdict"] for f in result.findings)
        checks = ", ".join(f"{counts[v]} {v}" for v in ("PASS", "WARN", "UNKNOWN", "FAIL") if counts[v])
        word = Text("refused", style="bold red") if result.refused else Text("healthy", style="green")
        notes = Text()
        for f in (f for f in result.findings if f["verdict"] != "PASS"):
            advice = f" ({f['advice']})" if f["advice"] else ""
            line = Text(f"{f['verdict']} {f['check']}: ", style=_STYLES[f["verdict"]])
            notes.append_text(line).append(f"{f['finding']}{advice}\n")
        notes.rstrip()
        table.add_row(result.node, word, checks, notes)
    console.print(table)


def show_exclusions(entries: Sequence[Any], cluster: str, console: Console) -> None:
    """Refused nodes with reason and expiry."""
    if not entries:
        console.print(f"no node of cluster {cluster} is excluded", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "since", "hours left", "reason", "run"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.since))
        table.add_row(entry.node, since, f"{(entry.until - time.time()) / 3600:.1f}", Text(entry.reason), entry.run_id)
    console.print(table)
