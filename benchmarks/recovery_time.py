"""From the loss of a node to the next completed step: with a spare in the allocation, against a requeue. On the lab.

The cable of one of three nodes is pulled in the middle of training. With a spare the conductor starts a new step in the
same allocation; without one it has Slurm queue the job again, which can start only when Slurm has given up the dead
node (SlurmdTimeout, 10 s on the lab, 300 s by default). Noticing takes the same time in both (recovery.hang_floor_s,
here 5 s). Needs the lab (scripts/slurm_lab up --nodes 4 --gpus 8) idle.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from clusterrun.rundir import read_json_lines
from fault_matrix import DELAY, SHAPES, SPARE, TASK, Live, cut, lab
from support import clusterrun, run_dir

ROUNDS = int(os.environ.get("ROUNDS", "2"))
# Long enough that the run never ends before the fault is repaired.
STEPS = ["train.max_steps=2000"]


def first_step_after(shared: Path, run_id: str, pulled: float) -> float | None:
    """Unix time of the first step that a later attempt completed; None so far."""
    for attempt in run_dir(shared, run_id).all_attempts()[1:]:
        for path in attempt.event_files(0):
            for event in read_json_lines(path):
                if event["kind"] == "step" and event["t"] > pulled:
                    return float(event["t"])
    return None


def recovery_s(shared: Path, name: str, overrides: list[str]) -> float:
    lab("up", "--nodes", "4", "--gpus", "8")
    live = Live(shared, name)
    arguments = ["+cluster=lab", *TASK, DELAY, *STEPS, *SHAPES[3], *overrides, f"run_id={name}"]
    code, said = clusterrun(shared, *arguments, timeout_s=60)
    if code:
        raise SystemExit(said)
    try:
        live.fail_at(30, cut(2))
        pulled = time.time()
        while (step := first_step_after(shared, name, pulled)) is None:
            last = live.story[-1]
            if last.exit_code is not None:
                raise SystemExit(f"{name}: ended without going on: {last.ending.value}: {last.message}")
            if time.time() > pulled + 300:
                raise SystemExit(f"{name}: no step within 300 s; last attempt: {last.ending.value}: {last.message}")
            time.sleep(0.2)
        return step - pulled
    finally:
        subprocess.run(["scancel", live.job], check=True)
        lab("up", "--nodes", "4", "--gpus", "8")


def main() -> int:
    with_spare, requeued = [], []
    with tempfile.TemporaryDirectory() as scratch:
        shared = Path(scratch)
        for number in range(ROUNDS):
            with_spare.append(recovery_s(shared, f"spare-{number}", SPARE))
            requeued.append(recovery_s(shared, f"requeue-{number}", []))
            print(f"round {number + 1}: spare {with_spare[-1]:.1f} s, requeue {requeued[-1]:.1f} s", flush=True)
            time.sleep(5)  # the cancelled job's last processes
    spare, requeue = statistics.median(with_spare), statistics.median(requeued)
    print(f"recovery_time spare={spare:.1f} s requeue={requeue:.1f} s ratio={spare / requeue:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
