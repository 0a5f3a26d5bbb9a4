"""A topology in the terminal: the matrix with worse links standing out, the class, the worst link, advice."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from clusterrun.report.topology_plot import write_plot
from clusterrun.topology import command
from clusterrun.topology.advice import advise, groups, weak_pairs
from clusterrun.topology.classify import Wiring, classify
from clusterrun.topology.model import Link, LinkKind, Topology

_STYLES = {
    LinkKind.SELF: "dim",
    LinkKind.NVLINK: "green",
    LinkKind.PIX: "cyan",
    LinkKind.PXB: "cyan",
    LinkKind.PHB: "yellow",
    LinkKind.NODE: "bold yellow",
    LinkKind.SYS: "bold red",
}
_WEAK = "bold white on red"
_WIDTH = 400  # columns; 16 GPUs with 32 NICs need 350


def print_topologies(machines: Sequence[Topology], console: Console) -> None:
    """Print every machine, one below the other."""
    for number, machine in enumerate(machines):
        if number:
            console.print()
        title = machine.name or (f"machine {number + 1}" if len(machines) > 1 else None)
        # A matrix squeezed into a narrow terminal loses cells; a line that the terminal wraps itself does not.
        wide = console.render(render(machine, title=title), console.options.update_width(_WIDTH))
        console.print(Segments(wide), end="", soft_wrap=True)


def render(topology: Topology, title: str | None = None) -> RenderableType:
    """Matrix, facts and advice of one machine."""
    wiring = classify(topology)
    parts: list[RenderableType] = [_matrix(topology, wiring, title)] if topology.gpus else []
    if topology.nics and any(nic.rate_gbit_s is not None or nic.state for nic in topology.nics):
        parts.append(_nics(topology))
    parts.extend(_facts(topology, wiring))
    return Group(*parts)


def _cell(link: Link | None, weak: bool = False) -> Text:
    if link is None:
        return Text("?", style="magenta")
    return Text(str(link), style=_WEAK if weak else _STYLES[link.kind])


def _matrix(topology: Topology, wiring: Wiring, title: str | None) -> Table:
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    table.add_column("")
    for name in [*(gpu.name for gpu in topology.gpus), *(nic.name for nic in topology.nics)]:
        table.add_column(name)
    about = any(gpu.numa or gpu.cpu_affinity for gpu in topology.gpus)
    models = any(gpu.model or gpu.error for gpu in topology.gpus)
    for column in (["CPUs", "NUMA"] if about else []) + (["model"] if models else []):
        table.add_column(column)
    weak = {pair.gpus for pair in wiring.weak}
    for i, gpu in enumerate(topology.gpus):
        row = [Text(gpu.name, style="bold")]
        row += [_cell(link, (min(i, j), max(i, j)) in weak) for j, link in enumerate(topology.links[i])]
        row += [_cell(nic.links[i] if i < len(nic.links) else None) for nic in topology.nics]
        if about:
            row += [Text(gpu.cpu_affinity or "-"), Text(",".join(map(str, gpu.numa)) or "-")]
        if models:
            row.append(Text(gpu.error, style="bold red") if gpu.error else Text(gpu.model or "-"))
        table.add_row(*row)
    return table


def _nics(topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NIC", "device", "Gbit/s", "layer", "state", "NUMA", "PCI"):
        table.add_column(column)
    for nic in topology.nics:
        good = nic.state == "ACTIVE" and nic.physical_state in (None, "LinkUp")
        state = "/".join(part for part in (nic.state, nic.physical_state) if part) or "?"
        table.add_row(
            nic.name,
            nic.device or "?",
            "?" if nic.rate_gbit_s is None else f"{nic.rate_gbit_s:g}",
            nic.link_layer or "?",
            Text(state, style="green" if good else "bold red"),
            "?" if nic.numa is None else str(nic.numa),
            nic.bus_id or "?",
        )
    return table


def _facts(topology: Topology, wiring: Wiring) -> list[Text]:
    size = len(topology.gpus)
    if size == 0:
        head = Text("no GPU on this machine" if topology.complete else "no GPU could be read on this machine")
    else:
        head = Text(f"{size} GPU{'s' if size > 1 else ''}: ")
        head.append(wiring.kind.value, style="bold")
        if wiring.worst is not None and wiring.best is not None:
            head.append(", worst link ").append_text(_cell(wiring.worst))
            head.append(", best ").append_text(_cell(wiring.best))
    lines = [head]
    if len(wiring.islands) > 1 and any(len(group) > 1 for group in wiring.islands):
        lines.append(Text(f"islands: {groups(topology, wiring.islands)}"))
    if wiring.weak:
        shown = weak_pairs(topology, wiring)
        lines.append(Text(f"degraded: {shown} (expected {wiring.weak[0].expected})", style="bold red"))
    if topology.missing:
        lines.append(Text(f"incomplete, not known: {'; '.join(topology.missing)}", style="magenta"))
    lines += [Text(f"note: {note}", style="dim") for note in topology.notes]
    return lines + [Text(f"advice: {line}") for line in advise(topology, wiring)]


def main(argv: Sequence[str]) -> int:
    """``clusterrun topo``: the command with this module as its printer. Returns the exit code."""
    return command.main(argv, show=lambda machines: print_topologies(machines, Console()), plot=write_plot)
