"""Every verb that looks at runs, on 1,000 finished run directories: each must take under 2 s of processor time.

    python benchmarks/operations.py [--runs 1000]

The directories are copies of one real run on this machine with their times shifted; half of them are points of a sweep.
Prints processor seconds, which other work on the machine hardly changes, wall-clock seconds, and each verb's ratio to
`clusterrun --version` in the same run. Exit 1 when one is over the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 2.0
WEEK_S = 7 * 24 * 3600.0


def clusterrun(shared: Path, *arguments: str) -> tuple[float, float, int]:
    """Processor seconds, wall-clock seconds, exit code."""
    env = {**os.environ, "CLUSTERRUN_SHARED_DIR": str(shared), "NO_COLOR": "1"}
    begin, used = time.perf_counter(), os.times()
    done = subprocess.run(
        [sys.executable, "-m", "clusterrun", *arguments],
        env=env,
        capture_output=True,
        text=True,
        cwd=shared,
        check=False,
    )
    now = os.times()
    spent = now.children_user + now.children_system - used.children_user - used.children_system
    return spent, time.perf_counter() - begin, done.returncode


def make(shared: Path, runs: int) -> None:
    """Copies of one real run, the oldest a week old."""
    clusterrun(shared, "train=ddp_linear", "train.max_steps=600", "run_id=original")
    original = shared / "runs" / "original"
    shutil.rmtree(original / "checkpoints")
    (original / "checkpoints").mkdir()
    sweep = shared / "sweeps" / "many"
    sweep.mkdir(parents=True)
    (sweep / "sweep.yaml").write_text("points: []\n")
    for number in range(runs - 1):
        parent = sweep if number % 2 else shared / "runs"
        run = parent / f"run-{number:04}"
        shutil.copytree(original, run)
        shift = WEEK_S * (1 - number / runs)
        job = json.loads((run / "job.json").read_text())
        job.update(run_dir=str(run), submitted=job["submitted"] - shift)
        (run / "job.json").write_text(json.dumps(job))
        records = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        for record in records:
            record.update({k: record[k] - shift for k in ("started", "ended", "chosen") if record.get(k)})
        (run / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        shared = Path(scratch)
        make(shared, options.runs)
        base = min(clusterrun(shared, "--version")[0] for _ in range(3))
        print(f"clusterrun --version: {base:.2f} s; {options.runs} run directories")
        slow = 0
        for verb in (
            ["status"],
            ["status", "--all"],
            ["status", "many"],
            ["status", "--json"],
            ["status", "last"],
            ["logs", "run-0500"],
            ["logs", "last", "--rank", "0"],
            ["cancel", "run-0500"],
            ["requeue", "run-0500"],
            ["resume", "run-0500"],
            ["checkpoints", "run-0500"],
            ["clusters"],
            ["clean", "--older-than", "30d"],
            ["clean", "--older-than", "3d", "--yes"],
        ):
            seconds, wall, code = clusterrun(shared, *verb)
            slow += seconds > LIMIT_S
            over = "  OVER THE LIMIT" if seconds > LIMIT_S else ""
            print(
                f"{' '.join(verb):32} {seconds:5.2f} s  wall {wall:5.2f} s  {seconds / base:5.1f} x  exit {code}{over}"
            )
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
