"""Submit a sweep: one Slurm array per resource shape, each point's directory written before anything is submitted.

What a killed submission leaves behind is safe to submit again. A job starts its point only when the point's
``job.json`` names that very job, which is written after sbatch has answered: so a point never has two conductors, and
a job that nobody wrote down ends by itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from clusterrun import process
from clusterrun.config import frozen
from clusterrun.config.schema import Executor, RunConfig
from clusterrun.errors import ClusterrunError, CommandError, RunError, SubmissionError
from clusterrun.launch import code, jobs
from clusterrun.launch.entry import Entry
from clusterrun.launch.jobs import Job, JobState, sbatch_explained
from clusterrun.launch.plan import make_plan
from clusterrun.launch.sbatch import executor_with
from clusterrun.launch.submit import check_place
from clusterrun.launch.sweep_plan import PlannedPoint, Shape, SweepPlan, shapes_of
from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import CodeDir, RunDir, SweepDir, is_whole, make_private, sweep_roots, write_durably, write_whole

_SCONTROL_TIMEOUT_S = 30.0
_TEST_ONLY_TIMEOUT_S = 10.0
# How long a started job waits to be written down: longer than a submission of thousands of points takes.
_RECORDED_WITHIN_S = 120.0
_POLL_S = 0.5
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, many times as fast
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Standing(Enum):
    """Where a point is."""

    new = "new"
    pending = "pending"
    running = "running"
    done = "done"
    stopped = "stopped"  # goes on from its newest checkpoint when submitted again
    failed = "failed"
    unknown = "unknown"  # the scheduler could not be asked


@dataclass(frozen=True)
class PlacedPoint:
    """A point after submission."""

    point: PlannedPoint
    standing: Standing  # before this submission
    job: Job | None = None  # of this submission; None: nothing was to do, it waits its turn, or it was refused
    starts: str | None = None  # expected start, as sbatch --test-only said
    error: str | None = None  # why it could not be submitted
    attempts_before: int = 0

    @property
    def submits(self) -> bool:
        """Whether it needs a job."""
        return self.standing in (Standing.new, Standing.stopped, Standing.failed)


class PointEntry(Entry):
    """What an array's task runs: its point, once that names this very job as its own."""

    def __call__(self) -> None:
        own = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}" if _in_array() else None
        own = own or os.environ["SLURM_JOB_ID"]
        run, end = RunDir(Path(self.run_dir)), time.monotonic() + _RECORDED_WITHIN_S
        while True:
            with suppress(RunError):
                recorded = Job.of(run).job_id
                if recorded == own:
                    break
            if time.monotonic() > end:
                raise SystemExit(f"{run.root}: job {own} was never written down as this run's; not starting it")
            time.sleep(_POLL_S)
        super().__call__()


def _in_array() -> bool:
    return "SLURM_ARRAY_TASK_ID" in os.environ and "SLURM_ARRAY_JOB_ID" in os.environ


def standings(points: Sequence[PlannedPoint | RunDir]) -> list[Standing]:
    """Where each point is, by its ledger and one question to the scheduler."""
    runs = [point if isinstance(point, RunDir) else point.run for point in points]
    made = {
        parent: set(os.listdir(parent)) if parent.is_dir() else set() for parent in {run.root.parent for run in runs}
    }
    found: list[Standing | Job] = [
        _by_ledger(run) if run.root.name in made[run.root.parent] else Standing.new for run in runs
    ]
    asked = jobs.states_of([item for item in found if isinstance(item, Job)])
    return [
        item if isinstance(item, Standing) else _by_job(run, asked[item.job_id][0])
        for run, item in zip(runs, found, strict=True)
    ]


def _by_ledger(run: RunDir) -> Standing | Job:
    """What the ledger alone tells, or the job to ask about."""
    attempts = Ledger(run.ledger).attempts()
    if attempts and attempts[-1].ending is Ending.done:
        return Standing.done
    if not run.job.exists():
        return _stopped_or_failed(run) if attempts else Standing.new
    return Job.of(run)


def _by_job(run: RunDir, state: JobState) -> Standing:
    if state is JobState.ended:
        return _stopped_or_failed(run)
    return {JobState.pending: Standing.pending, JobState.running: Standing.running}.get(state, Standing.unknown)


_STOPPED = {Ending.preempted, Ending.time_limit, Ending.requeued, Ending.stopped, Ending.cancelled, Ending.killed}


def _stopped_or_failed(run: RunDir) -> Standing:
    attempts = Ledger(run.ledger).attempts()
    return Standing.stopped if not attempts or attempts[-1].ending in _STOPPED else Standing.failed


