"""Names of the Python API, finding runs, states from the run directory, logs, clean, code record and snapshot."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import clusterrun
from clusterrun.config.schema import NotifyConfig, RunConfig
from clusterrun.errors import ConfigError, RunError
from clusterrun.launch import code, notify
from clusterrun.launch.jobs import Job
from clusterrun.ledger import Ending, Ledger
from clusterrun.operate import logs
from clusterrun.operate.find import find_one, find_runs
from clusterrun.operate.status import RunState, status_of
from clusterrun.rundir import RunDir, SweepDir
from conftest import Ended

API = {"compose": "(overrides", "plan": "(config", "submit": "(config"}
RUN = {"find", "all", "id", "directory", "config", "attempts", "status", "events", "errors", "wait", "cancel"}
RUN |= {"requeue", "resume"}


def test_the_python_api_keeps_its_names_and_is_lazy() -> None:
    for name, signature in API.items():
        function = getattr(clusterrun, name)
        assert str(inspect.signature(function)).startswith(signature)
        assert function.__doc__
    assert set(dir(clusterrun.Run)) >= RUN
    assert all(getattr(clusterrun.Run, name).__doc__ for name in RUN - {"id"})
    script = "import sys, clusterrun; print({'torch', 'hydra', 'submitit', 'rich'} & set(sys.modules))"
    script += "; from clusterrun import compose, plan, submit, Run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["set()", "False"]


def make_run(parent: Path, name: str, submitted: float = 0.0, **end: Any) -> RunDir:
    run = RunDir.create_in(parent, name)
    run.config.write_text("name: x\n")
    Job("local", "1", str(run.root), name, str(parent), submitted).write(run)
    if end:
        ledger = Ledger(run.ledger)
        number = ledger.start(reason="first start", job_id="1", saved_before=None)
        ledger.chose(number, ["n0", "n1"])
        ledger.end(number, end.pop("ending"), saved_after=7, **end)
    return run


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    sweep = SweepDir.of(tmp_path, "lr-sweep")
    sweep.make()
    sweep.sweep.write_text("points: []\n")
    make_run(tmp_path / "runs", "alpha-1", 10.0, ending=Ending.done, exit_code=0)
    make_run(tmp_path / "runs", "alpha-2", 30.0, ending=Ending.user_code_failed, exit_code=1, message="rank 1: E: x")
    make_run(sweep.root, "p-1", 20.0, ending=Ending.cancelled, exit_code=130)
    make_run(sweep.root, "p-2", 20.0)
    return tmp_path


def test_names(shared: Path) -> None:
    assert find_one("last", shared).name == "alpha-2"
    assert find_one("alpha-1", shared).name == "alpha-1"
    assert find_one("p-1", shared).name == "lr-sweep/p-1"
    assert [f.name for f in find_runs(["lr", "alpha-1", "lr-sweep"], shared)] == [
        "lr-sweep/p-1",
        "lr-sweep/p-2",
        "alpha-1",
    ]
    assert find_one(str(shared / "runs" / "alpha-2"), shared).run.id == "alpha-2"
    for wrong in ("alpha", "nothing", "lr-sweep"):
        with pytest.raises(RunError):
            find_one(wrong, shared)


def test_states_of_ended_runs(shared: Path) -> None:
    rows = {row.id: row for row in status_of(find_runs(["alpha-1", "alpha-2", "lr-sweep"], shared))}
    assert {name: row.state for name, row in rows.items()} == {
        "alpha-1": RunState.done,
        "alpha-2": RunState.failed,
        "p-1": RunState.cancelled,
        "p-2": RunState.failed,  # gone without a word
    }
    assert rows["alpha-2"].why == "a failure of your code: rank 1: E: x"
    assert (rows["alpha-1"].nodes, rows["alpha-1"].saved_step) == (("n0", "n1"), 7)


def test_without_a_scheduler_a_run_is_unknown_and_not_cleaned(
    shared: Path, monkeypatch: pytest.MonkeyPatch, clusterrun_here: Callable[..., Ended]
) -> None:
    run = RunDir(shared / "sweeps" / "lr-sweep" / "p-2")
    replace(Job.of(run), executor="slurm").write(run)
    monkeypatch.setenv("PATH", str(shared / "empty"))
    (row,) = status_of(find_runs(["p-2"], shared))
    assert (row.state, "squeue" in row.why) == (RunState.unknown, True)
    ended = clusterrun_here("clean", "--older-than", "0m", "--yes", "--shared-dir", str(shared))
    assert (ended.code, run.root.exists()) == (0, True)
    assert not (shared / "runs" / "alpha-1").exists()
    assert "removed 3 runs" in ended.stdout
    ended = clusterrun_here("clean", "--older-than", "1d", "--shared-dir", str(shared))
    assert "nothing to remove" in ended.stdout


def test_clean_asks_and_a_pipe_cant_answer(shared: Path, clusterrun_here: Callable[..., Ended]) -> None:
    ended = clusterrun_here("clean", "--older-than", "0m", "--shared-dir", str(shared))
    assert (ended.code, "--yes" in ended.stderr) == (2, True)
    assert (shared / "runs" / "alpha-1").exists()


def test_the_first_error_counts_and_equal_ones_are_one(shared: Path) -> None:
    run = RunDir(shared / "runs" / "alpha-2")
    place = run.attempt(1)
    place.make()
    for rank, (message, when) in enumerate([("C: closed by 10.0.0.1", 9), ("E: x", 5), ("C: closed by 10.0.0.2", 8)]):
        said = {
            "message": {"message": message, "extraInfo": {"py_callstack": f"tb\n{message}", "timestamp": str(when)}}
        }
        place.error_file(f"n{rank // 2}", rank, 0).write_text(json.dumps(said))
    first, second = logs.errors_of(run, logs.pick_attempt(run, None))
    assert (first.message, first.rank, first.node, first.text) == ("E: x", 1, "n0", "tb\nE: x")
    assert (second.rank, sorted(second.ranks)) == (2, [0, 2])


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "requeue", "clean", "clusters", "init"])
def test_every_verb_has_help_with_an_example(verb: str, clusterrun_here: Callable[..., Ended]) -> None:
    ended = clusterrun_here(verb, "--help")
    assert ended.code == 0
    assert "example: clusterrun " in ended.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    for name, text in {"a.py": "one\n", ".gitignore": "ignored\n", "ignored": "secret\n"}.items():
        (root / name).write_text(text)
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, timeout=30)
    (root / "a.py").write_text("two\n")
    (root / "new.py").write_text("new\n")
    monkeypatch.chdir(root)
    return root


def test_commit_and_diff_are_recorded_and_a_snapshot_is_what_trains(repository: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    config = RunConfig(snapshot=True)
    config.train.script = str(repository / "a.py")
    code.record(config, run.code)
    about = json.loads(run.code.about.read_text())
    assert len(about["commit"]) == 40
    assert about["untracked"] == ["new.py"]
    assert "+two" in run.code.diff.read_text()
    code.check_snapshot(config)
    with code.inside(run.code):
        assert Path.cwd() == run.code.tree
        assert code.from_copy(config, run.code).train.script == str(run.code.tree / "a.py")
        assert str(run.code.tree) in os.environ["PYTHONPATH"]
    assert Path.cwd() == repository
    (repository / "a.py").write_text("three\n")
    assert sorted(path.name for path in run.code.tree.iterdir()) == [".gitignore", "a.py", "new.py"]
    assert (run.code.tree / "a.py").read_text() == "two\n"
    (repository / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(ConfigError, match=r"big \(2 MiB\)"):
        code.check_snapshot(replace(config, snapshot_limit_mb=1))


def test_a_web_hook_that_hangs_or_fails_holds_nothing_up_and_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{silent.getsockname()[1]}/secret")
        said: list[str] = []
        message = notify.Message("done", "r", "r: done", "1", 1, "done", 0, 7)
        begin = time.monotonic()
        assert not notify.send(NotifyConfig("HOOK", timeout_s=0.3), message, said.append)
        assert time.monotonic() - begin < 2
    monkeypatch.setenv("HOOK", "file:///etc/secret")
    assert not notify.send(NotifyConfig("HOOK"), message, said.append)
    with pytest.raises(ConfigError, match="no http") as error:
        notify.check(NotifyConfig("HOOK"))
    assert "secret" not in "".join([*said, str(error.value)])
    assert "web hook of HOOK was not told" in said[0]
