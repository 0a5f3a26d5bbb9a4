"""Watching a run that lives: the state `saving`, `status --watch`, `logs -f` over attempts to the end, Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from clusterrun.ledger import Ending, Ledger
from clusterrun.operate.find import found_at
from clusterrun.operate.status import RunState, status_of
from clusterrun.rundir import RunDir
from support import clusterrun, environment, start, step_reached, wait_for

STEPS = 60
# A save after every step: the run is seen saving.
JOB = [
    "train.task=talking_task:TalkingLinear",
    "train.task_args.delay_s=0.02",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=1",
    "cluster.nodes=1",
    "cluster.nproc_per_node=1",
    "preflight.policy.storage_latency=off",
    "run_id=watched",
]


def interrupted(process: subprocess.Popen[str]) -> str:
    """Ctrl-C at a command that follows a run: it ends at once, with no traceback. Returns what it printed."""
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    return said


def on_a_terminal(shared: Path, *arguments: str) -> str:
    """What the command draws on a terminal, up to its end."""
    own, its = pty.openpty()
    argv = [sys.executable, "-m", "clusterrun", *arguments]
    process = subprocess.Popen(argv, env=environment(shared), cwd=shared, stdin=its, stdout=its, stderr=its)
    os.close(its)
    drawn = b""
    while True:
        try:
            data = os.read(own, 65536)
        except OSError:  # the last process with the terminal has ended
            break
        drawn += data
    os.close(own)
    assert process.wait(timeout=20) == 0
    return drawn.decode()


def test_a_run_is_watched_to_its_end(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    code, said = clusterrun(tmp_path, *JOB, f"train.task_args.hurry={hurry}", "wait=false")
    assert code == 0, said
    run = RunDir.open(tmp_path / "runs" / "watched")
    following = start(tmp_path, ["logs", "watched", "-f"])
    watching = start(tmp_path, ["status", "watched", "--watch"])
    left = [start(tmp_path, ["logs", "watched", "-f"]), start(tmp_path, ["status", "watched", "--watch"])]
    seen: dict[RunState, str] = {}

    def saves() -> bool:
        (row,) = status_of([found_at(run.root)])
        seen[row.state] = row.why
        return RunState.saving in seen

    end = time.monotonic() + 60
    while not saves():
        assert time.monotonic() < end, seen
        time.sleep(0.005)
    assert re.fullmatch(r"step \d+", seen[RunState.saving])
    wait_for("steps", lambda: step_reached(tmp_path, "watched") > 5)
    for process in left:
        assert "watched" in interrupted(process) or process.args[-2:] == ["watched", "-f"]
    code, said = clusterrun(tmp_path, "requeue", "watched")
    assert code == 0, said
    hurry.touch()

    printed, _ = following.communicate(timeout=90)
    assert following.returncode == 0, printed
    attempts = Ledger(run.ledger).attempts()
    assert [a.ending for a in attempts] == [Ending.requeued, Ending.done]
    logs = [run.attempt(a.number).log(a.nodes[0], 0, 0, "out").read_text().splitlines() for a in attempts]
    assert all(len(lines) > 5 for lines in logs)
    calls = [line for line in printed.splitlines() if line.startswith("call ")]
    assert calls == [line for lines in logs for line in lines if line.startswith("call ")]

    table, _ = watching.communicate(timeout=30)
    assert watching.returncode == 0, table
    states = re.findall(r"^watched +(\w+)", table, re.MULTILINE)
    assert states[-1] == "done", table
    assert {"running", "saving", "requeued"} & set(states[:-1]), table
    assert len(states) < 40, table  # a table only when something has changed
    assert f"{STEPS}/{STEPS}" in table.splitlines()[-1], table

    drawn = on_a_terminal(tmp_path, "status", "watched", "--watch")
    assert re.search(r"watched.*done", drawn)
