"""``clusterrun -m``: plan, submit and follow the points of a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterrun.errors import ClusterrunError, ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from clusterrun.config.points import Point
    from clusterrun.launch.sweep import PlacedPoint
    from clusterrun.launch.sweep_plan import SweepPlan
    from clusterrun.report.sweep_view import Row, Watched
    from clusterrun.rundir import SweepDir


def run_sweep(argv: list[str]) -> int:
    """Submit the points that ``argv`` means. The exit code is the largest of what went wrong, 0 when nothing did."""
    from clusterrun.config.points import sweep

    chooser = _Chooser(argv)
    swept = sweep(argv, chooser.run_batch)
    if chooser.sweep is not None:
        return chooser.end(swept.leftovers)
    return _submit(swept.points, argv, swept.sweeper)


def show_plan(argv: list[str], as_json: bool) -> int:
    """``clusterrun plan -m``: what ``clusterrun -m`` would do, and nothing is done."""
    from rich.console import Console

    from clusterrun.config.points import sweep
    from clusterrun.errors import ConfigError
    from clusterrun.launch.sweep_plan import plan_sweep

    def refuse(batch: list[Point]) -> list[float | Exception]:
        raise ConfigError("plan -m: this sweeper chooses points by results, so they can't be known before")

    plan = plan_sweep(sweep(argv, refuse).points)
    if as_json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        console = Console(highlight=False)
        _say_head(plan, console)
        from clusterrun.launch.sweep import PlacedPoint, standings
        from clusterrun.report.sweep_view import show_submitted

        placed = [PlacedPoint(p, s) for p, s in zip(plan.points, standings(plan.points), strict=True)]
        show_submitted(_rows(plan, placed, planned=True), console)
        for shape in plan.shapes:
            console.print(f"\nsbatch script of {len(shape.points)} point(s):", style="bold", markup=False)
            console.print(shape.text(plan.sweep).rstrip(), markup=False, soft_wrap=True)
    return _say_wrong(plan)


def _submit(points: Sequence[Point], argv: list[str], sweeper: str) -> int:
    from rich.console import Console

    from clusterrun.launch.sweep import submit_sweep
    from clusterrun.launch.sweep_local import LocalQueue, start_in_background
    from clusterrun.launch.sweep_plan import plan_sweep
    from clusterrun.report.sweep_view import show_submitted

    console = Console(highlight=False)
    plan = plan_sweep(points)
    placed = submit_sweep(plan, _about(argv, sweeper))
    code = _say_wrong(plan)
    _say_head(plan, console)
    show_submitted(_rows(plan, placed), console)
    local = [p for p in placed if p.submits and not p.point.on_slurm]
    wait = plan.points[0].config.wait
    if wait is None:
        wait = all(not p.on_slurm for p in plan.points)
    if any(p.error for p in placed):
        code = max(code, int(ExitCode.BAD_CONFIG))
    if not wait:
        if local:
            log = plan.sweep.log
            console.print(f"  runs as     process {start_in_background(plan.sweep)}, log {log}", markup=False)
        console.print(f"  report      clusterrun report {plan.sweep.id}", markup=False)
        _say_cancel(placed, console)
        return code
    queue = LocalQueue([p.point.run for p in local], plan.points[0].config.sweep.array_parallelism or 1)
    return max(code, _follow(plan, placed, queue, console, quiet=False))


def _follow(plan: SweepPlan, placed: Sequence[PlacedPoint], queue: Any, console: Console, quiet: bool) -> int:
    from clusterrun.errors import RunError
    from clusterrun.launch import jobs
    from clusterrun.launch.jobs import Job
    from clusterrun.launch.sweep import Standing
    from clusterrun.report.sweep_view import Watched, ended_text, follow_sweep

    names = dict(zip((p.run.id for p in plan.points), _names(plan), strict=True))
    watched: list[Watched] = []
    for p in placed:
        if p.standing is Standing.done or p.error:
            continue
        before = p.attempts_before if p.submits else max(0, p.attempts_before - 1)
        job = p.job or (Job.of(p.point.run) if not p.submits else None)
        watched.append(Watched(names[p.point.run.id], p.point.run, job.job_id if job else None, before))

    def tick() -> None:
        queue.tick()
        for point in watched:
            if point.run.id in queue.refused and not point.ended:
                point.refuse(queue.refused[point.run.id])
            point.job_id = queue.started.get(point.run.id, point.job_id)

    def states() -> dict[str, tuple[str, str]]:
        known = []
        for point in watched:
            if not point.ended and point.job_id is not None:
                try:
                    known.append(Job.of(point.run))
                except RunError:
                    continue
        return {job_id: (state.value, reason) for job_id, (state, reason) in jobs.states_of(known).items()}

    try:
        follow_sweep(watched, tick, states, console)
    except KeyboardInterrupt:
        if not queue.idle:
            console.print("\nstopping: the workers save at their next step (Ctrl-C again to leave them to it)")
            queue.cancel()
            for point in watched:
                if point.job_id is None and not point.ended:
                    point.refuse("it was not its turn yet", code=int(ExitCode.CANCELLED))
            follow_sweep([w for w in watched if w.run.id in queue.started], tick, states, console)
        else:
            console.print("\nno longer following; the jobs go on.")
            _say_cancel(placed, console)
        if quiet:
            raise
        console.print("Go on by giving the same command again: what is done stays done.")
        return int(ExitCode.CANCELLED)
    if not quiet:
        for line in ended_text(watched, plan.sweep.id):
            console.print(line, markup=False, soft_wrap=True)
    return max((point.exit_code or 0 for point in watched), default=0)


def _about(argv: Sequence[str], sweeper: str) -> dict[str, Any]:
    return {"command": ["clusterrun", *argv], "sweeper": sweeper.rpartition(".")[2]}


def _say_head(plan: SweepPlan, console: Console) -> None:
    if not plan.points:
        console.print(f"sweep {plan.sweep.id}: points are chosen by the results of those before", markup=False)
        console.print(f"  directory   {plan.sweep.root}", markup=False, soft_wrap=True)
        return
    arrays, points = len(plan.shapes), len(plan.points)
    shapes = f" of {arrays} resource shape{'s' if arrays != 1 else ''}" if arrays else ""
    console.print(f"sweep {plan.sweep.id}: {points} point{'s' if points != 1 else ''}{shapes}", markup=False)
    console.print(f"  directory   {plan.sweep.root}", markup=False, soft_wrap=True)


def _say_wrong(plan: SweepPlan) -> int:
    """Points that can't run, each with its own reason. Returns the exit code."""
    for point in plan.wrong:
        print(f"clusterrun: {point.error} (point {' '.join(point.overrides)})", file=sys.stderr)
    return max((int(point.error.exit_code) for point in plan.wrong if point.error), default=0)


