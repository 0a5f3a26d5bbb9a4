"""Tables of nccl-tests as a person reads them: what each is, what its figures are worth."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from clusterrun.measure.collectives import size_text
from clusterrun.measure.nccl_tests import Status, Table
from clusterrun.report.nccl_expected import Expectation

_UNUSABLE = {
    Status.CRASHED: "CRASHED, figures are not to be used",
    Status.WRONG: "WRONG RESULTS, figures are not to be used",
    Status.TRUNCATED: "truncated, the peak may be missing",
    Status.NO_ROWS: "no rows",
    Status.WRONG_COLLECTIVE: "another collective than asked for",
}


def show(tables: Sequence[Table], expected: Sequence[Expectation], console: Console) -> None:
    """A few lines for each table, and what its hardware should give."""
    for table, hardware in zip(tables, expected, strict=True):
        ranks = f"{table.ranks} ranks" if table.ranks else "ranks not known"
        where = f" on {table.nodes} node{'s' * (table.nodes > 1)}" if table.nodes else ""
        gpu = f", {table.gpu}" if table.gpu else ""
        line = Text(f"{table.collective or 'collective not known'}, {ranks}{where}{gpu}: ")
        good = table.status is Status.OK
        line.append("ok" if good else _UNUSABLE[table.status], style="green" if good else "bold red")
        console.print(line, soft_wrap=True)
        peak = table.peak
        if peak is not None:
            average = f", average {table.avg_busbw:g}" if table.avg_busbw is not None else ""
            figures = f"  busbw at most {peak.out_of_place.busbw:g} GB/s, at {size_text(peak.size)}{average}"
            console.print(figures, markup=False, soft_wrap=True)
        if hardware.words:
            low = hardware.share is not None and hardware.words.startswith("LOW")
            console.print(Text(f"  {hardware.words}", style="bold red" if low else ""), soft_wrap=True)
        for note in table.notes:
            console.print(f"  {note}", markup=False, soft_wrap=True)
