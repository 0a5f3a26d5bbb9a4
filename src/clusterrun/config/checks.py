"""The preflight checks by name: what each is about, what it costs, and what its failure does by default.

A table without code, so that plans and configurations can name checks without importing what makes them.
"""

from __future__ import annotations

from enum import Enum

from clusterrun.errors import ConfigError, choices, nearest


class Policy(Enum):
    """What a FAIL does: leave the node out, only warn, or the check is not made at all."""

    fatal = "fatal"
    warn = "warn"
    off = "off"


class Cost(Enum):
    """fast: always made. slow: with preflight=full."""

    fast = "fast"
    slow = "slow"


# name: (what it is about, cost, policy by default)
CHECKS: dict[str, tuple[str, Cost, Policy]] = {
    "answered": ("the node reported in time", Cost.fast, Policy.fatal),
    "versions": ("Python and packages equal on all nodes", Cost.fast, Policy.fatal),
    "gpu_count": ("as many GPUs as workers", Cost.fast, Policy.fatal),
    "cpu_cores": ("CPU cores really given to the step", Cost.fast, Policy.warn),
    "run_directory": ("the run directory can be written", Cost.fast, Policy.fatal),
    "address": ("an address other nodes reach, and a free port", Cost.fast, Policy.fatal),
    "clock": ("clocks agree", Cost.fast, Policy.warn),
}


def policies(overrides: dict[str, str]) -> dict[str, Policy]:
    """Policy of every check, with ``preflight.policy`` applied.

    Raises:
        ConfigError: no such check or policy.
    """
    found = {name: policy for name, (_, _, policy) in CHECKS.items()}
    for name, word in overrides.items():
        if name not in CHECKS:
            raise ConfigError(
                f"preflight.policy.{name}: no such check.{nearest(name, CHECKS)} Known: {choices(CHECKS)}"
            )
        if str(word) not in Policy.__members__:
            raise ConfigError(f"preflight.policy.{name}={word}: must be one of {', '.join(Policy.__members__)}")
        found[name] = Policy[str(word)]
    return found


def made(level_full: bool, overrides: dict[str, str]) -> list[str]:
    """Names of the checks that will be made, in order."""
    policy = policies(overrides)
    return [
        n for n, (_, cost, _) in CHECKS.items() if policy[n] is not Policy.off and (level_full or cost is Cost.fast)
    ]
