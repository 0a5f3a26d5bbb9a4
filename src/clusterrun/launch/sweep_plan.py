"""A sweep before it is submitted: its points with their run directories, and which of them share a resource shape.

Nothing is made, and nobody is asked but for how a run stands that points are to come after. ``launch/sweep.py`` does
what is planned here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clusterrun.config.points import Point
from clusterrun.config.schema import Executor, RunConfig
from clusterrun.config.validate import validated
from clusterrun.errors import ClusterrunError, ConfigError
from clusterrun.launch.plan import Plan, Planner, base_run_id, check_task, excluded_nodes
from clusterrun.launch.sbatch import executor_with, parameters_for
from clusterrun.launch.submit import with_dependency
from clusterrun.rundir import RunDir, SweepDir


@dataclass(frozen=True)
class PlannedPoint:
    """A point with its frozen configuration and its own run directory in the sweep's."""

    number: int
    overrides: tuple[str, ...]
    config: RunConfig
    plan: Plan
    run: RunDir
    excluded: tuple[str, ...]
    waiting: RunConfig  # with what ``after`` means for Slurm

    @property
    def on_slurm(self) -> bool:
        return self.config.cluster.executor is Executor.slurm


@dataclass(frozen=True)
class Shape:
    """Points that one sbatch script serves: one array, or several where the site limits an array's size."""

    parameters: dict[str, Any]  # what submitit is told
    points: tuple[PlannedPoint, ...]

    def text(self, sweep: SweepDir) -> str:
        """The script, as it is submitted when all points fit into one array."""
        return executor_with(self.parameters, sweep.submitit).text(len(self.points))


@dataclass(frozen=True)
class SweepPlan:
    """Everything that ``clusterrun -m`` will do. ``wrong`` are points that can't run, each with its error."""

    sweep: SweepDir
    points: tuple[PlannedPoint, ...]
    wrong: tuple[Point, ...]
    run_ids: dict[int, str]  # number of a point -> its run; equal points share one

    @property
    def shapes(self) -> list[Shape]:
        return shapes_of(self.sweep, self.points)

    def as_json(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep.id,
            "directory": str(self.sweep.root),
            "points": [
                {"number": p.number, "overrides": list(p.overrides), "plan": asdict(p.plan)} for p in self.points
            ],
            "shapes": [
                {"points": [p.run.id for p in shape.points], "sbatch": shape.text(self.sweep)} for shape in self.shapes
            ],
            "wrong": [{"number": p.number, "overrides": list(p.overrides), "error": str(p.error)} for p in self.wrong],
        }


def plan_sweep(points: Sequence[Point], sweep_id: str | None = None) -> SweepPlan:
    """Plan the points of a sweep. Equal points are one. A wrong point is set aside and hides no other.

    ``sweep_id``: of a sweep that gets its points bit by bit; else the id follows from the points, so that the same
    points are the same sweep.

    Raises:
        ConfigError: the points have no directory in common.
    """
    wrong = [point for point in points if point.config is None]
    checked: dict[str, tuple[Point, RunConfig]] = {}
    run_ids: dict[int, str] = {}
    given = {point.config.run_id for point in points if point.config is not None}
    common = given.pop() if len(given) == 1 else None  # run_id=x for all points names the sweep
    for point in points:
        if point.config is None:
            continue
        try:
            config = validated(replace(point.config, run_id=None) if common else point.config)
            check_task(config)
        except ClusterrunError as error:
            wrong.append(replace(point, config=None, error=error))
        else:
            run_ids[point.number] = base_run_id(config)
            checked.setdefault(run_ids[point.number], (point, config))
    shared = sorted({config.cluster.shared_dir for _, config in checked.values()})
    if len(shared) > 1:
        raise ConfigError(
            f"cluster.shared_dir: the points of a sweep live in one directory, and here they name {', '.join(shared)}; "
            "give one, e.g. cluster.shared_dir=/shared/me"
        )
    if not checked:
        raise (
            wrong[0].error or ConfigError("the sweep has no point") if wrong else ConfigError("the sweep has no point")
        )
    sweep = SweepDir.of(Path(shared[0]), sweep_id or common or _sweep_id(list(checked)))
    excluded: dict[str, list[str]] = {}
    planned = []
    planner, waits = Planner(), _Waits()
    for run_id, (point, config) in checked.items():
        name = config.cluster.name
        if name not in excluded:
            excluded[name] = excluded_nodes(config)
        try:
            plan = planner.plan(config, run_id, excluded[name], sweep)
        except ClusterrunError as error:
            wrong.append(replace(point, config=None, error=error))
            continue
        run, nodes = sweep.run(run_id), tuple(excluded[name])
        planned.append(PlannedPoint(point.number, point.overrides, config, plan, run, nodes, waits.of(config)))
    if not planned:
        raise wrong[0].error or ConfigError("the sweep has no point")
    return SweepPlan(sweep, tuple(planned), tuple(sorted(wrong, key=lambda p: p.number)), run_ids)


