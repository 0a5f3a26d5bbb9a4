"""clusterrun: turn a described GPU cluster and a training job into a run that proves its wiring before it trains.

For scripts under torchrun: ``stop_requested()`` and ``CheckpointManager`` (docs/checkpoints.md, "Your own loop").
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterrun.train.manager import CheckpointManager as CheckpointManager
    from clusterrun.train.stopping import stop_requested as stop_requested

__version__ = "0.1.0"

_PLACES = {"CheckpointManager": "clusterrun.train.manager", "stop_requested": "clusterrun.train.stopping"}


def __getattr__(name: str) -> Any:
    """Imported when asked for: ``import clusterrun`` stays free of torch."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'clusterrun' has no attribute '{name}'")
