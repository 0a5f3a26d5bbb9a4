"""The process that torchrun starts for each rank: ``python -m clusterrun.train.worker --run-dir DIR --attempt N``.

Environment: torchrun's own; CLUSTERRUN_NODE names this node in file names (default: the host name); when the run
stopped early and is saved, the file CLUSTERRUN_STOPPED_FILE is made, by which the launcher knows to requeue the run.

Exits with 0 when done or stopped, 1 when the task's code failed, 2 and more for what ``errors`` describes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from clusterrun import imports, process, pulse
from clusterrun.train.stopping import StopFlag


def main(argv: list[str] | None = None) -> NoReturn:
    flag = StopFlag()
    flag.install()  # before the slow imports: a signal may come while torch is loaded
    if os.environ.get(pulse.DIRECTORY):
        # Without its agent nobody would end it or learn how it ended, and it would hold the GPU.
        process.signal_when_parent_dies(signal.SIGKILL)
    faulthandler.enable()  # Python stacks to the log, should C code crash
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # and whenever the agent finds that nothing moves
    parser = argparse.ArgumentParser(prog="clusterrun.train.worker")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    _exit(_train(args.run_dir, args.attempt, flag))


def _train(directory: Path, attempt: int, flag: StopFlag) -> int:
    with imports.uncollected():
        from torch.distributed.elastic.multiprocessing.errors import record

        from clusterrun.errors import ClusterrunError
        from clusterrun.rundir import RunDir
        from clusterrun.train import session
        from clusterrun.train.events import EventLog

    node = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    rank = int(os.environ.get("RANK", "0"))
    events: EventLog | None = None

    def attempt_to_train() -> bool:
        nonlocal events
        run_dir = RunDir.open(directory)
        events = EventLog(run_dir.attempt(attempt).event_file(node, rank), rank)
        return session.run(run_dir, attempt, events, flag) is not None

    try:
        stopped = record(attempt_to_train)()  # tells torchrun about an error, so that it can name the first rank
    except Exception as error:
        if events is not None:
            events.error(error)
        if isinstance(error, ClusterrunError):
            print(f"error: {error}", file=sys.stderr)
            return int(error.exit_code)
        traceback.print_exc()
        return 1
    if stopped and (path := os.environ.get("CLUSTERRUN_STOPPED_FILE")):
        Path(path).touch()
    return 0


def _exit(code: int) -> NoReturn:
    """End at once, without Python's tidying up.

    A thread that the task left running must not keep the process, and the node, busy. And torch 2.13 with Gloo aborts
    in an ordinary exit after DDP ("terminate called without an active exception", 3 of 12 plain scripts), which would
    make a failure of a finished run.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
