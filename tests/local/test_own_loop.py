"""A user's own script with ``clusterrun.CheckpointManager``: in a run, under plain torchrun, stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.checkpoint.store import Store
from clusterrun.ledger import Ending
from support import TESTS, attempts, clusterrun, environment, events, run_dir, wait_for

SCRIPT = TESTS / "own_loop.py"
STEPS = 60


def torchrun(directory: Path, answer: Path, delay: float) -> subprocess.Popen[str]:
    """The script under plain torchrun, outside of clusterrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(SCRIPT), str(STEPS), str(delay), str(answer), str(directory)]
    env = {**environment(directory.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, *arguments], env=env, text=True, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights, the learning rate and the next random number at the end of a run that nobody stopped."""
    place = tmp_path_factory.mktemp("undisturbed")
    process = torchrun(place / "kept", place / "answer", 0)
    process.communicate(timeout=120)
    assert process.returncode == 0
    return (place / "answer").read_text()


def test_in_a_run_stopped_and_resumed(tmp_path: Path, undisturbed: str) -> None:
    arguments = ["train=script", f"train.script={SCRIPT}", f"train.args=[{STEPS},0.1,{tmp_path / 'answer'}]"]
    size = ["cluster.nodes=1", "cluster.nproc_per_node=2"]
    saving = ["checkpoint=async", "checkpoint.every_steps=10"]
    code, said = clusterrun(tmp_path, *arguments, *size, *saving, "run_id=stopped", "wait=false")
    assert code == 0, said
    run = run_dir(tmp_path, "stopped")
    store = Store(run.checkpoints)
    wait_for("a checkpoint", lambda: (store.latest_step() or 0) >= 10)
    os.kill(int(json.loads(run.job.read_text())["job_id"]), signal.SIGTERM)
    wait_for("the end", lambda: bool(attempts(tmp_path, "stopped")[-1].exit_code))
    first = attempts(tmp_path, "stopped")[-1]
    assert first.ending is Ending.cancelled
    assert "state saved" in first.message
    assert first.saved_after == store.latest_step()
    assert first.saved_after is not None
    assert 10 <= first.saved_after < STEPS
    reasons = [event["reason"] for event in events(tmp_path, "stopped", "checkpoint")]
    assert reasons[0] == "every_steps"
    assert reasons[-1] == "stop"
    code, said = clusterrun(tmp_path, "resume", "stopped")
    assert code == 0, said
    assert f"newest checkpoint: step {STEPS}" in said
    assert (tmp_path / "answer").read_text() == undisturbed
    code, said = clusterrun(tmp_path, "checkpoints", "stopped", "--verify")
    assert code == 0, said
    logs = "".join(log.read_text() for log in run.attempts.rglob("*.0.out"))
    names = ("ATTEMPT", "GRACE_S", "NODE", "RUN_DIR", "STOPPED_FILE", "STOP_FILE")
    assert all(f"'CLUSTERRUN_{name}'" in logs for name in names)
    assert " grace 90\n" in logs
    assert logs.count("did step") == STEPS  # none was done twice, none left out


def test_under_plain_torchrun(tmp_path: Path, undisturbed: str) -> None:
    """Outside a run: a directory of the user's; a signal to one worker stops all ranks."""
    first = torchrun(tmp_path / "kept", tmp_path / "answer", 0.1)
    assert first.stdout is not None
    while "did step 15" not in first.stdout.readline():
        assert first.poll() is None
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGUSR2)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    assert "stopped by SIGUSR2 after step" in said
    saved = Store(tmp_path / "kept").latest_step()
    assert saved is not None
    assert saved > 15
    assert not (tmp_path / "answer").exists()
    second = torchrun(tmp_path / "kept", tmp_path / "answer", 0)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert f"resumed from step {saved}: " in said
    assert f"did step {saved}\n" in said
    assert f"did step {saved - 1}\n" not in said
    assert Store(tmp_path / "kept").latest_step() == STEPS
    assert (tmp_path / "answer").read_text() == undisturbed