class _Waits:
    """``after=RUN`` for points: the run is looked for once."""

    def __init__(self) -> None:
        self._dependencies: dict[tuple[str, Executor, str | None], str | None] = {}

    def of(self, config: RunConfig) -> RunConfig:
        """Raises RunError and ConfigError as ``with_dependency``."""
        if config.after is None:
            return config
        slurm = config.cluster.slurm
        asked = (config.after, config.cluster.executor, slurm.dependency)
        if asked not in self._dependencies:
            self._dependencies[asked] = with_dependency(config).cluster.slurm.dependency
        return replace(
            config, cluster=replace(config.cluster, slurm=replace(slurm, dependency=self._dependencies[asked]))
        )


def shapes_of(sweep: SweepDir, points: Sequence[PlannedPoint]) -> list[Shape]:
    """The points on Slurm by what their scripts say, in the order of the first of each."""
    found: dict[str, tuple[dict[str, Any], list[PlannedPoint]]] = {}
    for point in points:
        if not point.on_slurm:
            continue
        parameters = parameters_for(point.waiting, sweep.id, point.excluded)
        # submitit's default limit is 256 tasks at a time; ours is none.
        parameters["array_parallelism"] = point.config.sweep.array_parallelism or 10**6
        found.setdefault(repr(sorted(parameters.items())), (parameters, []))[1].append(point)
    return [Shape(parameters, tuple(members)) for parameters, members in found.values()]


def _sweep_id(run_ids: Sequence[str]) -> str:
    """The name that the points have in common, and a hash of all of them."""
    names = {run_id.rpartition("-")[0] for run_id in run_ids}
    digest = hashlib.sha256("\n".join(sorted(run_ids)).encode()).hexdigest()[:8]
    return f"{names.pop() if len(names) == 1 else 'sweep'}-{digest}"


def chosen_sweep_id(batch: Sequence[Point], argv: Sequence[str]) -> str:
    """Of a sweep whose points are chosen by results: they are not known when it begins, so its command tells it."""
    config = next((point.config for point in batch if point.config is not None), None)
    if config is not None and config.run_id is not None:
        return config.run_id
    digest = hashlib.sha256("\n".join(sorted(a for a in argv if not a.startswith("wait="))).encode()).hexdigest()[:8]
    return f"{config.train.name}-{config.cluster.name}-{digest}" if config is not None else f"sweep-{digest}"


def point_names(points: Sequence[Sequence[str]]) -> list[str]:
    """What tells points apart, in short: the overrides that not all of them have, cluster.nodes=2 as nodes=2.

    Long fractions, as sweepers choose them, are rounded where that leaves the names different.
    """
    whole = _names_of(points, str)
    short = _names_of(points, _rounded)
    return short if len(set(short)) == len(set(whole)) else whole


def _rounded(value: str) -> str:
    return f"{float(value):.4g}" if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value) else value


def _names_of(points: Sequence[Sequence[str]], shown: Callable[[str], str]) -> list[str]:
    same = set(points[0]).intersection(*map(set, points)) if points else set()
    own = [[item for item in overrides if item not in same] for overrides in points]
    keys = {item.partition("=")[0] for items in own for item in items}
    short = {key: key.rpartition(".")[2] for key in keys}
    unique = {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}
    named = [[(unique[i.partition("=")[0]], i.partition("=")[2]) for i in items] for items in own]
    return [" ".join(f"{key}={shown(value)}" for key, value in items) or "the only point" for items in named]
