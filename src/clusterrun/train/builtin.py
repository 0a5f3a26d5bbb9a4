"""The built-in tasks as data, without torch: configuration is validated against this before anything is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.errors import ConfigError, choices, nearest

VECTORS = "vectors"
TOKENS = "tokens"
FEATURES, CLASSES = 784, 10  # of vectors: MNIST's


@dataclass(frozen=True)
class Builtin:
    """A task that comes with clusterrun.

    Attributes:
        takes: the kind of data it trains on, ``VECTORS`` or ``TOKENS``.
        args: allowed ``train.task_args`` with their defaults; a value must have its default's type.
        smallest: the smallest allowed value of an argument that is not >= 1.
    """

    takes: str
    args: Mapping[str, int | float]
    smallest: Mapping[str, float]
    description: str


BUILTINS: Mapping[str, Builtin] = {
    "linear": Builtin(VECTORS, {}, {}, "one linear layer, cross entropy"),
    "mlp": Builtin(
        VECTORS,
        {"hidden": 256, "depth": 2, "dropout": 0.0},
        {"dropout": 0.0},
        "ReLU layers of one width, cross entropy",
    ),
    "gpt": Builtin(
        TOKENS,
        {"layers": 2, "heads": 4, "width": 128, "context": 128, "dropout": 0.0},
        {"dropout": 0.0},
        "a causal transformer over bytes",
    ),
}


def is_builtin(task: str) -> bool:
    """Whether ``train.task`` names a built-in; a user's own has the form ``package.module:Class``."""
    return ":" not in task


def check_task_args(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``train.task_args`` of a task and fill in defaults. A user's own task takes any arguments.

    Raises:
        ConfigError: no such task, no such argument, a wrong type, or values that do not fit together.
    """
    if not is_builtin(name):
        return dict(args)
    if name not in BUILTINS:
        raise ConfigError(
            f"train.task={name}: no such task.{nearest(name, BUILTINS)} "
            f"Built-in: {choices(BUILTINS)}; your own: package.module:Class"
        )
    task = BUILTINS[name]
    filled: dict[str, Any] = dict(task.args)
    for key, value in args.items():
        if key not in task.args:
            hint = f"{nearest(key, task.args)} Allowed: {choices(task.args) or 'none'}"
            raise ConfigError(f"train.task_args.{key}: task '{name}' has no such argument.{hint}")
        filled[key] = _checked(name, key, value, task)
    if name == "gpt" and filled["width"] % filled["heads"]:
        raise ConfigError(
            f"train.task_args.width={filled['width']}: not divisible by train.task_args.heads={filled['heads']}"
        )
    return filled


def _checked(name: str, key: str, value: Any, task: Builtin) -> int | float:
    kind = type(task.args[key])
    smallest = task.smallest.get(key, 1)
    number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not number or value < smallest or (key == "dropout" and value >= 1):
        wanted = "a number from 0 to below 1" if key == "dropout" else f"a whole number of at least {smallest}"
        raise ConfigError(f"train.task_args.{key}={value!r}: task '{name}' wants {wanted}")
    result: int | float = kind(value)
    return result
