"""Whole runs on the real Slurm of several hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from clusterrun.ledger import Ending
from support import (
    TESTS,
    assert_same_bits,
    attempts,
    clusterrun,
    events,
    final_state,
    losses,
    run_dir,
    step_reached,
    wait_for,
)

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]

SIX = ["cluster.nodes=3", "cluster.nproc_per_node=2", "train=ddp_linear", "data=mnist5k"]
SLOW = ["train.task=slow_task:SlowLinear", "train.epochs=40"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def scontrol_job(job_id: str) -> str:
    return subprocess.run(
        ["scontrol", "show", "job", job_id, "--oneliner"], capture_output=True, text=True, check=True, timeout=30
    ).stdout


def job_id(shared: Path, run_id: str) -> str:
    return str(json.loads(run_dir(shared, run_id).job.read_text())["job_id"])


def test_three_hosts_train_as_the_laptop_does(shared: Path) -> None:
    code, said = clusterrun(shared, "+cluster=lab", *SIX, "wait=true", "run_id=lab6")
    assert code == 0, said
    assert "world size 6" in said
    (attempt,) = attempts(shared, "lab6")
    assert attempt.ending is Ending.done
    assert len(set(attempt.nodes)) == 3
    assert events(shared, "lab6", "start")[0]["world_size"] == 6
    assert events(shared, "lab6", "eval")[-1]["value"] >= 0.85

    code, said = clusterrun(shared, *SIX, "run_id=laptop6")
    assert code == 0, said
    on_lab, on_laptop = losses(shared, "lab6"), losses(shared, "laptop6")
    assert on_lab.keys() == on_laptop.keys()
    assert len(on_lab) > 20
    assert max(abs(on_lab[s] - on_laptop[s]) for s in on_lab) <= 1e-6
    assert "JobState=COMPLETED" in scontrol_job(job_id(shared, "lab6"))


def test_the_plan_is_what_was_submitted(shared: Path) -> None:
    arguments = ["+cluster=lab", "train=script", f"train.script={TESTS / 'plain_script.py'}", "train.args=[--epochs,3]"]
    code, planned = clusterrun(shared, "plan", *arguments, "--json")
    assert code == 0, planned
    plan = json.loads(planned)
    code, said = clusterrun(shared, *arguments, "wait=true")
    assert code == 0, said
    run = run_dir(shared, plan["run_id"])
    assert run.submission.read_text() == plan["sbatch"]
    job = scontrol_job(job_id(shared, plan["run_id"]))
    assert "NumNodes=2" in job


def test_a_plain_script_runs_unchanged_on_two_hosts(shared: Path) -> None:
    script = TESTS / "plain_script.py"
    arguments = ["cluster=lab", "train=script", f"train.script={script}", "train.args=[--epochs,3]", "run_id=plain"]
    code, said = clusterrun(shared, *arguments, "wait=true")
    assert code == 0, said
    logs = sorted(run_dir(shared, "plain").attempt(1).logs.glob("*.out"))
    assert [p.name for p in logs] == ["c1.0.out", "c1.1.out", "c2.2.out", "c2.3.out"]
    for rank, log in enumerate(logs):
        assert log.read_text().strip() == f"rank {rank} of 4 sum 10 args ['--epochs', '3']"


def test_submit_returns_at_once_and_says_what_to_type_next(shared: Path) -> None:
    code, said = clusterrun(shared, "+cluster=lab", *SIX, "train.max_steps=10", "run_id=later", timeout_s=20)
    assert code == 0, said
    job = job_id(shared, "later")
    assert f"submitted later as job {job}" in said
    assert "clusterrun logs later -f" in said
    assert "clusterrun cancel later" in said
    code, said = clusterrun(shared, "resume", "later")
    assert code == 2
    assert "nothing to resume" in said
    subprocess.run(["scancel", job], check=True, timeout=30)


@pytest.mark.timeout(700)
def test_preempted_then_out_of_time_ends_with_the_same_bits(shared: Path) -> None:
    code, said = clusterrun(shared, *SIX, *SLOW, "run_id=undisturbed")
    assert code == 0, said

    slow = [*SIX, *SLOW, "train.task_args.delay_s=0.05", "cluster.time_limit=2m", "run_id=disturbed"]
    code, said = clusterrun(shared, "+cluster=lab", *slow, timeout_s=30)
    assert code == 0, said
    wait_for("some steps", lambda: step_reached(shared, "disturbed") >= 50)
    preemptor = ["sbatch", "--partition=high", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap", "sleep 2"]
    subprocess.run(preemptor, check=True, capture_output=True, timeout=30)
    wait_for("the end", lambda: attempts(shared, "disturbed")[-1].exit_code is not None, timeout_s=500)

    story = attempts(shared, "disturbed")
    endings = [a.ending for a in story]
    assert endings[0] is Ending.preempted, story
    assert Ending.time_limit in endings, story
    assert endings[-1] is Ending.done, story
    assert all(a.saved_after is not None and a.saved_after > (a.saved_before or 0) for a in story)
    assert "Restarts=" + str(len(story) - 1) in scontrol_job(job_id(shared, "disturbed"))
    assert_same_bits(final_state(shared, "undisturbed"), final_state(shared, "disturbed"))
    expected, got = losses(shared, "undisturbed"), losses(shared, "disturbed")
    assert all(got[step] == expected[step] for step in expected)


def test_scancel_saves_and_is_no_failure_of_the_run(shared: Path) -> None:
    slow = [*SIX, *SLOW, "train.task_args.delay_s=0.05", "run_id=cancelled"]
    code, said = clusterrun(shared, "+cluster=lab", *slow, timeout_s=30)
    assert code == 0, said
    wait_for("some steps", lambda: step_reached(shared, "cancelled") >= 20)
    subprocess.run(["scancel", job_id(shared, "cancelled")], check=True, timeout=30)
    wait_for("the ledger's end", lambda: attempts(shared, "cancelled")[-1].ended is not None)
    (attempt,) = attempts(shared, "cancelled")
    assert attempt.ending is Ending.cancelled
    assert attempt.exit_code == 130
    assert attempt.saved_after is not None
    assert attempt.saved_after >= 20


def test_a_failing_task_is_a_failed_job_with_its_first_error(shared: Path) -> None:
    failing = ["train.task=slow_task:SlowLinear", "train.task_args.fail_at=7", "run_id=failing", "wait=true"]
    code, said = clusterrun(shared, "+cluster=lab", "train=ddp_linear", *failing)
    assert code == 1, said
    assert "ValueError: the test task was told to fail here" in said
    assert "JobState=FAILED" in scontrol_job(job_id(shared, "failing"))
    (attempt,) = attempts(shared, "failing")
    assert attempt.ending is Ending.user_code_failed


def test_no_progress_three_times_stops_with_93(shared: Path, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    arguments = ["+cluster=lab", "train=script", f"train.script={script}", "run_id=dies", "wait=true"]
    code, said = clusterrun(shared, *arguments)
    assert code == 93, said
    story = attempts(shared, "dies")
    assert [a.ending for a in story] == [Ending.crashed] * 3
    assert "SIGKILL" in story[-1].message


def test_sbatch_refusal_is_one_clear_line(shared: Path) -> None:
    code, said = clusterrun(shared, "+cluster=lab", "cluster.slurm.partition=nowhere", "run_id=refused")
    assert code == 2
    assert said.count("\n") == 1, said
    assert "invalid partition specified: nowhere" in said
