"""Points of a sweep on this machine: one after another, or a few at a time.

    python -m clusterrun.launch.sweep_local <sweep directory>

goes on with the points of a sweep by itself (``wait=false``). Whoever waits drives the same queue in its own process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clusterrun import process
from clusterrun.config import frozen
from clusterrun.config.schema import Executor
from clusterrun.errors import ClusterrunError
from clusterrun.launch import code, jobs
from clusterrun.launch.jobs import Job, JobState
from clusterrun.launch.sweep import Standing, read_sweep, standings
from clusterrun.rundir import RunDir, SweepDir

_POLL_S = 0.5


class LocalQueue:
    """Starts the next run when one has ended. ``tick`` it now and then."""

    def __init__(self, runs: Sequence[RunDir], parallel: int) -> None:
        self._waiting = list(runs)
        self._parallel = parallel
        self._living: list[Job] = []
        self.started: dict[str, str] = {}  # run id -> job id, ended ones too
        self.refused: dict[str, str] = {}  # run id -> why it could not be started

    def tick(self) -> None:
        living = jobs.states_of(self._living)
        self._living = [job for job in self._living if living[job.job_id][0] is not JobState.ended]
        while self._waiting and len(self._living) < self._parallel:
            run = self._waiting.pop(0)
            try:
                with code.inside(run.code):
                    job = jobs.submit(run, frozen.load(run.config))
                self._living.append(job)
                self.started[run.id] = job.job_id
            except ClusterrunError as error:  # one that can't start hides no other
                self.refused[run.id] = str(error)

    def cancel(self) -> None:
        """Start nothing more, and have what runs save and end."""
        self._waiting.clear()
        for job in self._living:
            jobs.cancel(job)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._living


def start_in_background(sweep: SweepDir) -> int:
    """Have a process of its own go on with the sweep. Returns its id."""
    with sweep.log.open("ab") as log:
        argv = [sys.executable, "-m", "clusterrun.launch.sweep_local", str(sweep.root)]
        return process.start(argv, stdout=log, stderr=log).pid


def main(argv: Sequence[str]) -> int:
    sweep = SweepDir(Path(argv[0]))
    runs = [sweep.run(point["run"]) for point in read_sweep(sweep)["points"]]
    configs = {run.id: frozen.load(run.config) for run in runs}
    todo = [
        run
        for run, standing in zip(runs, standings(runs), strict=True)
        if configs[run.id].cluster.executor is Executor.local
        and standing in (Standing.new, Standing.stopped, Standing.failed)
    ]
    parallel = [configs[run.id].sweep.array_parallelism or 1 for run in todo]
    queue = LocalQueue(todo, max(parallel, default=1))
    while not queue.idle:
        queue.tick()
        time.sleep(_POLL_S)
    for run_id, error in queue.refused.items():
        print(f"{run_id}: {error}")
    return 1 if queue.refused else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