def submit_sweep(plan: SweepPlan, about: dict[str, Any], expected_starts: bool = True) -> list[PlacedPoint]:
    """Write every point down and submit what has to run on Slurm. Points on this machine are left to ``LocalQueue``.

    ``about``: for sweep.yaml, how the sweep was asked for. Done and living points are passed over; stopped and failed
    ones go on from their newest checkpoint. A shape that is refused hides no other.

    Raises:
        ClusterrunError: nothing could be submitted at all.
    """
    for config in {(p.config.cluster.shared_dir, p.config.cluster.executor): p.config for p in plan.points}.values():
        check_place(config)
    for config in {code.place_of(p.config): p.config for p in plan.points if p.config.snapshot}.values():
        code.check_snapshot(config)
    plan.sweep.make()
    with _alone(plan.sweep):
        write_sweep(plan, about)
        placed = [
            PlacedPoint(point, standing, attempts_before=_attempts(point.run, standing))
            for point, standing in zip(plan.points, standings(plan.points), strict=True)
        ]
        submitting = _write_points(plan.sweep, [p.point for p in placed if p.submits])
        to_do = [point for points in submitting.values() for point in points if point.on_slurm]
        done: dict[str, PlacedPoint] = {}
        for code_dir, points in submitting.items():
            with code.inside(code_dir):
                for shape in shapes_of(plan.sweep, points):
                    starts = expected_start(shape, plan.sweep) if expected_starts else None
                    for part in _parts(shape, max_array_size() if len(shape.points) > 1 else 1):
                        try:
                            sent = _submit_array(plan.sweep, part)
                        except ClusterrunError as error:
                            done.update({p.run.id: _refused(p, str(error)) for p in part.points})
                        else:
                            placing = zip(part.points, sent, strict=True)
                            done.update({p.run.id: _sent(p, job, starts) for p, job in placing})
    if to_do and all(p.error for p in done.values()) and len(to_do) == len(placed):
        raise SubmissionError(next(p.error for p in done.values() if p.error) or "refused")
    return [
        replace(done[p.point.run.id], standing=p.standing, attempts_before=p.attempts_before)
        if p.point.run.id in done
        else p
        for p in placed
    ]


def _attempts(run: RunDir, standing: Standing) -> int:
    return 0 if standing is Standing.new else len(Ledger(run.ledger).attempts())


def _refused(point: PlannedPoint, error: str) -> PlacedPoint:
    return PlacedPoint(point, Standing.new, error=error)


def _sent(point: PlannedPoint, job: Job, starts: str | None) -> PlacedPoint:
    return PlacedPoint(point, Standing.new, job=job, starts=starts)


def _write_points(sweep: SweepDir, points: Sequence[PlannedPoint]) -> dict[CodeDir, list[PlannedPoint]]:
    """Run directories, as far as they are not there: a killed submission may have made some.

    Nothing here waits for the disk: what a crash of the server makes of it is seen and written again when the sweep is
    submitted again. ``job.json``, on which it depends that a point has one job, is written durably.
    Returns the points as they are submitted, by their code: with ``snapshot`` their script lies in its copy.
    """
    made, writer, codes = set(os.listdir(sweep.root)), frozen.Writer(), _Codes(sweep)
    inside: dict[CodeDir, list[PlannedPoint]] = {}
    for point in points:
        run = point.run
        if run.id in made:
            for part in (run.root, run.attempts, run.checkpoints, run.submitit):
                make_private(part)
        else:
            for part in (run.root, run.attempts, run.checkpoints, run.submitit):
                part.mkdir(mode=0o700)
        if run.id in made and run.code.root.exists():
            own = CodeDir(run.code.root.resolve())
        else:
            own = codes.of(point.config)
            _link(run.code.root, own.root)
        inside.setdefault(own, []).append(_from_copy(sweep, point, own) if codes.has_copy(own) else point)
    every = [point for group in inside.values() for point in group]
    texts = {p.run.id: text for s in shapes_of(sweep, every) for text in [s.text(sweep)] for p in s.points}
    for point in every:
        run = point.run
        if run.id not in made or not is_whole(run.config) or not is_whole(run.plan):
            plan = replace(point.plan, sbatch=texts.get(run.id))
            write_whole(run.config, writer.to_yaml(point.config))
            write_whole(run.plan, json.dumps(plan, default=vars))
    return inside


def _from_copy(sweep: SweepDir, point: PlannedPoint, own: CodeDir) -> PlannedPoint:
    config = code.from_copy(point.config, own)
    if config is point.config:
        return point
    plan = make_plan(config, point.run.id, point.excluded, sweep)
    return replace(point, config=config, plan=plan, waiting=code.from_copy(point.waiting, own))


class _Codes:
    """Records of the code, one for all points whose code lies in one place."""

    def __init__(self, sweep: SweepDir) -> None:
        self._sweep = sweep
        self._known: dict[tuple[str | None, bool], CodeDir] = {}
        self._copies: dict[CodeDir, bool] = {}

    def of(self, config: RunConfig) -> CodeDir:
        asked = (config.train.script, config.snapshot)
        if asked not in self._known:
            self._known[asked] = code.shared_by(config, self._sweep)
        return self._known[asked]

    def has_copy(self, own: CodeDir) -> bool:
        if own not in self._copies:
            self._copies[own] = own.tree.is_dir()
        return self._copies[own]


