"""Whole runs on this machine: simulated nodes, each its own torchrun agent."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from clusterrun.launch.local_steps import processes_with
from clusterrun.ledger import Ending
from support import (
    assert_same_bits,
    attempts,
    clusterrun,
    environment,
    events,
    final_state,
    losses,
    run_dir,
    start,
    step_reached,
    wait_for,
)

SLOW = ["train=ddp_linear", "data=mnist5k", "train.task=slow_task:SlowLinear", "train.epochs=8"]
DELAY = "train.task_args.delay_s=0.05"


def test_mnist_on_two_simulated_nodes_of_two_processes(tmp_path: Path) -> None:
    code, said = clusterrun(tmp_path, "train=ddp_linear", "data=mnist5k", "run_id=demo")
    assert code == 0, said
    assert "world size 4" in said
    assert "64 samples per step, 16 per rank" in said
    assert events(tmp_path, "demo", "eval")[-1]["value"] >= 0.85
    run = run_dir(tmp_path, "demo")
    assert (run.root.stat().st_mode & 0o777) == 0o700
    logs = {p.name for p in run.attempt(1).logs.glob("*.out")}
    assert logs == {"node0.0.out", "node0.1.out", "node1.2.out", "node1.3.out"}
    first, last = events(tmp_path, "demo", "step")[0], events(tmp_path, "demo", "step")[-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert {"samples_per_s", "step_time_s", "data_time_s", "comm_time_s", "lr"} <= last.keys()
    assert not processes_with("CLUSTERRUN_RUN", str(run.root))
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"runs"}


def test_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    code, said = clusterrun(tmp_path, *SLOW, "run_id=whole")
    assert code == 0, said
    code, said = clusterrun(tmp_path, *SLOW, DELAY, "checkpoint.every_steps=20", "wait=false", "run_id=killed")
    assert code == 0, said
    wait_for("a checkpoint", lambda: step_reached(tmp_path, "killed") >= 50)
    run = run_dir(tmp_path, "killed")
    code, said = clusterrun(tmp_path, "resume", "killed")
    assert "still running" in said, said
    assert code == 2
    for pid in processes_with("CLUSTERRUN_RUN", str(run.root)):
        os.kill(pid, signal.SIGKILL)
    wait_for("all gone", lambda: not processes_with("CLUSTERRUN_RUN", str(run.root)))
    code, said = clusterrun(tmp_path, "resume", "killed")
    assert code == 0, said
    story = attempts(tmp_path, "killed")
    assert [a.ending for a in story] == [Ending.killed, Ending.done]
    assert story[1].saved_before is not None
    assert story[1].saved_before >= 40
    assert_same_bits(final_state(tmp_path, "whole"), final_state(tmp_path, "killed"))
    expected, got = losses(tmp_path, "whole"), losses(tmp_path, "killed")
    assert all(got[step] == expected[step] for step in expected)
    code, said = clusterrun(tmp_path, "resume", "killed")
    assert "is done" in said, said
    assert code == 2


def test_ctrl_c_stops_a_followed_run_cleanly(tmp_path: Path) -> None:
    """The terminal sends SIGINT to its whole foreground group; the workers must save all the same."""
    process = start(tmp_path, [*SLOW, DELAY, "run_id=stopped"], start_new_session=True)
    wait_for("some steps", lambda: step_reached(tmp_path, "stopped") >= 20)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "clusterrun resume" in said
    (attempt,) = attempts(tmp_path, "stopped")
    assert attempt.ending is Ending.cancelled
    assert attempt.saved_after is not None
    assert attempt.saved_after >= 20
    assert not processes_with("CLUSTERRUN_RUN", str(run_dir(tmp_path, "stopped").root))


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    env = {**environment(tmp_path), "TERM": "xterm", "COLUMNS": "120"}
    env.pop("NO_COLOR")
    arguments = [sys.executable, "-m", "clusterrun", "train=ddp_linear", "train.max_steps=300", "run_id=bar"]
    process = subprocess.Popen(arguments, env=env, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
    assert process.wait(timeout=60) == 0
    text = seen.decode(errors="replace")
    assert "━" in text or "╸" in text
    assert "bar: done" in text


def test_time_limit_on_the_laptop_saves_and_starts_again(tmp_path: Path) -> None:
    """submitit's local controller gives USR2 a quarter of a minute before the one-minute limit, then starts it anew."""
    arguments = [*SLOW, "train.epochs=40", DELAY, "cluster.time_limit=1m", "run_id=limit", "wait=false"]
    code, said = clusterrun(tmp_path, *arguments)
    assert code == 0, said
    wait_for("a second attempt", lambda: len(attempts(tmp_path, "limit")) == 2, timeout_s=90)
    first = attempts(tmp_path, "limit")[0]
    assert first.ending is Ending.time_limit
    assert first.saved_after
    wait_for("it goes on", lambda: step_reached(tmp_path, "limit") > (first.saved_after or 0))
    os.kill(int(json.loads(run_dir(tmp_path, "limit").job.read_text())["job_id"]), signal.SIGTERM)
    wait_for("the end", lambda: attempts(tmp_path, "limit")[-1].exit_code is not None)
    assert attempts(tmp_path, "limit")[-1].ending is Ending.cancelled


def test_simulated_nodes_share_no_gpu(tmp_path: Path) -> None:
    """Devices are divided among the nodes as Slurm would; seen through the step runner, no driver needed."""
    from clusterrun.config.schema import Accelerator, ClusterConfig
    from clusterrun.launch.local_steps import LocalSteps
    from clusterrun.launch.steps import StepSpec

    cluster = ClusterConfig(nodes=2, nproc_per_node=2, gpus_per_node=2, accelerator=Accelerator.cuda)
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    try:
        out, err = tmp_path / "out", tmp_path / "err"
        argv = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
        step = LocalSteps(cluster).start(StepSpec("devices", ["node0", "node1"], argv, out, err))
        wait_for("the end", lambda: step.poll() is not None)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    assert sorted(out.read_text().split()) == ["4,5", "6,7"]
