"""Small inline SVG charts for the HTML report: lines, stacked bars, time lines, GPU graphs. No library, no script.

Colours are classes (``c0`` to ``c7``, ``grid``, ``tick``); the style sheet gives their values for light and dark.
Every chart has a role and a label for screen readers, and each mark a title that browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
_CHAR = 6.9  # width of a character at 11.5 px, on average


@dataclass(frozen=True)
class Series:
    """Points of one line. ``kind``: line, dots, both, or dashed (a reference, without dots)."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    kind: str = "line"


@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x``, e.g. where an attempt began."""

    x: float
    text: str


@dataclass(frozen=True)
class Part:
    """A piece of a bar: ``colour`` is an index, ``text`` what hovering shows."""

    value: float
    colour: int
    text: str


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart. ``offset``: where its first part begins (a time line). ``note``: written after it."""

    name: str
    parts: Sequence[Part]
    offset: float = 0.0
    note: str = ""


def number(value: float) -> str:
    """Short and readable: 0.0012, 0.25, 12.5, 3,200, 1.2M."""
    size = abs(value)
    if value == 0:
        return "0"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.1e}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from at most ``low`` to at least ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, most - 1)
    power: float = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = 240) -> tuple[list[float], list[float]]:
    """At most about ``most`` points: the mean of each stretch, so that the shape stays and noise goes."""
    if len(xs) <= most:
        return list(xs), list(ys)
    size = math.ceil(len(xs) / most)
    groups = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [sum(x) / len(x) for x, _ in groups], [sum(y) / len(y) for _, y in groups]


def both(chart: Callable[[int, str], str], label: str, wide: int = 980) -> str:
    """A chart drawn for a desktop (``wide`` pixels) and for a phone; the style sheet shows the one that fits.

    Drawn near its size on the screen, so that text is as large as around it.
    """
    return f'<div class="wide">{chart(wide, label)}</div><div class="narrow">{chart(330, label)}</div>'


def line_chart(
    width: int,
    label: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    *,
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    height: int = 260,
) -> str:
    """Lines over x. ``log_x``, ``log_y``: a logarithmic axis with ticks at powers of two (scaling curves)."""
    drawn = [s for s in series if len(s.xs)]
    if not drawn:
        return _empty(width, label)
    xs, ys = [x for s in drawn for x in s.xs], [y for s in drawn for y in s.ys if math.isfinite(y)]
    if not ys:
        return _empty(width, label)
    if log_x:
        x_ticks, low_x, high_x = _doublings(min(xs), max(xs)), min(xs) / 1.12, max(xs) * 1.12
    else:
        low_x, high_x = min(xs), max(xs)
        x_ticks = [t for t in ticks(low_x, high_x, 6 if width > 600 else 5) if low_x <= t <= high_x]
    if log_y:
        y_ticks = _doublings(min(ys), max(ys))
        y_ticks = y_ticks[:: max(1, math.ceil(len(y_ticks) / 7))]
        low_y, high_y = min(min(ys), y_ticks[0]) * 0.9, max(max(ys), y_ticks[-1]) * 1.1
    else:
        y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
        low_y, high_y = y_ticks[0], y_ticks[-1]
    scale_x: Callable[[float], float] = math.log2 if log_x else float
    scale_y: Callable[[float], float] = math.log2 if log_y else float
    names = [number(t) for t in y_ticks]
    left = 14 + _CHAR * max(map(len, names))
    top, bottom, right = 30.0, height - 40.0, width - 12.0

    def px(x: float) -> float:
        span = scale_x(high_x) - scale_x(low_x)
        return left + (right - left) * ((scale_x(x) - scale_x(low_x)) / span if span else 0.5)

    def py(y: float) -> float:
        return bottom - (bottom - top) * (scale_y(y) - scale_y(low_y)) / ((scale_y(high_y) - scale_y(low_y)) or 1.0)

    out = [_text("axis", left, 14, y_name)]
    for tick, name in zip(y_ticks, names, strict=True):
        out.append(_line("grid", left, py(tick), right, py(tick)))
        out.append(_text("tick", left - 6, py(tick) + 4, name, "end"))
    for tick in x_ticks:
        out.append(_text("tick", px(tick), bottom + 16, number(tick), "end" if px(tick) > right - 12 else "middle"))
    out.append(_text("axis", right, bottom + 33, x_name, "end"))
    for mark in marks:
        x = px(min(max(mark.x, low_x), high_x))
        out.append(_line("mark", x, top, x, bottom, mark.text))
    for s in drawn:
        points = [(px(x), py(y), x, y) for x, y in zip(s.xs, s.ys, strict=True) if math.isfinite(y)]
        if s.kind != "dots" and len(points) > 1:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
            dashed = " dashed" if s.kind == "dashed" else ""
            out.append(f'<path class="line c{s.colour}{dashed}" d="{path}"><title>{escape(s.name)}</title></path>')
        if s.kind in ("dots", "both") or (len(points) == 1 and s.kind != "dashed"):
            for x, y, vx, vy in points:
                title = escape(f"{s.name}: {number(vx)} {x_name}, {number(vy)} {y_name}")
                dot = f'<circle class="dot c{s.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                out.append(f"{dot}<title>{title}</title></circle>")
    return _svg(width, height, label, out)