def _submit_array(sweep: SweepDir, shape: Shape) -> list[Job]:
    """One sbatch. Raises SubmissionError."""
    executor = executor_with(shape.parameters, sweep.submitit)
    with sbatch_explained(shape.parameters):
        sent = executor.submit_array([PointEntry(str(p.run.root)) for p in shape.points])
    script = sweep.submissions / f"{str(sent[0].job_id).partition('_')[0]}.sh"
    script.write_text(sent[0].paths.submission_file.read_text())
    found, workdir = [], os.getcwd()
    for point, task in zip(shape.points, sent, strict=True):
        job = Job(Executor.slurm.value, str(task.job_id), str(point.run.root), sweep.id, workdir, time.time())
        _link(point.run.submission, script)
        for stream in (task.paths.stdout, task.paths.stderr):
            _link(point.run.submitit / stream.name, stream)
        found.append(job)
    jobs.write_jobs([(point.run, job) for point, job in zip(shape.points, found, strict=True)])
    return found


def _link(name: Path, target: Path) -> None:
    """A relative link, in place of what was there."""
    to = os.path.relpath(target, name.parent)
    try:
        os.symlink(to, name)
    except FileExistsError:
        name.unlink()
        name.symlink_to(to)


def _parts(shape: Shape, size: int) -> list[Shape]:
    return [replace(shape, points=shape.points[i : i + size]) for i in range(0, len(shape.points), size)]


def max_array_size() -> int:
    """How many tasks an array of this site may have (MaxArraySize is one more than the largest index)."""
    try:
        shown = process.run(["scontrol", "show", "config"], timeout_s=_SCONTROL_TIMEOUT_S)
    except CommandError:  # no scontrol on this login node: Slurm's default
        shown = ""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", shown, re.MULTILINE)
    return max(1, int(match.group(1)) if match else 1001)


def expected_start(shape: Shape, sweep: SweepDir) -> str | None:
    """When the first of a shape could start, as ``sbatch --test-only`` has it, which submits nothing.

    Local time as Slurm prints it, 2026-12-02T14:54:40; else what Slurm said instead, or None.
    """
    if shape.parameters.get("dependency"):
        return "when what it depends on ends"  # --test-only does not look at dependencies
    with tempfile.TemporaryDirectory(prefix="clusterrun-") as scratch:
        script = Path(scratch) / "test.sh"
        script.write_text(shape.text(sweep))
        try:
            with jobs.clean_environment():
                said = process.run(["sbatch", "--test-only", str(script)], timeout_s=_TEST_ONLY_TIMEOUT_S, errors=True)
        except CommandError as error:
            said = error.output.strip().rpartition("\n")[2]
            return f"unknown ({said.removeprefix('sbatch: ').removeprefix('error: ')})" if said else None
    match = re.search(r"to start at (\S+)", said)
    return match.group(1) if match else None


@contextmanager
def _alone(sweep: SweepDir) -> Iterator[None]:
    """One submission of a sweep at a time; the lock ends with its process."""
    fd = os.open(sweep.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{sweep.id}: is being submitted by another process at this moment; wait for it") from None
        except OSError:  # a file system without locks; job.json still gives each point one job
            pass
        yield
    finally:
        os.close(fd)


def write_sweep(plan: SweepPlan, about: dict[str, Any]) -> None:
    """sweep.yaml: how it was asked for, and every point it has had."""
    known = {point["run"]: point for point in read_sweep(plan.sweep)["points"]} if plan.sweep.sweep.exists() else {}
    known.update({p.run.id: {"run": p.run.id, "overrides": list(p.overrides)} for p in plan.points})
    value = {
        "id": plan.sweep.id,
        **about,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "workdir": os.getcwd(),
        "points": list(known.values()),
    }
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    write_durably(plan.sweep.sweep, text)


def read_sweep(sweep: SweepDir) -> dict[str, Any]:
    """What ``write_sweep`` wrote. Raises RunError when it is not a sweep."""
    try:
        value = yaml.load(sweep.sweep.read_text(encoding="utf-8"), Loader=_Loader)
        if not isinstance(value, dict) or not all(isinstance(p["run"], str) for p in value["points"]):
            raise ValueError("no points")
    except FileNotFoundError:
        raise RunError(f"{sweep.root}: not a sweep (no {sweep.sweep.name} in it)") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, OSError) as error:
        raise RunError(f"{sweep.sweep}: can't be read as a sweep: {str(error).splitlines()[0]}") from None
    return value


def find_sweep(name: str, shared_dir: Path) -> SweepDir | None:
    """A sweep by path, id, or the beginning of its id; None when there is none so named.

    Raises:
        RunError: several begin so.
    """
    own = SweepDir(Path(name).expanduser().resolve())
    if own.sweep.is_file():
        return own
    found = [path for path in sweep_roots(shared_dir) if path.name.startswith(name)]
    exact = [path for path in found if path.name == name]
    if len(exact or found) > 1:
        raise RunError(f"{name}: several sweeps begin so: {', '.join(sorted(p.name for p in found)[:5])}")
    return SweepDir((exact or found)[0]) if found else None
