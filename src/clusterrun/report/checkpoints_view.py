"""The checkpoints of a run with a verdict each, and as a table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from clusterrun.checkpoint.store import Store

VERIFIED, WHOLE, DAMAGED, ASIDE = "verified", "whole", "damaged", "set aside"


@dataclass(frozen=True)
class Line:
    """A checkpoint. ``verdict``: verified (every digest is right), whole (manifest intact, sizes right), damaged; or
    set aside, when a resuming run found it damaged. Size in bytes and age in seconds are None where nobody knows."""

    step: int
    path: str
    bytes: int | None
    age_s: float | None
    world_size: int | None
    attempt: int | None
    verdict: str
    problems: list[str]


def examine(store: Store, *, verify: bool) -> list[Line]:
    """Newest first. One that a running job removes meanwhile is left out."""
    lines = []
    for info in store.list():
        if verify or not store.looks_whole(info):
            problems, good = store.verify(info), VERIFIED
        else:
            problems, good = [], WHOLE
        if problems and not info.path.exists():
            continue
        manifest = info.manifest
        lines.append(
            Line(
                step=info.step,
                path=str(info.path),
                bytes=info.bytes,
                age_s=None if info.created is None else round(max(0.0, time.time() - info.created), 1),
                world_size=manifest.world_size if manifest else None,
                attempt=manifest.attempt if manifest else None,
                verdict=DAMAGED if problems else good,
                problems=problems,
            )
        )
    aside = [Line(step, str(path), None, None, None, None, ASIDE, []) for step, path in store.set_aside_before()]
    return lines + aside


def show(lines: list[Line], directory: Path, console: Console) -> None:
    if not lines:
        console.print(f"no checkpoints in {directory}", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("step", "size", "age", "ranks", "attempt"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for line in lines:
        numbers = [str(line.step), _size(line.bytes), _age(line.age_s)]
        table.add_row(*numbers, _or_dash(line.world_size), _or_dash(line.attempt), line.verdict)
    console.print(f"in {directory}", soft_wrap=True)
    console.print(table)
    for line in lines:
        for problem in line.problems:
            console.print(problem, soft_wrap=True, markup=False)
        if line.verdict == ASIDE:
            console.print(f"set aside: {line.path}", soft_wrap=True, markup=False)
    if any(line.verdict == WHOLE for line in lines):
        console.print("whole: the manifest is intact and the sizes are right; --verify reads every file")


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
