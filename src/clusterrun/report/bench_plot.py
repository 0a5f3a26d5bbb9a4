"""A bench as a picture: busbw over size, with the fitted line, the prediction, the limit. Needs the extra "plots"."""

from __future__ import annotations

from pathlib import Path

from clusterrun.errors import ConfigError
from clusterrun.measure import groups
from clusterrun.measure.collectives import busbw
from clusterrun.report.bench_expected import Expected
from clusterrun.report.bench_view import Measured, fitted, title

_GB = 1e9


def check(path: Path) -> None:
    """Before anything is measured: whether this could be drawn. Raises ConfigError."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--plot {path}: the ending must be .png or .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: no such directory")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'clusterrun[plots]'") from None


def write_plot(measured: Measured, expected: Expected, path: Path) -> None:
    """One picture per kind of group and collective, side by side. Raises ConfigError when it can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = {key: series for key, series in measured.by_kind().items() if key[0] != groups.PAIRS}
    figure = Figure(figsize=(5.5 * max(1, len(kinds)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for series, axes in zip(kinds.values(), figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], strict=False):
        first = series[0]
        ranks, name = first[0].ranks, first[0].collective
        sizes = [row.bytes for row in first]
        for rows in series:
            label = "measured" if rows is first else None
            axes.plot([r.bytes for r in rows], [r.busbw / _GB for r in rows], "o-", color="C0", alpha=0.8, label=label)
        line = fitted(first)
        if line is not None:
            rates = [busbw(name, len(ranks), size, line.seconds(size)) / _GB for size in sizes]
            axes.plot(sizes, rates, ":", color="C1", label="latency and rate, fitted")
        times = [expected.seconds(name, ranks, size) for size in sizes]
        if all(times):
            rates = [busbw(name, len(ranks), size, time) / _GB for size, time in zip(sizes, times, strict=True) if time]
            axes.plot(sizes, rates, "--", color="C2", label="predicted")
        limit = expected.limit(ranks)
        if limit is not None:
            axes.axhline(limit / _GB, color="C3", linewidth=1, label="limit of the declared wires")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="bytes", ylabel="busbw, GB/s", ylim=(0, None))
        axes.set_title(title(measured, series), fontsize=9, wrap=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written: {error.strerror or error}") from None
