"""The worker as a process: started, stopped, broken and resumed. Started without torchrun, which sets variables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.store import Store
from clusterrun.config import frozen
from clusterrun.config.schema import CheckpointConfig, ClusterConfig, DataConfig, DataKind, RunConfig, TrainConfig
from clusterrun.rundir import RunDir, read_json_lines

TASK = '''
import time
import torch
from clusterrun.train.tasks import Mlp

class Task(Mlp):
    """An MLP with dropout that can be slow, or fail."""

    def __init__(self, step_s=0.0, validation_s=0.0, fail_at=None):
        super().__init__(hidden=32, depth=2, dropout=0.2)
        self.step_s, self.validation_s, self.fail_at, self.calls = step_s, validation_s, fail_at, 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.fail_at and torch.distributed.get_rank() == 1:
            raise ValueError("two lines\\nof trouble")
        time.sleep(self.step_s)
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        time.sleep(self.validation_s)
        return super().evaluate(model, batch)
'''


class Run:
    """A run directory, and the workers of its attempts."""

    def __init__(self, directory: Path, **task_args: Any) -> None:
        (directory / "worker_test_task.py").write_text(TASK)
        self.directory = directory
        self.config = RunConfig(
            cluster=ClusterConfig(nproc_per_node=2),
            train=TrainConfig(
                task="worker_test_task:Task", task_args=task_args, batch_per_rank=8, momentum=0.9, log_every_steps=5
            ),
            data=DataConfig(samples=640),
            checkpoint=CheckpointConfig(every_steps=None),
        )
        self.run = RunDir.create(directory, "r")
        self.stopped_file = directory / "stopped"
        self.workers: list[subprocess.Popen[str]] = []
        self.under: dict[int, list[str]] = {}  # rank -> a command to run its worker under

    def start(self, attempt: int, world_size: int = 2) -> None:
        self.run.config.write_text(frozen.to_yaml(self.config))
        self.run.attempt(attempt).make()
        self.stopped_file.unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(world_size):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(self.directory), *sys.path]),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "CLUSTERRUN_NODE": "node",
                "CLUSTERRUN_STOPPED_FILE": str(self.stopped_file),
                "TORCHELASTIC_ERROR_FILE": str(self.directory / f"error.{rank}.json"),
            }
            command = [*self.under.get(rank, []), sys.executable, "-m", "clusterrun.train.worker"]
            arguments = ["--run-dir", str(self.run.root), "--attempt", str(attempt)]
            self.workers.append(
                subprocess.Popen(
                    [*command, *arguments],
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, standard output and error of each worker."""
        ended = []
        for worker in self.workers:
            out, err = worker.communicate(timeout=120)
            ended.append((worker.returncode, out, err))
        self.workers.clear()
        return ended

    def train(self, attempt: int, world_size: int = 2) -> None:
        self.start(attempt, world_size)
        for code, _, err in self.end():
            assert code == 0, err

    def events(self, attempt: int, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        file = self.run.attempt(attempt).event_file("node", rank)
        return [event for event in read_json_lines(file) if event["kind"] == kind]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert all(worker.poll() is None for worker in self.workers), self.end()
            assert time.monotonic() < end
            time.sleep(0.05)

    def tensors(self) -> dict[str, Any]:
        """Everything in the newest checkpoint."""
        newest = Store(self.run.checkpoints).list()[0]
        tensors: dict[str, Any] = {k: torch.empty(s, dtype=d) for k, (s, d) in dcp.layout(newest.path).items()}
        dcp.read(tensors, newest.path)
        return {"step": torch.tensor(newest.step), **tensors}


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(name: str = "one", **task_args: Any) -> Run:
        (tmp_path / name).mkdir()
        made.append(Run(tmp_path / name, **task_args))
        return made[-1]

    yield make
    for run in made:
        for worker in run.workers:
            worker.kill()
            worker.communicate()


def test_stopped_by_signals_and_resumed_the_bits_are_those_of_an_undisturbed_run(make_run: Callable[..., Run]) -> None:
    undisturbed, run = make_run("undisturbed"), make_run("stopped", step_s=0.05)
    undisturbed.train(0)
    for attempt, (rank, number) in enumerate([(0, signal.SIGTERM), (1, signal.SIGUSR2)]):
        run.start(attempt)
        run.wait_for(partial(run.events, attempt, "step"))
        for _ in range(3):  # as Slurm does when it preempts
            run.workers[rank].send_signal(number)
            time.sleep(0.01)
        for code, _, err in run.end():
            assert code == 0, err
        assert run.stopped_file.exists()
        for of_rank in (0, 1):
            (stopped,) = run.events(attempt, "stopped", of_rank)
            assert stopped["signal"] == number.name
            assert stopped["step"] == Store(run.run.checkpoints).latest_step()
        (saved,) = run.events(attempt, "checkpoint")
        assert (saved["ok"], saved["reason"]) == (True, "stop")
    run.train(2)
    assert not run.stopped_file.exists()
    (start,) = run.events(2, "start")
    assert start["resumed_from"] == run.events(1, "stopped")[0]["step"]
    one, other = undisturbed.tensors(), run.tensors()
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    logged = {e["step"]: (e["loss"], e["lr"]) for attempt in range(3) for e in run.events(attempt, "step")}
    assert logged == {e["step"]: (e["loss"], e["lr"]) for e in undisturbed.events(0, "step")}
    done = [(r.events(a, "done")[0]["loss"], r.events(a, "done")[0]["value"]) for r, a in ((undisturbed, 0), (run, 2))]
    assert done[0] == done[1]


def test_events_of_an_undisturbed_run(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.config.checkpoint.every_steps = 15
    run.train(0)
    (start,) = run.events(0, "start")
    expected: dict[str, Any] = {
        "total_steps": 40,
        "world_size": 2,
        "global_batch": 16,
        "batch_per_rank": 8,
        "micro_batch": 8,
    }
    expected |= {"train_samples": 640, "valid_samples": 160, "resumed_from": None, "backend": "gloo", "device": "cpu"}
    assert {key: start[key] for key in expected} == expected
    for rank in (0, 1):
        steps = run.events(0, "step", rank)
        assert [event["step"] for event in steps] == [1, 5, 10, 15, 20, 25, 30, 35, 40]
        assert all(event["step_time_s"] > 0 and event["data_time_s"] >= 0 for event in steps)
        assert any(event["comm_time_s"] for event in steps)
        assert all(event["comm_time_s"] is None or event["comm_time_s"] > 0 for event in steps)
        (done,) = run.events(0, "done", rank)
        assert (done["step"], done["metric"], done["saved_step"]) == (40, "accuracy", 40)
    assert [event["loss"] for event in run.events(0, "step", 0)] == [
        event["loss"] for event in run.events(0, "step", 1)
    ]
    saves = [(event["step"], event["reason"], event["ok"]) for event in run.events(0, "checkpoint")]
    assert saves == [(15, "every_steps", True), (30, "every_steps", True), (40, "end", True)]
    assert [event["step"] for event in run.events(0, "eval")] == [40]
    assert len(run.events(0, "ready")) == 1
    for kind in ("ready", "eval", "checkpoint", "warning"):
        assert run.events(0, kind, 1) == []
    run.train(1)  # there is nothing left to do
    assert [event["step"] for event in run.events(1, "eval")] == [40]
    assert run.events(1, "step") == []
    assert len(run.events(1, "done")) == 1


def test_a_signal_while_torch_is_imported_is_not_lost(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.start(0)
    for worker in run.workers:
        wait_for_handler(worker.pid)
    run.workers[1].send_signal(signal.SIGTERM)
    for code, _, err in run.end():
        assert code == 0, err
    assert run.stopped_file.exists()
    assert run.events(0, "stopped")[0]["step"] == 0
    assert Store(run.run.checkpoints).list() == []  # nothing was done, so a fresh start loses nothing


def wait_for_handler(pid: int) -> None:
    """Until the process handles SIGTERM."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("no handler for SIGTERM")


def test_stopping_during_validation(make_run: Callable[..., Run]) -> None:
    """It is given up, the step is saved, and the resumed run validates again."""
    run = make_run(validation_s=0.2)
    run.config.train.validate_every_steps = 20
    run.start(0)
    run.wait_for(lambda: any(event["step"] == 20 for event in run.events(0, "step")))
    time.sleep(0.3)
    run.workers[0].send_signal(signal.SIGTERM)
    for code, _, err in run.end():
        assert code == 0, err
    assert run.events(0, "eval") == []
    assert run.events(0, "stopped")[0]["step"] == 20
    run.config.train.task_args = {}
    run.train(1)
    assert [event["step"] for event in run.events(1, "eval")] == [20, 40]


def test_the_tasks_error(make_run: Callable[..., Run]) -> None:
    run = make_run(fail_at=7)
    run.start(0)
    _, (code, _, err) = run.end()
    assert code == 1
    assert "Traceback" in err
    assert "ValueError: two lines" in err
    (error,) = run.events(0, "error", 1)
    assert (error["type"], error["message"]) == ("ValueError", "two lines\nof trouble")
    told = json.loads((run.directory / "error.1.json").read_text())
    assert told["message"]["message"] == "ValueError: two lines\nof trouble"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": DataKind.text, "path": "/nowhere"}, "data.kind=text: gives tokens, but the task takes vectors"),
        ({"samples": 7}, "the training data has 7 samples, fewer than one global batch of 8"),
    ],
)
def test_known_errors_are_one_line(make_run: Callable[..., Run], change: dict[str, Any], says: str) -> None:
    run = make_run()
    for name, value in change.items():
        setattr(run.config.data, name, value)
    run.start(0, world_size=1)
    ((code, out, err),) = run.end()
    assert code == 2
    assert err.startswith(f"error: {says}")
    assert len(err.splitlines()) == 1
    assert out == ""
    assert run.events(0, "error")[0]["type"] == "ConfigError"


def test_another_world_size_and_a_damaged_checkpoint(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.config.checkpoint.every_steps = 10
    run.config.train.max_steps = 20
    run.train(0)
    assert [info.step for info in Store(run.run.checkpoints).list()] == [20, 10]
    (run.run.checkpoints / "step-00000020" / "__0_0.distcp").write_bytes(b"")
    run.config.train.max_steps = None
    run.train(1, world_size=1)
    (start,) = run.events(1, "start")
    # 10 steps of 16 are done; 480 samples of the epoch are left, which one rank takes in batches of 8
    assert (start["resumed_from"], start["total_steps"]) == (10, 10 + 60)
    damaged, reseeded = (event["message"] for event in run.events(1, "warning"))
    assert "set aside as .bad-step-00000020-" in damaged
    assert "was written by 2 ranks, now there are 1" in reseeded


def test_no_valid_checkpoint_ends_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.train(0)
    shutil.copy("/dev/null", next(run.run.checkpoints.glob("step-*")) / "MANIFEST.json")
    run.start(1)
    for code, _, err in run.end():
        assert code == 1
        assert err.splitlines()[-1].startswith("error: ")
        assert "none is valid" in err
    assert run.events(1, "start") == []


def test_saving_by_time_and_by_score_in_the_background(make_run: Callable[..., Run]) -> None:
    run = make_run(step_s=0.04)
    run.config.train.validate_every_steps = 8
    run.config.checkpoint = CheckpointConfig(every_steps=None, every_minutes=0.005, async_save=True, keep_best=1)
    run.train(0)
    saves = run.events(0, "checkpoint")
    assert {"time", "end"} <= {event["reason"] for event in saves} <= {"time", "best", "end"}
    assert all(event["ok"] and event["stall_s"] <= event["seconds"] for event in saves)
    evals = {event["step"]: event["loss"] for event in run.events(0, "eval") if event["step"] < 40}
    store = Store(run.run.checkpoints)
    assert {step: score.loss for step, score in store.scores(pytest.fail).items() if step < 40} == evals
    kept = [info.step for info in store.list()]
    assert kept[0] == 40
    assert store.latest_step() == 40
    assert all(store.verify(info) == [] for info in store.list())
    best = min(store.scores(pytest.fail).items(), key=lambda item: item[1].loss)[0]
    assert best in kept


def test_a_signal_while_a_save_is_being_written(make_run: Callable[..., Run]) -> None:
    """One rank's disk takes 3 s for an fsync. Both states are saved: the one in flight and that of the stop."""
    run = make_run(step_s=0.05)
    run.config.checkpoint.every_steps = 20
    run.config.checkpoint.async_save = True
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null"]
    run.under[1] = [*strace, "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=3000000"]
    run.start(0)
    run.wait_for(lambda: any(event["step"] >= 25 for event in run.events(0, "step")))
    assert run.events(0, "checkpoint") == []
    run.workers[0].send_signal(signal.SIGTERM)
    for code, _, err in run.end():
        assert code == 0, err
    in_flight, stop = run.events(0, "checkpoint")
    assert [(event["step"], event["ok"], event["reason"]) for event in (in_flight, stop)] == [
        (20, True, "every_steps"),
        (run.events(0, "stopped")[0]["step"], True, "stop"),
    ]
    store = Store(run.run.checkpoints)
    assert [(info.step, store.verify(info)) for info in store.list()] == [(stop["step"], []), (20, [])]


@pytest.mark.parametrize(("error", "says"), [("EIO", "Input/output error"), ("EDQUOT", "Disk quota exceeded")])
def test_a_failing_disk_costs_saves_but_not_the_last_one(make_run: Callable[..., Run], error: str, says: str) -> None:
    """The kernel's own answer to every fsync on one rank; NFS tells of a quota just so."""
    run = make_run()
    run.config.checkpoint.every_steps = 5
    run.config.checkpoint.async_save = error == "EIO"
    run.config.train.max_steps = 10
    run.train(0)
    run.config.train.max_steps = None
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null"]
    run.under[1] = [*strace, "-e", "trace=fsync", "-e", f"inject=fsync:error={error}"]
    run.config.checkpoint.timeout_s = 3
    run.start(1)
    for code, _, err in run.end():
        assert code == 1
        assert "training has ended, but step 40 could not be saved" in err
    saves = [(event["step"], event["ok"]) for event in run.events(1, "checkpoint")]
    assert len(saves) > 3
    assert not any(ok for _, ok in saves)
    assert all(says in event["message"] and "rank 1: " in event["message"] for event in run.events(1, "warning"))
    assert (max(event["step"] for event in run.events(1, "step")), run.events(1, "done")) == (40, [])
    store = Store(run.run.checkpoints)
    assert [(info.step, store.verify(info)) for info in store.list()] == [(10, []), (5, [])]
    assert not list(run.run.checkpoints.glob(".*"))


def test_too_many_failed_saves_end_the_run_if_so_told(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.config.checkpoint.every_steps = 5
    run.config.checkpoint.max_failed_saves = 2
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null"]
    run.under[1] = [*strace, "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=2+"]
    run.start(0)
    for code, _, err in run.end():
        assert code == 1
        assert "error: 2 saves in a row failed (checkpoint.max_failed_saves=2), the last at step 15: rank 1: " in err
        assert "the newest checkpoint is of step 5" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_costs_saves_but_not_the_last_one(make_run: Callable[..., Run], async_save: bool) -> None:
    run = make_run()
    run.config.checkpoint.async_save = async_save
    run.config.checkpoint.every_steps = 5
    run.config.checkpoint.keep = 2
    run.config.checkpoint.timeout_s = 3
    run.run.config.write_text("")
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1100k,mode=700", "none", run.run.checkpoints],
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no mount here: {error.stderr}")
    try:
        (run.run.checkpoints / "others").write_bytes(bytes(500_000))
        run.start(0)
        for code, _, err in run.end():
            assert code == 1
            assert "training has ended, but step 40 could not be saved" in err
        saves = [(event["step"], event["ok"]) for event in run.events(0, "checkpoint")]
        assert (5, True) in saves
        assert saves[-3:] == [(40, False)] * 3
        assert "No space left on device" in run.events(0, "warning")[0]["message"]
        store = Store(run.run.checkpoints)
        assert store.latest_step() == max(step for step, ok in saves if ok)
        assert run.events(0, "done") == []
        assert all(store.verify(info) == [] for info in store.list())
        assert not list(run.run.checkpoints.glob(".*"))
    finally:
        subprocess.run(["umount", run.run.checkpoints], check=True)


def test_tensorboard(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.config.train.tensorboard = True
    run.config.train.max_steps = 10
    run.train(0, world_size=1)
    assert [file.stat().st_size > 500 for file in run.run.tensorboard.iterdir()] == [True]
