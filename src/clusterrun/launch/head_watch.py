"""Watches, from other nodes of a Slurm job, whether Slurm has lost the node that the conductor runs on.

With --no-kill, which lets a job outlive a dead node, Slurm takes that node out of the job and leaves the job running,
also when it was the batch host (seen with 22.05: "Removing failed node"; no requeue). Nothing would happen in it until
its time limit. So a small step beside the others asks Slurm now and then, and has the job queued again:

    python -m clusterrun.launch.head_watch --job ID --restarts N

``restarts`` is how often the job had been requeued when this step began: what was requeued since is not its business.
Where the job may not be requeued it is cancelled, since it holds nodes for nothing. Torch-free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from clusterrun import process
from clusterrun.errors import CommandError
from clusterrun.launch.slurm_steps import SLURM_TIMEOUT_S, expand_host_list, is_away, job_field, job_restarts
from clusterrun.launch.steps import Step, StepRunner, StepSpec
from clusterrun.rundir import AttemptDir

_LOOK_S = 15.0  # twice a look from every job of several nodes: a few questions a second from a thousand of them
_WATCHERS = 2
_END_S = 2.0


def watchers(nodes: Sequence[str], head: str | None) -> list[str]:
    """Who watches: the last nodes, which are spares where there are any, but never the head itself."""
    return [node for node in nodes if node != head][-_WATCHERS:]


def head_is_lost(job: str, expand: Callable[[str], Sequence[str]] = expand_host_list) -> bool:
    """Whether a running job, as ``scontrol show job --oneliner`` has it, goes on without its batch host."""
    head, nodes = job_field(job, "BatchHost"), job_field(job, "NodeList")
    if job_field(job, "JobState") != "RUNNING" or not head or nodes in ("", "(null)"):
        return False
    return head not in expand(nodes)


class HeadWatch:
    """The conductor's side: keeps the watch going."""

    def __init__(self, steps: StepRunner, job_id: str, head: str | None, restarts: int) -> None:
        self._steps, self._job_id, self._head, self._restarts = steps, job_id, head, restarts
        self._step: Step | None = None
        self._nodes: list[str] = []

    def ensure(self, attempt: AttemptDir, nodes: Sequence[str]) -> None:
        """Start it, or start it again when it has ended, or when a node that it runs on is no longer among ``nodes``.

        Raises:
            CommandError: it can't be started.
        """
        if self._step is not None and self._step.poll() is None and set(self._nodes) <= set(nodes):
            return
        self.stop()
        self._nodes = watchers(nodes, self._head)
        if not self._nodes:  # a job of one node is requeued by Slurm itself
            return
        out, err = attempt.step_output("head_watch")
        argv = [sys.executable, "-m", "clusterrun.launch.head_watch", f"--job={self._job_id}"]
        argv.append(f"--restarts={self._restarts}")
        self._step = self._steps.start(StepSpec("head_watch", self._nodes, argv, out, err, beside=True))

    def stop(self) -> None:
        """End it, without waiting for nodes that can't be reached: the end of the job ends it in any case."""
        if self._step is None:
            return
        self._step.ask_to_stop()
        end = time.monotonic() + _END_S
        while self._step.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        self._step = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restarts", required=True, type=int)
    args = parser.parse_args()
    for stop in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(stop, lambda number, frame: os._exit(0))
    # Not all at the same moment: the second finds what the first has done.
    time.sleep(int(os.environ.get("SLURM_PROCID", "0")) * _LOOK_S / _WATCHERS)
    while True:
        time.sleep(_LOOK_S)
        with contextlib.suppress(CommandError):  # slurmctld is away, or this node is cut off: asked again
            if look(args.job, args.restarts):
                return 0


def look(job_id: str, restarts: int) -> bool:
    """One look; acts when the head is lost. Returns whether there is nothing left to watch. Raises CommandError."""
    job = process.run(["scontrol", "show", "job", job_id, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
    if job_restarts(job) != restarts:
        return True
    if not head_is_lost(job):
        return False
    _say(f"Slurm has lost {job_field(job, 'BatchHost')}, where the conductor ran: queueing job {job_id} again")
    try:
        process.run(["scontrol", "requeue", job_id], timeout_s=SLURM_TIMEOUT_S)
    except CommandError as error:
        if is_away(error):
            raise
        _say(f"{error}; cancelling it, since nobody is left to drive it. Go on with: clusterrun resume")
        process.run(["scancel", job_id], timeout_s=SLURM_TIMEOUT_S)
    return True


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
