"""What submitit pickles. Light: a submission needs nothing of what will run."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from clusterrun import imports, process
from clusterrun.config import frozen
from clusterrun.config.grace import signal_lead_s
from clusterrun.config.schema import Executor
from clusterrun.rundir import RunDir


class Entry:
    """What submitit pickles and runs: the run directory's path and nothing else.

    Slurm replays the same pickle on every requeue; what to do is decided at start, from what is on disk.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> None:
        with imports.uncollected():
            from clusterrun.launch.allocation import allocation_for
            from clusterrun.launch.conductor import Conductor

        run = RunDir.open(Path(self.run_dir))
        config = frozen.load(run.config)
        if config.cluster.executor is Executor.local:
            process.signal_when_parent_dies(signal.SIGTERM)  # nobody else would end a run whose controller is gone
        allocation = allocation_for(config.cluster, signal_lead_s(config))
        raise SystemExit(Conductor(run, config, allocation, say=_say).conduct())


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} clusterrun: {text}", flush=True)
