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
    "gpu_lost": ("every GPU answers", Cost.fast, Policy.fatal),
    "gpu_model": ("the declared GPU model", Cost.fast, Policy.fatal),
    "driver_versions": ("driver, CUDA and NCCL equal on all nodes, and new enough", Cost.fast, Policy.fatal),
    "wiring_as_declared": ("GPU pairs joined as cluster.interconnect says", Cost.fast, Policy.fatal),
    "nvlinks_up": ("NVLinks up, and as many as declared", Cost.fast, Policy.fatal),
    "nvlink_speed": ("NVLinks at the rate of their generation", Cost.fast, Policy.fatal),
    "nvlink_errors": ("NVLink error counters", Cost.fast, Policy.warn),
    "fabric": ("NVSwitch fabric set up and healthy", Cost.fast, Policy.fatal),
    "p2p": ("peer-to-peer over NVLink", Cost.fast, Policy.fatal),
    "pcie_width": ("PCIe lanes in use", Cost.fast, Policy.fatal),
    "pcie_generation": ("PCIe generation that GPU and slot reach", Cost.fast, Policy.fatal),
    "pcie_replays": ("PCIe replay counter", Cost.fast, Policy.warn),
    "ecc": ("uncorrected memory errors", Cost.fast, Policy.fatal),
    "row_remap": ("memory rows waiting for or failing repair", Cost.fast, Policy.fatal),
    "retired_pages": ("memory pages waiting for retirement, or too many retired", Cost.fast, Policy.fatal),
    "xid_recovery": ("recovery that the driver asks for after an XID", Cost.fast, Policy.fatal),
    "throttle": ("clocks held back by hardware or heat", Cost.fast, Policy.fatal),
    "power_limit": ("power limit as declared, and as the peers'", Cost.fast, Policy.warn),
    "temperature": ("temperature below the slowdown threshold", Cost.fast, Policy.fatal),
    "persistence_mode": ("driver stays loaded", Cost.fast, Policy.warn),
    "mig_off": ("GPUs not cut into instances", Cost.fast, Policy.fatal),
    "gpu_processes": ("processes that others left on our GPUs", Cost.fast, Policy.warn),
    "gpu_memory_used": ("GPU memory free before the start", Cost.fast, Policy.warn),
    "clocks": ("maximum clocks equal to the peers'", Cost.fast, Policy.warn),
    "nic_count": ("as many NICs as declared", Cost.fast, Policy.fatal),
    "nic_link_layer": ("NICs on the declared kind of network", Cost.fast, Policy.fatal),
    "nic_state": ("NICs active", Cost.fast, Policy.fatal),
    "nic_rate": ("NICs at the declared rate", Cost.fast, Policy.fatal),
    "nic_affinity": ("a NIC near every GPU", Cost.fast, Policy.warn),
    "iommu_acs": ("IOMMU out of the way of peer-to-peer", Cost.fast, Policy.warn),
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
