"""Built-in tasks: their arguments, and that each learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterrun.config.schema import DataConfig, Optimizer, TrainConfig
from clusterrun.errors import ConfigError
from clusterrun.train.builtin import BUILTINS, TOKENS, check_task_args
from clusterrun.train.data import load_data
from clusterrun.train.optim import make_optimizer
from clusterrun.train.task import load_task


@pytest.mark.parametrize(
    ("task", "args", "says"),
    [
        ("liner", {}, "train.task=liner: no such task. Did you mean 'linear'"),
        ("mlp", {"hiden": 3}, "task 'mlp' has no such argument. Did you mean 'hidden'"),
        ("linear", {"x": 1}, "Allowed: none"),
        ("mlp", {"depth": 0}, r"depth=0: task 'mlp' wants a whole number of at least 1"),
        ("mlp", {"depth": "2"}, "depth='2'"),
        ("mlp", {"depth": True}, "depth=True"),
        ("mlp", {"dropout": 1.0}, "dropout=1.0"),
        ("gpt", {"width": 130}, "width=130: not divisible by train.task_args.heads=4"),
    ],
)
def test_wrong_arguments_are_named(task: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_task_args(task, args)


def test_defaults_are_filled_in() -> None:
    assert check_task_args("mlp", {"hidden": 8}) == {"hidden": 8, "depth": 2, "dropout": 0.0}
    assert check_task_args("my.module:Task", {"anything": [1]}) == {"anything": [1]}


def test_the_description_fits_the_tasks() -> None:
    for name, builtin in BUILTINS.items():
        assert (load_task(name, {}).context > 0) == (builtin.takes == TOKENS)


@pytest.mark.parametrize(("name", "steps", "better_than"), [("linear", 150, 0.9), ("mlp", 150, 0.9), ("gpt", 150, 3.0)])
def test_each_learns(name: str, steps: int, better_than: float) -> None:
    small = {"layers": 1, "width": 64, "context": 32} if name == "gpt" else {}
    task = load_task(name, small)
    data = load_data(DataConfig(samples=2048), 0, task.context, torch.device("cpu"))
    torch.manual_seed(0)
    model = task.build_model(data.spec)
    train = TrainConfig(optimizer=Optimizer.adamw, lr=1e-2) if name == "gpt" else TrainConfig(lr=0.1)
    optimizer = make_optimizer(model, train)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, data.train.batch(torch.randint(0, len(data.train), (64,)))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = task.evaluate(model, data.valid.batch(torch.arange(len(data.valid))))
    value = float(found.metric) / found.of
    assert value < better_than if name == "gpt" else value > better_than


USER_TASK = """
from clusterrun.train.tasks import Linear
class Mine(Linear):
    def __init__(self, size=1): self.size = size
class NotOne: pass
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mytasks_for_test.py").write_text(USER_TASK)
    (tmp_path / "broken_for_test.py").write_text("import surely_not_there_42")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "mytasks_for_test"


def test_a_users_task(user_module: str) -> None:
    task = load_task(f"{user_module}:Mine", {"size": 3})
    assert task.size == 3  # type: ignore[attr-defined]
    assert task.metric == "accuracy"


def test_a_users_task_that_is_not_there(user_module: str) -> None:
    with pytest.raises(ConfigError, match="Missing is not in mytasks_for_test"):
        load_task(f"{user_module}:Missing", {})
    with pytest.raises(ConfigError, match="NotOne has no method build_model"):
        load_task(f"{user_module}:NotOne", {})
    with pytest.raises(ConfigError, match="no module named 'surely_not_there_41'"):
        load_task("surely_not_there_41:Task", {})


def test_what_a_users_module_lacks_is_the_users_error(user_module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="surely_not_there_42"):
        load_task("broken_for_test:Task", {})


def test_the_description_imports_no_torch() -> None:
    modules = "clusterrun.train.builtin, clusterrun.train.sampler, clusterrun.train.arrays, clusterrun.train.events"
    modules += ", clusterrun.train.stopping, clusterrun.checkpoint.store"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