def _say_cancel(placed: Sequence[PlacedPoint], console: Console) -> None:
    arrays = list(dict.fromkeys(p.job.job_id.partition("_")[0] for p in placed if p.job))
    if arrays:
        console.print(f"  cancel      scancel {' '.join(arrays)}", markup=False, soft_wrap=True)


def _names(plan: SweepPlan) -> list[str]:
    from clusterrun.launch.sweep_plan import point_names

    return point_names([p.overrides for p in plan.points])


def _rows(plan: SweepPlan, placed: Sequence[PlacedPoint], planned: bool = False) -> list[Row]:
    from clusterrun.launch.jobs import Job
    from clusterrun.launch.sweep import Standing
    from clusterrun.report.sweep_view import Row

    rows = []
    for name, p in zip(_names(plan), placed, strict=True):
        r = p.point.plan.resources
        spare = f" (+{r.spare_nodes})" if r.spare_nodes else ""
        resources = (f"{r.nodes}{spare} x {r.nproc_per_node}", str(r.gpus_per_node or "-"), str(r.cpus_per_node))
        word = p.job.job_id if p.job else "refused" if p.error else p.standing.value
        if p.standing in (Standing.pending, Standing.running):
            word = f"{Job.of(p.point.run).job_id} ({p.standing.value})"
        if planned or (word == "new" and not p.point.on_slurm):
            word = {"new": "to submit" if planned else "waits its turn"}.get(p.standing.value, word)
        rows.append(Row(name, p.point.run.id, word, resources, p.starts, p.error))
    return rows


class _Chooser:
    """Runs the batches of a sweeper that chooses its points by results, and tells it what came of them."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self.sweep: SweepDir | None = None
        self._code = 0

    def run_batch(self, batch: list[Point]) -> list[float | Exception]:
        from rich.console import Console

        from clusterrun.launch.sweep import Standing, submit_sweep
        from clusterrun.launch.sweep_local import LocalQueue
        from clusterrun.launch.sweep_plan import chosen_sweep_id, plan_sweep
        from clusterrun.report.sweep_view import show_submitted

        console = Console(highlight=False)
        plan = plan_sweep(batch, chosen_sweep_id(batch, self._argv))
        self._code = max(self._code, _say_wrong(plan))
        if self.sweep is None:
            _say_head(replace(plan, points=()), console)
        self.sweep = plan.sweep
        placed = submit_sweep(plan, _about(self._argv, "chooses by results"), expected_starts=False)
        todo = [p for p in placed if p.standing is not Standing.done]
        if todo:
            show_submitted(_rows(plan, placed), console)
        local = [p.point.run for p in placed if p.submits and not p.point.on_slurm]
        queue = LocalQueue(local, plan.points[0].config.sweep.array_parallelism or 1)
        self._code = max(self._code, _follow(plan, placed, queue, console, quiet=True))
        results = {p.point.run.id: _result(p) for p in placed}
        wrong = {p.number: p.error for p in plan.wrong if p.error is not None}
        return [wrong[p.number] if p.number in wrong else results[plan.run_ids[p.number]] for p in batch]

    def end(self, leftovers: dict[str, bytes]) -> int:
        assert self.sweep is not None
        for name, content in leftovers.items():
            (self.sweep.root / name).write_bytes(content)
            print(f"{name} of the sweeper: {self.sweep.root / name}")
        print(f"sweep {self.sweep.id}: clusterrun report {self.sweep.id}")
        return self._code


def _result(placed: PlacedPoint) -> float | Exception:
    """The number that a sweeper gets, by sweep.objective."""
    from clusterrun.report.events import objective

    found = objective(placed.point.run, placed.point.config.sweep.objective.value)
    if found is None:
        return ClusterrunError(f"{placed.point.run.id}: has no {placed.point.config.sweep.objective.value}")
    return found
