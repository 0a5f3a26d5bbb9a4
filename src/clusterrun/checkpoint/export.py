"""Plain weights out of a checkpoint: one file that needs nothing of ours to be read. Imports torch."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterrun.checkpoint import dcp
from clusterrun.checkpoint.store import CheckpointInfo, Store
from clusterrun.errors import CheckpointError, ConfigError
from clusterrun.rundir import sync_directory

MODEL = "model/"


class Format(Enum):
    """safetensors; or torch: a dict for ``torch.load(file, weights_only=True)``."""

    safetensors = "safetensors"
    torch = "torch"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        left_out: entries of the model that are no tensors.
        skipped: why newer checkpoints were not taken.
    """

    step: int
    tensors: int
    parameters: int
    bytes: int
    left_out: list[str]
    skipped: list[str]


def export(store: Store, step: int | None, form: Format, file: Path) -> Exported:
    """Write the model of ``step``'s checkpoint, else of the newest undamaged one, to a new file, whole or not at all.

    Raises:
        CheckpointError: there is none, or the one asked for is damaged; or the file can't be written.
        ConfigError: the file exists, or safetensors is not installed.
    """
    if os.path.lexists(file):
        raise ConfigError(f"{file}: exists; give another name, or remove it")
    if form is Format.safetensors:
        _safetensors()  # before anything is read
    info, skipped = _choose(store, step)
    layout = dcp.layout(info.path)
    weights: dict[str, Any] = {
        key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in layout.items() if key.startswith(MODEL)
    }
    if not weights:
        raise CheckpointError(f"{info.path}: holds no model")
    dcp.read(weights, info.path)
    plain: dict[str, Tensor] = {key.removeprefix(MODEL): value for key, value in weights.items()}
    _write(plain, form, file, info.step)
    left_out = [key.removeprefix(MODEL) for key in dcp.objects(info.path) if key.startswith(MODEL)]
    parameters = sum(value.numel() for value in plain.values())
    return Exported(info.step, len(plain), parameters, file.stat().st_size, left_out, skipped)


def _choose(store: Store, step: int | None) -> tuple[CheckpointInfo, list[str]]:
    skipped: list[str] = []
    listed = store.list()
    for info in listed if step is None else [info for info in listed if info.step == step]:
        problems = store.verify(info)
        if not problems:
            return info, skipped
        skipped.append(problems[0])
    if skipped:
        raise CheckpointError(f"nothing is exported: {'; '.join(skipped)}")
    there = ", ".join(str(info.step) for info in listed)
    missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise CheckpointError(f"{store.directory}: {missing} in it" + (f"; there are those of {there}" if there else ""))


def _write(weights: dict[str, Tensor], form: Format, file: Path, step: int) -> None:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        if form is Format.safetensors:
            _safetensors().save_file(weights, str(temporary), metadata={"format": "pt", "step": str(step)})
        else:
            torch.save(weights, temporary)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        os.rename(temporary, file)
        sync_directory(file.parent)
    except Exception as error:  # torch and safetensors have their own kinds for a full disk
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise CheckpointError(f"{file}: can't be written: {reason}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ConfigError(
            "--format safetensors: the package safetensors is not installed; pip install 'clusterrun[safetensors]'"
        ) from None
    return safetensors.torch
