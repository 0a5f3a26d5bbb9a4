"""The preflight checks by name: what each is about and what its failure does by default.

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


# name: (what it is about, policy by default)
CHECKS: dict[str, tuple[str, Policy]] = {
    "answered": ("the node reported in time", Policy.fatal),
    "versions": ("Python and packages equal on all nodes", Policy.fatal),
    "gpu_count": ("as many GPUs as workers", Policy.fatal),
    "cpu_cores": ("CPU cores really given to the step", Policy.warn),
    "run_directory": ("the run directory can be written", Policy.fatal),
    "address": ("an address other nodes reach, and a free port", Policy.fatal),
    "clock": ("clocks agree", Policy.warn),
    "shm_size": ("room in /dev/shm", Policy.warn),
    "memlock": ("locked memory unlimited where RDMA needs it", Policy.warn),
    "open_files": ("limit of open files", Policy.warn),
    "memory_given": ("memory really given to the step", Policy.warn),
    "threads": ("threads x workers within the cores", Policy.warn),
    "leftovers": ("nothing of an earlier attempt still runs", Policy.fatal),
    "name_resolution": ("reverse look-ups answer in time", Policy.warn),
    "interface": ("the same way to the head node everywhere", Policy.warn),
    "env_names": ("NCCL and Gloo variables name interfaces and devices that are there", Policy.fatal),
    "env_hurts": ("no variable in the environment that slows communication", Policy.warn),
    "storage_same": ("the run directory on the same storage everywhere", Policy.fatal),
    "storage_visible": ("what one node writes the others see in time", Policy.fatal),
    "storage_latency": ("time of an fsync", Policy.warn),
    "storage_locks": ("advisory locks", Policy.warn),
    "storage_space": ("room for checkpoints", Policy.fatal),
    "storage_options": ("mount options that lose or hide writes", Policy.fatal),
    "gpu_lost": ("every GPU answers", Policy.fatal),
    "gpu_model": ("the declared GPU model", Policy.fatal),
    "driver_versions": ("driver, CUDA and NCCL equal on all nodes, and new enough", Policy.fatal),
    "wiring_as_declared": ("GPU pairs joined as cluster.interconnect says", Policy.fatal),
    "nvlinks_up": ("NVLinks up, and as many as declared", Policy.fatal),
    "nvlink_speed": ("NVLinks at the rate of their generation", Policy.fatal),
    "nvlink_errors": ("NVLink error counters", Policy.warn),
    "fabric": ("NVSwitch fabric set up and healthy", Policy.fatal),
    "p2p": ("peer-to-peer over NVLink", Policy.fatal),
    "pcie_width": ("PCIe lanes in use", Policy.fatal),
    "pcie_generation": ("PCIe generation that GPU and slot reach", Policy.fatal),
    "pcie_replays": ("PCIe replay counter", Policy.warn),
    "ecc": ("uncorrected memory errors", Policy.fatal),
    "row_remap": ("memory rows waiting for or failing repair", Policy.fatal),
    "retired_pages": ("memory pages waiting for retirement, or too many retired", Policy.fatal),
    "xid_recovery": ("recovery that the driver asks for after an XID", Policy.fatal),
    "throttle": ("clocks held back by hardware or heat", Policy.fatal),
    "power_limit": ("power limit as declared, and as the peers'", Policy.warn),
    "temperature": ("temperature below the slowdown threshold", Policy.fatal),
    "persistence_mode": ("driver stays loaded", Policy.warn),
    "mig_off": ("GPUs not cut into instances", Policy.fatal),
    "gpu_processes": ("processes that others left on our GPUs", Policy.warn),
    "gpu_memory_used": ("GPU memory free before the start", Policy.warn),
    "clocks": ("maximum clocks equal to the peers'", Policy.warn),
    "nic_count": ("as many NICs as declared", Policy.fatal),
    "nic_link_layer": ("NICs on the declared kind of network", Policy.fatal),
    "nic_state": ("NICs active", Policy.fatal),
    "nic_rate": ("NICs at the declared rate", Policy.fatal),
    "nic_affinity": ("a NIC near every GPU", Policy.warn),
    "iommu_acs": ("IOMMU out of the way of peer-to-peer", Policy.warn),
}

# The same of the checks that take long, made with preflight=full on the nodes that passed those above.
SLOW: dict[str, tuple[str, Policy]] = {
    "measured": ("the slow checks came to an end", Policy.fatal),
    "gemm_speed": ("matrix products as fast as on the peers, and repeatable", Policy.fatal),
    "copy_speed": ("copies to and from the device as fast as on the peers", Policy.fatal),
    "pcie_under_load": ("PCIe generation and lanes while copying", Policy.fatal),
    "all_reduce_in_node": ("all-reduce in a node as fast as in the others, and right", Policy.fatal),
    "gpu_pairs": ("each pair of a node as fast as pairs of the same wiring", Policy.fatal),
    "between_nodes": ("all-reduce between nodes as fast as with the others", Policy.fatal),
}


def policies(overrides: dict[str, str]) -> dict[str, Policy]:
    """Policy of every check, fast and slow, with ``preflight.policy`` applied.

    Raises:
        ConfigError: no such check or policy.
    """
    known = {**CHECKS, **SLOW}
    found = {name: policy for name, (_, policy) in known.items()}
    for name, word in overrides.items():
        if name not in known:
            raise ConfigError(f"preflight.policy.{name}: no such check.{nearest(name, known)} Known: {choices(known)}")
        if str(word) not in Policy.__members__:
            raise ConfigError(f"preflight.policy.{name}={word}: must be one of {', '.join(Policy.__members__)}")
        found[name] = Policy[str(word)]
    return found


def made(overrides: dict[str, str]) -> list[str]:
    """Names of the (fast) checks that will be made, in order."""
    return [name for name, policy in policies(overrides).items() if policy is not Policy.off and name in CHECKS]


def made_slow(overrides: dict[str, str]) -> list[str]:
    """The same of the slow ones."""
    return [name for name, policy in policies(overrides).items() if policy is not Policy.off and name in SLOW]
