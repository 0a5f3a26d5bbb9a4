"""Living with runs on the real Slurm: status, logs, cancel, requeue, after=, refusals, and a web hook that listens."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun.ledger import Ending
from support import TESTS, attempts, clusterrun, environment, run_dir, step_reached, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]

SMALL = ["+cluster=lab", "cluster.nodes=2", "cluster.nproc_per_node=1", "train=ddp_linear"]
SLOW = ["train.task=slow_task:SlowLinear", "train.epochs=40", "train.task_args.delay_s=0.05"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def status(shared: Path, *names: str) -> list[dict[str, Any]]:
    code, said = clusterrun(shared, "status", *names, "--json")
    assert code == 0, said
    found: list[dict[str, Any]] = json.loads(said)
    return found


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web hook on the bridge, where the lab's hosts reach it: its URL and what was posted."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("10.77.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://10.77.0.1:{server.server_port}/secret-token", posted
    server.shutdown()


@pytest.mark.timeout(300)
def test_a_day_with_a_run(shared: Path, hook: tuple[str, list[dict[str, Any]]]) -> None:
    """Running, requeued by a person, running again, followed by a run that waits for it, cancelled."""
    url, posted = hook
    env = {**environment(shared), "TEST_HOOK": url}
    arguments = [*SMALL, *SLOW, "notify.webhook_env=TEST_HOOK", "run_id=day"]
    done = subprocess.run(
        [sys.executable, "-m", "clusterrun", *arguments],
        env=env,
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    code, said = clusterrun(shared, *SMALL, "after=day", "run_id=next")
    assert code == 0, said
    assert "--dependency=afterok:" in run_dir(shared, "next").submission.read_text()
    wait_for("some steps", lambda: step_reached(shared, "day") >= 20)

    running, waits = status(shared, "day", "next")
    assert (running["state"], len(running["nodes"])) in (("running", 2), ("saving", 2))
    assert running["step"] >= 20
    assert running["samples_per_s"] > 0
    assert running["eta_s"] > 0
    assert 0 <= running["goodput_percent"] <= 100
    assert (waits["state"], waits["why"]) == ("pending", "it waits for another job to end")
    code, said = clusterrun(shared, "status")
    assert code == 0
    assert "\x1b" not in said
    assert "it waits for another job to end" in said

    code, said = clusterrun(shared, "requeue", "day")
    assert code == 0, said
    wait_for("the end of the first attempt", lambda: attempts(shared, "day")[0].ended is not None)
    first = attempts(shared, "day")[0]
    assert (first.ending, first.exit_code) == (Ending.stopped, None)
    assert first.saved_after is not None
    (again,) = status(shared, "day")
    assert again["state"] in ("requeued", "running", "saving")
    assert "a stop" in again["why"] or again["state"] != "requeued"
    wait_for("the second attempt", lambda: len(attempts(shared, "day")) == 2, 90)

    wait_for("its steps", lambda: step_reached(shared, "day") > (first.saved_after or 0) + 5)
    code, said = clusterrun(shared, "clean", "--older-than", "0m", "--yes")
    assert run_dir(shared, "day").config.exists(), said
    code, said = clusterrun(shared, "cancel", "next", "day")
    assert code == 0, said
    assert "next: cancelled while it waited" in said
    wait_for("the cancel", lambda: {row["state"] for row in status(shared, "day", "next")} == {"cancelled"})
    code, said = clusterrun(shared, "cancel", "day")
    assert code == 2
    assert "cancelled already" in said

    wait_for("the hook", lambda: len(posted) >= 2, 20)
    assert [message["event"] for message in posted] == ["requeued", "cancelled"]
    assert posted[0]["saved_step"] == first.saved_after
    secret = url.rpartition("/")[2]
    for path in run_dir(shared, "day").root.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_failed_run_says_its_first_error_once(shared: Path) -> None:
    failing = ["train.task=slow_task:SlowLinear", "train.task_args.fail_at=7", "run_id=bad", "wait=true"]
    code, said = clusterrun(shared, *SMALL, "cluster.nproc_per_node=2", *failing)
    assert code == 1, said
    (row,) = status(shared, "last")
    assert (row["id"], row["state"], row["exit_code"]) == ("bad", "failed", 1)
    assert "ValueError" in row["why"]
    code, said = clusterrun(shared, "logs", "bad")
    assert code == 0
    assert said.count("ValueError: the test task was told to fail here") == 2, said  # the headline and its traceback
    assert "the same on 3 more: rank" in said
    code, said = clusterrun(shared, "logs", "bad", "--rank", "3")
    assert "Traceback" in said
    code, said = clusterrun(shared, "logs", "bad", "--rank", "9")
    assert (code, said.count("\n")) == (2, 1)
    code, said = clusterrun(shared, *SMALL, "after=bad")
    assert code == 2
    assert "ended without being done" in said


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("cluster.slurm.partition=nowhere", "Partitions here: main (default, 4 nodes, gpu:a100:8 on 4 nodes"),
        ("cluster.slurm.constraint=foo", "Partition main offers no features"),
        ("cluster.slurm.mem=999G", "4 nodes with 16 CPUs, 16000 MB"),
    ],
)
def test_a_refusal_says_what_this_site_offers(shared: Path, argument: str, words: str) -> None:
    code, said = clusterrun(shared, *SMALL, argument, "run_id=refused")
    assert (code, said.count("\n")) == (2, 1), said
    assert words in said
    assert not (shared / "runs" / "refused").exists()


def test_init_writes_a_cluster_that_plans(shared: Path, tmp_path: Path) -> None:
    env = {**environment(Path("/not-made/shared")), "PYTHONPATH": str(TESTS)}
    for arguments in (["init", "mine"], ["plan", "cluster=mine"]):
        argv = [sys.executable, "-m", "clusterrun", *arguments]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "8 GPUs" in done.stdout
    assert "#SBATCH --gpus-per-node=a100:8" in done.stdout
    assert 'partition: "main" # the default' in (tmp_path / "conf" / "cluster" / "mine.yaml").read_text()
