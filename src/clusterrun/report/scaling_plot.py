"""The scaling curves of a sweep as a picture: .svg by ourselves, .png by matplotlib (extra "plots")."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from clusterrun.errors import ConfigError
from clusterrun.report import svg
from clusterrun.report.html_sweep import lines
from clusterrun.report.scaling import ScalingPoint
from clusterrun.report.svg import Series, line_chart

# As in the HTML report, on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#8c6d31", "#9aa4ac")


def write_plot(points: Sequence[ScalingPoint], path: Path) -> None:
    """Throughput over workers, both axes logarithmic, with the line of no loss.

    Raises:
        ConfigError: nothing to draw, an ending that is neither, no matplotlib, or a file that can't be written.
    """
    groups = lines(points)
    if not groups:
        raise ConfigError("--plot: no point has a throughput yet")
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: the ending must be .svg or .png")
    first = min((p for _, members in groups for p in members), key=lambda p: (p.world_size, p.nodes))
    worlds = sorted({float(p.world_size) for _, members in groups for p in members})
    ideal = [(first.samples_per_s or 0.0) / first.world_size * w for w in worlds]
    series = [
        Series(name, [p.world_size for p in m], [p.samples_per_s or 0.0 for p in m], i % (svg.COLOURS - 1), "both")
        for i, (name, m) in enumerate(groups)
    ]
    series.append(Series("as if nothing were lost", worlds, ideal, svg.COLOURS - 1, "dashed"))
    try:
        if path.suffix.lower() == ".svg":
            path.write_text(_alone(series), encoding="utf-8")
        else:
            _png(series, path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written ({error.strerror or error})") from None


def _alone(series: Sequence[Series]) -> str:
    """The report's chart as a file of its own, with its colours and a legend in it."""
    chart = line_chart(
        720, "throughput over workers", series, "workers", "samples/s", log_x=True, log_y=True, height=360
    )
    rules = "".join(f"path.c{i}{{stroke:{c}}}circle.c{i},rect.c{i}{{fill:{c}}}" for i, c in enumerate(_COLOURS))
    style = (
        "<style>text{font:12px sans-serif;fill:#333}.grid{stroke:#e3e6e8}.line{fill:none;stroke-width:2}"
        f".dashed{{stroke-dasharray:5 5}}{rules}</style><rect width='100%' height='100%' fill='#fff'/>"
    )
    keys = "".join(
        f'<rect class="c{s.colour}" x="100" y="{38 + 18 * i}" width="11" height="11"/>'
        f'<text x="117" y="{48 + 18 * i}">{escape(s.name)}</text>'
        for i, s in enumerate(series)
    )
    head, _, rest = chart.partition(">")
    size = 'xmlns="http://www.w3.org/2000/svg" width="720" height="360"'
    return f"{head} {size}>{style}{rest.removesuffix('</svg>')}{keys}</svg>\n"


def _png(series: Sequence[Series], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot FILE.png needs matplotlib: pip install 'clusterrun[plots]', or name a .svg") from None
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for s in series:
        style = "--" if s.kind == "dashed" else "o-"
        axes.plot(s.xs, s.ys, style, color=_COLOURS[s.colour], label=s.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    worlds = sorted({x for s in series for x in s.xs})
    axes.set_xticks(worlds, [svg.number(w) for w in worlds])
    axes.yaxis.set_major_formatter(lambda value, _: svg.number(value))
    axes.set(xlabel="workers", ylabel="samples/s")
    axes.grid(color="#e3e6e8")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
