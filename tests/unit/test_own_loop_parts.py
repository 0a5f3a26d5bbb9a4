"""The helpers for users' own scripts, in small: lazy import, stop requests, what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import clusterrun
from clusterrun.errors import CheckpointError, ConfigError
from clusterrun.train import stopping
from clusterrun.train.manager import CheckpointManager


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CLUSTERRUN_")}
    return subprocess.run([sys.executable, "-c", code], env={**env, **variables}, capture_output=True, text=True)


def test_neither_the_package_nor_stop_requested_imports_torch() -> None:
    done = python("import sys, clusterrun; clusterrun.stop_requested(); print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Checkpointmanager'"):
        _ = clusterrun.Checkpointmanager  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR2"])
def test_a_signal_is_a_request(number: str) -> None:
    code = f"""
import os, signal, clusterrun
print(clusterrun.stop_requested())
os.kill(os.getpid(), signal.{number})
os.kill(os.getpid(), signal.SIGTERM)
print(clusterrun.stop_requested())
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "False\nTrue\n"), done.stderr


def test_a_file_is_one_too(tmp_path: Path) -> None:
    code = """
import clusterrun, os
print(clusterrun.stop_requested())
open(os.environ["CLUSTERRUN_STOP_FILE"], "w").close()
print(clusterrun.stop_requested())
"""
    done = python(code, CLUSTERRUN_STOP_FILE=str(tmp_path / "stop"))
    assert (done.returncode, done.stdout) == (0, "False\nTrue\n"), done.stderr


def test_the_first_call_in_a_thread_is_an_error_not_a_silence() -> None:
    done = python("import threading, clusterrun\nthreading.Thread(target=clusterrun.stop_requested).start()")
    assert "to be called first in the main thread" in done.stderr


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, outside a run; the signal handlers are put back."""
    for name in [n for n in os.environ if n.startswith("CLUSTERRUN_")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in stopping.STOP_SIGNALS}
    stopping.script_flag.cache_clear()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    stopping.script_flag.cache_clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def manager(directory: Path | None, model: nn.Module | None = None, **more: Any) -> CheckpointManager:
    model = model or nn.Linear(3, 2)
    return CheckpointManager(model, torch.optim.AdamW(model.parameters()), directory=directory, **more)


def test_what_is_refused(tmp_path: Path, alone: None) -> None:
    with pytest.raises(ConfigError, match="outside a run of clusterrun, say where: directory="):
        manager(None)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'every_step'"):
        manager(tmp_path / "c", every_step=3)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=1: keep at least 2"):
        manager(tmp_path / "c", keep=1)
    assert not (tmp_path / "c").exists()
    dist.destroy_process_group()
    try:
        with pytest.raises(ConfigError, match="init_process_group"):
            manager(tmp_path / "c")
    finally:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=0, world_size=1)


def test_a_checkpoint_of_something_else(tmp_path: Path, alone: None) -> None:
    first = manager(tmp_path / "c")
    first.finish(5)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        manager(tmp_path / "c", nn.Linear(4, 2)).resume()
    other = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(CheckpointError, match=r"Missing key.*extra/schedule"):
        CheckpointManager(other, optimizer, directory=tmp_path / "c", extra={"schedule": schedule}).resume()
    assert manager(tmp_path / "c").resume() == 5


def test_told_to_stop_but_not_able_to_save(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not claim that it saved: the run would count it as progress, and lose the steps in silence."""
    stopped = tmp_path / "stopped"
    monkeypatch.setenv("CLUSTERRUN_STOPPED_FILE", str(stopped))
    loop = manager(tmp_path / "c", every_steps=1)
    assert not loop.step(1)
    (tmp_path / "c").rename(tmp_path / "gone")
    (tmp_path / "c").write_text("in the way")
    stopping.script_flag().received = signal.SIGTERM
    with pytest.raises(CheckpointError, match=r"told to stop, but step 2 could not be saved; .* is of step 1"):
        loop.step(2)
    assert not stopped.exists()


def test_the_best_by_evaluation(tmp_path: Path, alone: None) -> None:
    loop = manager(tmp_path / "c", every_steps=None, keep_best=1)
    for step, loss in enumerate((3.0, 2.0, 4.0, 5.0), start=1):
        loop.evaluated(step, loss)
    assert [info.step for info in loop._saver.checkpointer.store.list()] == [2, 1]
