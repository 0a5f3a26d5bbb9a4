"""Random states of one process, as tensors, so that a checkpoint needs no pickle.

Seeds: the model is initialised from ``seed`` alone, the same on every rank. After that rank r draws from
SeedSequence((seed, step, r)), where step is 0, or the step a run was resumed at under another world size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_everywhere(*parts: int) -> None:
    """Seed Python's, numpy's and torch's generators (CPU and GPU) from whole numbers >= 0."""
    seed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """All generators' states of this process; ``restore_rng`` takes them back."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators of this process."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """What runs inside draws random numbers without changing those drawn after."""
    state = rng_state(device)
    try:
        yield
    finally:
        restore_rng(state, device)