def bar_chart(
    width: int, label: str, bars: Sequence[Bar], unit: str, *, total: float | None = None, row: int = 30
) -> str:
    """Horizontal bars of several parts on one scale from 0 to ``total`` (default: the longest)."""
    end = total or max((b.offset + sum(p.value for p in b.parts) for b in bars), default=0.0)
    if not bars or end <= 0:
        return _empty(width, label)
    left = min(width * 0.34, 16 + _CHAR * max(len(b.name) for b in bars))
    notes = max((len(b.note) for b in bars), default=0)
    right = width - (16 + _CHAR * notes if notes else 14)
    per = (right - left) / end
    height = 8 + row * len(bars) + 26
    out: list[str] = []
    for tick in [t for t in ticks(0.0, end, 5 if width > 500 else 4) if t <= end]:
        x = left + tick * per
        out.append(_line("grid", x, 4, x, height - 22))
        out.append(_text("tick", x, height - 8, number(tick) + unit, "end" if x > right - 14 else "middle"))
    for i, bar in enumerate(bars):
        y, x = 8.0 + i * row, left + bar.offset * per
        name = _cut(bar.name, int((left - 10) / _CHAR))
        out.append(_text("tick", left - 8, y + row / 2 + 1, name, "end", bar.name))
        for part in bar.parts:
            size = part.value * per
            if size > 0.05:
                at = f'x="{x:.2f}" y="{y:.0f}" width="{max(size, 0.6):.2f}" height="{row - 10}" rx="1.5"'
                out.append(f'<rect class="c{part.colour}" {at}><title>{escape(part.text)}</title></rect>')
            x += size
        if bar.note:
            out.append(_text("note", x + 7, y + row / 2 - 1, bar.note))
    return _svg(width, height, label, out)


def graph(label: str, names: Sequence[str], edges: Iterable[tuple[int, int, str, str]], size: int = 300) -> str:
    """Nodes on a circle with edges (from, to, class, text on hover)."""
    middle, count = size / 2, max(1, len(names))
    radius = middle - 30 if count > 1 else 0.0
    turn = 2 * math.pi / count
    places = [(middle + radius * math.sin(turn * i), middle - radius * math.cos(turn * i)) for i in range(count)]
    out = [_line(f"edge {kind}", *places[i], *places[j], text) for i, j, kind, text in edges]
    for (x, y), name in zip(places, names, strict=False):
        out.append(f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" r="19"/>')
        out.append(_text("nodetext", x, y + 4, name, "middle"))
    return _svg(size, size, label, out)


def legend(items: Iterable[tuple[int, str]]) -> str:
    """Colour and name of each series, as HTML beside a chart."""
    shown = "".join(f'<li><span class="key b{colour}"></span>{escape(name)}</li>' for colour, name in items)
    return f'<ul class="legend">{shown}</ul>'


def _text(kind: str, x: float, y: float, content: str, anchor: str = "start", title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}{hover}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float, title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">{hover}</line>'


def _doublings(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
    found = [2.0**i for i in range(first, last + 1)]
    return [t for t in found if low / 1.3 <= t <= high * 1.3] or found


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def _empty(width: int, label: str) -> str:
    return _svg(width, 60, label, [_text("axis", width / 2, 34, "nothing was measured", "middle")])


def _svg(width: float, height: float, label: str, content: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(content)}</svg>'
    )
