"""A topology as a picture: a heat map of the GPU matrix, worse links darker. Needs the extra "plots"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterrun.topology.classify import classify
from clusterrun.topology.model import LinkKind, Topology, TopologyError

# From worst to best; colour-blind safe (ColorBrewer RdYlBu), unknown is grey.
_COLOURS = {
    LinkKind.SYS: "#d73027",
    LinkKind.NODE: "#fc8d59",
    LinkKind.PHB: "#fee090",
    LinkKind.PXB: "#e0f3f8",
    LinkKind.PIX: "#91bfdb",
    LinkKind.NVLINK: "#4575b4",
    LinkKind.SELF: "#ffffff",
}
_UNKNOWN = "#bbbbbb"
_ON_DARK = (LinkKind.SYS, LinkKind.NVLINK)


def write_plot(machines: Sequence[Topology], path: Path) -> None:
    """One heat map per machine, side by side, as PNG or SVG by the file's ending.

    Raises:
        TopologyError: no GPU to draw, an ending that is neither, a file that can't be written, or no matplotlib.
    """
    drawn = [machine for machine in machines if machine.gpus]
    if not drawn:
        raise TopologyError("--plot: no GPU to draw")
    if path.suffix.lower() not in (".png", ".svg"):
        raise TopologyError(f"--plot {path}: the ending must be .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError:
        raise TopologyError("--plot needs matplotlib: pip install 'clusterrun[plots]'") from None
    sizes = [len(machine.gpus) for machine in drawn]
    figure = Figure(figsize=(sum(1.5 + 0.6 * size for size in sizes), 2.2 + 0.6 * max(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    for machine, axes in zip(drawn, figure.subplots(1, len(drawn), squeeze=False)[0], strict=True):
        size = len(machine.gpus)
        for i in range(size):
            for j in range(size):
                link = machine.links[i][j]
                colour = _UNKNOWN if link is None else _COLOURS[link.kind]
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white"))
                ink = "white" if link is not None and link.kind in _ON_DARK else "black"
                label = "?" if link is None else str(link)
                axes.text(j + 0.5, i + 0.5, label, ha="center", va="center", color=ink, fontsize=9)
        names = [gpu.name for gpu in machine.gpus]
        axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal")
        axes.set_xticks([i + 0.5 for i in range(size)], names, rotation=90, fontsize=8)
        axes.set_yticks([i + 0.5 for i in range(size)], names, fontsize=8)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        title = f"{size} GPUs: {classify(machine).kind.value}"
        axes.set_title(f"{machine.name}\n{title}" if machine.name else title, fontsize=10)
    seen = {link.kind for machine in drawn for row in machine.links for link in row if link is not None}
    legend = [Patch(color=_COLOURS[kind], label=kind.name) for kind in sorted(seen - {LinkKind.SELF}, reverse=True)]
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise TopologyError(f"--plot {path}: can't be written: {error.strerror or error}") from None
