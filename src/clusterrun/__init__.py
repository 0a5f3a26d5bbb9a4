"""clusterrun: turn a described GPU cluster and a training job into a run that proves its wiring before it trains.

From Python: ``from clusterrun import compose, plan, submit, Run`` (docs/operations.md, "From Python").
For scripts under torchrun: ``stop_requested()`` and ``CheckpointManager`` (docs/checkpoints.md, "Your own loop").
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterrun.config.compose import compose as compose
    from clusterrun.operate.api import Run as Run
    from clusterrun.operate.api import plan as plan
    from clusterrun.operate.api import submit as submit
    from clusterrun.train.manager import CheckpointManager as CheckpointManager
    from clusterrun.train.stopping import stop_requested as stop_requested

__version__ = "0.1.0"

_PLACES = {
    "CheckpointManager": "clusterrun.train.manager",
    "Run": "clusterrun.operate.api",
    "compose": "clusterrun.config.compose",
    "plan": "clusterrun.operate.api",
    "stop_requested": "clusterrun.train.stopping",
    "submit": "clusterrun.operate.api",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: ``import clusterrun`` stays free of torch."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'clusterrun' has no attribute '{name}'")
