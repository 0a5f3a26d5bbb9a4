"""Which runs a name means: an id, the beginning of one, SWEEP/RUN, a whole sweep, a path, or ``last``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import RunError
from clusterrun.launch.submit import LAST, find_run, last_submitted
from clusterrun.rundir import RUNS, RunDir, SweepDir, run_roots, sweep_roots


@dataclass(frozen=True)
class Found:
    """A run, and the sweep it is a point of."""

    run: RunDir
    sweep: str | None = None

    @property
    def name(self) -> str:
        """As a person would type it."""
        return f"{self.sweep}/{self.run.id}" if self.sweep else self.run.id


def all_runs(shared: Path) -> list[Found]:
    """Every run below a shared directory, those of sweeps too."""
    return [found_at(path) for path in run_roots(shared) if RunDir(path).config.exists()]


def find_runs(names: Sequence[str], shared: Path) -> list[Found]:
    """The runs that names mean, each once, in the order given. A sweep means its points.

    Raises:
        RunError: a name means nothing, or several.
    """
    found: dict[Path, Found] = {}
    for name in names:
        for one in _one(name, shared):
            found.setdefault(one.run.root, one)
    return list(found.values())


def find_one(name: str, shared: Path) -> Found:
    """Raises RunError, also for a sweep of several points."""
    found = find_runs([name], shared)
    if len(found) != 1:
        raise RunError(f"{name}: is a sweep of {len(found)} runs; name one, e.g. {found[0].name if found else name}")
    return found[0]


def _one(name: str, shared: Path) -> list[Found]:
    if name == LAST:
        return [found_at(last_submitted([shared]))]
    path = Path(name).expanduser()
    if path.is_dir() and SweepDir(path).sweep.is_file():
        return _points(path.resolve())
    exact = shared / RUNS / name
    sweeps = [root for root in sweep_roots(shared) if root.name.startswith(name)]
    named = [root for root in sweeps if root.name == name] or sweeps
    if named and not exact.is_dir() and not path.is_dir():
        runs = [root for root in (shared / RUNS).glob("*") if root.name.startswith(name)]
        if len(named) == 1 and not runs:
            return _points(named[0])
        if named[0].name != name:
            begin = ", ".join(root.name for root in [*named, *runs][:5])
            raise RunError(f"{name}: several runs or sweeps begin so: {begin}")
        return _points(named[0])
    return [found_at(find_run(name, [shared]).root)]


def _points(root: Path) -> list[Found]:
    return [found_at(path.parent) for path in sorted(root.glob("*/config.yaml"))]


def found_at(root: Path) -> Found:
    """The run in this directory."""
    return Found(RunDir(root), root.parent.name if SweepDir(root.parent).sweep.is_file() else None)
