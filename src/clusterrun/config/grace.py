"""How long before its end a job is told, and how much of that the workers have for saving."""

from __future__ import annotations

from clusterrun.config.schema import RunConfig
from clusterrun.config.units import time_limit_minutes

# Share of the signal's lead that the workers have for saving; the rest is for ending them and for the requeue.
SAVE_SHARE = 0.75


def signal_lead_s(config: RunConfig) -> int:
    """Seconds before the time limit at which the run is told to save, at most a quarter of the limit.

    Slurm sends it up to 60 s earlier than asked, so a fixed lead would eat a short job whole.
    """
    limit = config.cluster.time_limit
    if limit is None:
        return config.cluster.signal_lead_s
    return min(config.cluster.signal_lead_s, time_limit_minutes(limit) * 60 // 4)


def save_grace_s(config: RunConfig) -> float:
    """Seconds that the workers have for saving, from the signal until the conductor ends them."""
    return SAVE_SHARE * signal_lead_s(config)
