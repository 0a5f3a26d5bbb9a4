"""Checks of the GPUs themselves: model, driver, memory errors, PCIe, clocks, power, heat, and who else uses them.

Each threshold names its source; "reference" is shared/wiring_reference.md section 1 (what other tools check). Counters
count since the driver was loaded, so what only counts is a warning by default, and what is broken now is fatal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clusterrun.preflight.checks.per_gpu import (
    FAIL,
    PASS,
    UNKNOWN,
    WARN,
    Peers,
    Said,
    gpu_check,
    judged,
    label,
    several,
    unread,
    usual,
)
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, GpuHealth
from clusterrun.preflight.report import Finding

PCIE_REPLAYS_MAX = 80  # DCGM's limit for its PCIe test (reference)
RETIRED_PAGES_MAX = 62  # Azure's limit for the V100, which has room for 64 (reference)
MEMORY_USED_MAX = 1 << 30  # bytes; an idle GPU holds at most some 100 MB beyond the driver's reserve (our choice)
TEMPERATURE_NEAR_C = 5  # this near the slowdown threshold before any work began is a warning (our choice)
POWER_TOLERANCE_W = 1.0  # limits are set in whole watts

#: Bits of nvmlClocksEventReasons (nvml.h) that mean trouble. Idle, application clocks, sync boost and the software
#: power cap are normal. gpu-fryer fails on any hardware or thermal reason (reference).
THROTTLE_FAULTS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
#: nvmlDeviceGpuRecoveryAction_t (nvml.h).
RECOVERY = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
_AMPERE = (8, 0)  # from here memory is repaired by row remapping, before by page retirement (NVIDIA GPU memory errors)


def gpu_lost(e: Evidence) -> Iterator[Finding]:
    """Every GPU answers, and there are as many as CUDA_VISIBLE_DEVICES names."""
    for node, report in judged(e):
        facts = report.gpus
        if facts is None or not facts.health:
            yield unread("gpu_lost", node, facts)
            continue
        lost = [f"{label(gpu)}: {gpu.error}" for gpu in facts.health if gpu.error]
        short = (report.visible_gpus or 0) - len(facts.health)
        if short > 0:
            lost.append(f"CUDA_VISIBLE_DEVICES names {report.visible_gpus} GPUs, the driver shows {len(facts.health)}")
        if lost:
            advice = "see the XID in dmesg; a reset or a reboot may bring it back, else reseat or replace it"
            yield Finding("gpu_lost", node, FAIL, several(lost, "; "), advice)
        else:
            yield Finding("gpu_lost", node, PASS, f"all {len(facts.health)} GPUs answer")


def driver_versions(e: Evidence) -> Iterator[Finding]:
    """Driver, CUDA and NCCL equal over the nodes, and the driver at least preflight.min_driver."""
    read = {node: report.gpus for node, report in judged(e) if report.gpus is not None and report.gpus.health}
    versions = {node: _versions(facts) for node, facts in read.items()}
    most = {
        name: usual(filter(None, (seen[name] for seen in versions.values()))) for name in ("driver", "CUDA", "NCCL")
    }
    wanted = e.preflight.min_driver
    for node, report in judged(e):
        if node not in read:
            yield unread("driver_versions", node, report.gpus)
            continue
        mine = versions[node]
        odd = [f"{k} {mine[k]} (others: {most[k]})" for k in most if mine[k] is not None and mine[k] != most[k]]
        driver = read[node].driver
        if wanted and driver and _number(wanted) and _number(driver) < _number(wanted):
            odd.append(f"driver {driver} is older than preflight.min_driver={wanted}")
        if odd:
            advice = "install the same driver and environment on every node"
            yield Finding("driver_versions", node, FAIL, ", ".join(odd), advice)
        elif driver is None or read[node].cuda is None:
            yield Finding("driver_versions", node, UNKNOWN, "the driver does not say its version")
        elif wanted and not _number(wanted):
            yield Finding("driver_versions", node, UNKNOWN, f"preflight.min_driver={wanted} is no version")
        else:
            yield Finding("driver_versions", node, PASS, ", ".join(f"{k} {v}" for k, v in mine.items()))


def _versions(facts: GpuFacts) -> dict[str, str | None]:
    # NCCL may be part of torch or of the system. That there is no package is a fact, and should be so everywhere.
    return {"driver": facts.driver, "CUDA": facts.cuda, "NCCL": facts.nccl or "(no package)"}


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _bare(model: str) -> str:
    """Drivers before 465 left the maker's name out."""
    return model.strip().lower().removeprefix("nvidia ")


def _model(gpu: GpuHealth, peers: Peers) -> Said:
    """The model that the cluster declares, else the same on all GPUs."""
    declared = peers.evidence.cluster.gpu_model
    if gpu.model is None:
        return UNKNOWN, "model not known"
    if declared:
        same = _bare(gpu.model) == _bare(declared)
        return (PASS, gpu.model) if same else (FAIL, f"declared {declared}, detected {gpu.model}")
    most = peers.usual_model()
    return (PASS, gpu.model) if gpu.model == most else (WARN, f"{gpu.model}, where most GPUs are {most}")


def _pcie_width(gpu: GpuHealth, peers: Peers) -> Said:
    """All lanes that GPU and slot can do together, and as many as the peers have."""
    now, most = gpu.pcie_width, gpu.pcie_width_max
    if now is None or most is None:
        return UNKNOWN, "PCIe width not known"
    wanted = max(most, peers.usual(gpu, "pcie_width_max"))
    if now < wanted:
        return FAIL, f"PCIe x{now} of x{wanted}" + ("" if most == wanted else " that its peers have")
    return PASS, f"PCIe x{now}"


def _pcie_generation(gpu: GpuHealth, peers: Peers) -> Said:
    """The highest generation of GPU and slot together, against the peers'; the one of now says nothing when idle."""
    if gpu.pcie_gen_max is None:
        return UNKNOWN, "PCIe generation not known"
    wanted = peers.usual(gpu, "pcie_gen_max")
    if gpu.pcie_gen_max < wanted:
        return FAIL, f"PCIe Gen{gpu.pcie_gen_max} at most, its peers reach Gen{wanted}"
    return PASS, f"PCIe up to Gen{gpu.pcie_gen_max}"


def _pcie_replays(gpu: GpuHealth, peers: Peers) -> Said:
    """Packets that had to be sent again."""
    if gpu.pcie_replays is None:
        return UNKNOWN, "PCIe replays not known"
    bad = gpu.pcie_replays > PCIE_REPLAYS_MAX
    return (FAIL if bad else PASS), f"{gpu.pcie_replays} PCIe replays" + (f" (> {PCIE_REPLAYS_MAX})" if bad else "")


def _ecc(gpu: GpuHealth, peers: Peers) -> Said:
    """No uncorrected memory error since the driver was loaded (Azure, gcm: 0)."""
    if gpu.ecc_uncorrected:
        return FAIL, f"{gpu.ecc_uncorrected} uncorrected ECC errors"
    if gpu.ecc_on is False:
        return WARN, "ECC is off: memory errors go unnoticed"
    if gpu.ecc_uncorrected is None:
        return UNKNOWN, "ECC errors not known"
    return PASS, "no uncorrected ECC error"


def _row_remap(gpu: GpuHealth, peers: Peers) -> Said:
    """No memory row waits to be remapped, and none failed to be (gcm: any)."""
    if gpu.remap_failed:
        return FAIL, "row remapping failed"
    if gpu.remap_pending:
        return FAIL, "row remapping pending"
    if gpu.remap_failed is None or gpu.remap_pending is None:
        return None if _before_ampere(gpu) else (UNKNOWN, "row remapping not known")
    return PASS, "no row remapping pending or failed"


def _retired_pages(gpu: GpuHealth, peers: Peers) -> Said:
    """No memory page waits to be retired, and room is left for more."""
    if gpu.retired_pending:
        return FAIL, "page retirement pending"
    if gpu.retired_pages is not None and gpu.retired_pages >= RETIRED_PAGES_MAX:
        return FAIL, f"{gpu.retired_pages} retired pages (limit {RETIRED_PAGES_MAX})"
    if gpu.retired_pages is None or gpu.retired_pending is None:
        return (UNKNOWN, "retired pages not known") if _before_ampere(gpu) is not False else None
    return PASS, "no page retirement pending"


def _before_ampere(gpu: GpuHealth) -> bool | None:
    return None if gpu.capability is None else _number(gpu.capability) < _AMPERE


def _xid_recovery(gpu: GpuHealth, peers: Peers) -> Said:
    """The driver asks for no recovery action (NVML field 230; nvrx, DCGM: none)."""
    if gpu.recovery_action is None:
        return UNKNOWN, "recovery action not known"
    if gpu.recovery_action == 0:
        return PASS, "no recovery action asked for"
    return FAIL, f"the driver asks for: {RECOVERY.get(gpu.recovery_action, f'action {gpu.recovery_action}')}"


def _throttle(gpu: GpuHealth, peers: Peers) -> Said:
    """Nothing but idleness or settings holds the clocks back."""
    if gpu.throttle is None:
        return UNKNOWN, "throttle reasons not known"
    why = [name for bit, name in THROTTLE_FAULTS.items() if gpu.throttle & bit]
    return (FAIL, f"throttled: {', '.join(why)}") if why else (PASS, "not throttled")


def _power_limit(gpu: GpuHealth, peers: Peers) -> Said:
    """At least preflight.power_limit_w; without it as much as the peers, and as the factory set."""
    limit, declared = gpu.power_limit_w, peers.evidence.preflight.power_limit_w
    if limit is None:
        return UNKNOWN, "power limit not known"
    if declared is not None:
        low = limit < declared - POWER_TOLERANCE_W
        return (FAIL, f"declared {declared:g} W, detected {limit:g} W") if low else (PASS, f"{limit:g} W")
    most = peers.usual(gpu, "power_limit_w")
    if limit < most - POWER_TOLERANCE_W:
        return FAIL, f"limited to {limit:g} W, its peers to {most:g} W"
    if gpu.power_default_w is not None and limit < gpu.power_default_w - POWER_TOLERANCE_W:
        return WARN, f"limited to {limit:g} W of {gpu.power_default_w:g} W"
    return PASS, f"{limit:g} W"


def _temperature(gpu: GpuHealth, peers: Peers) -> Said:
    """Well below the temperature at which clocks are cut."""
    left = gpu.margin_c
    if left is None and gpu.temperature_c is not None and gpu.slowdown_c is not None:
        left = gpu.slowdown_c - gpu.temperature_c
    if left is None:
        return UNKNOWN, "temperature or its limit not known"
    now = "" if gpu.temperature_c is None else f"{gpu.temperature_c} C, "
    if left <= 0:
        return FAIL, f"{now}at or above the slowdown threshold"
    return (WARN if left <= TEMPERATURE_NEAR_C else PASS), f"{now}{left} C below slowdown"


def _persistence(gpu: GpuHealth, peers: Peers) -> Said:
    """The driver stays loaded between jobs."""
    if gpu.persistence is None:
        return UNKNOWN, "persistence mode not known"
    return (PASS, "persistence mode on") if gpu.persistence else (WARN, "persistence mode off")


def _mig_off(gpu: GpuHealth, peers: Peers) -> Said:
    """Not cut into MIG instances, which have no peer-to-peer (reference, section 4)."""
    if gpu.mig is None:
        # MIG came with Ampere: an older GPU has no such mode.
        return None if _before_ampere(gpu) else (UNKNOWN, "MIG mode not known")
    return (FAIL, "MIG is on: no peer-to-peer, a worker gets a slice") if gpu.mig else (PASS, "MIG off")


def _gpu_processes(gpu: GpuHealth, peers: Peers) -> Said:
    """Nobody computes on the GPUs given to this job (gcm: none). Others' GPUs may be busy."""
    if gpu.mine is False:
        return None
    if gpu.pids is None:
        return UNKNOWN, "processes not known"
    return (FAIL, f"in use by pid {several([*map(str, gpu.pids)], ', ')}") if gpu.pids else (PASS, "no process")


def _gpu_memory_used(gpu: GpuHealth, peers: Peers) -> Said:
    """Memory of the GPUs given to this job is free before it starts."""
    if gpu.mine is False:
        return None
    if gpu.memory_used_bytes is None:
        return UNKNOWN, "used memory not known"
    used = f"{gpu.memory_used_bytes / 2**30:.1f} GiB in use"
    return (FAIL, f"{used} before the job starts") if gpu.memory_used_bytes > MEMORY_USED_MAX else (PASS, used)


def _clocks(gpu: GpuHealth, peers: Peers) -> Said:
    """The same maximum clocks as the peers: the slowest GPU sets the pace of all."""
    facts = {"SM": (gpu.clock_sm_mhz, "clock_sm_mhz"), "memory": (gpu.clock_memory_mhz, "clock_memory_mhz")}
    low = [
        f"{name} clock {mhz} MHz at most, its peers {peers.usual(gpu, fact)} MHz"
        for name, (mhz, fact) in facts.items()
        if mhz is not None and mhz < peers.usual(gpu, fact)
    ]
    if low:
        return FAIL, ", ".join(low)
    if gpu.clock_sm_mhz is None or gpu.clock_memory_mhz is None:
        return UNKNOWN, "maximum clocks not known"
    return PASS, f"up to {gpu.clock_sm_mhz} MHz"


_RESET = "drain the node and reset the GPU (nvidia-smi --gpu-reset), or reboot"
GPU: dict[str, Check] = {
    "gpu_lost": gpu_lost,
    "gpu_model": gpu_check("gpu_model", _model, "is cluster.gpu_model right, and the node in the right partition?"),
    "driver_versions": driver_versions,
    "pcie_width": gpu_check("pcie_width", _pcie_width, "reseat the GPU or its riser; compare with another node"),
    "pcie_generation": gpu_check("pcie_generation", _pcie_generation, "compare BIOS settings and slot with a peer"),
    "pcie_replays": gpu_check("pcie_replays", _pcie_replays, "a bad connection: reseat the GPU or its riser"),
    "ecc": gpu_check("ecc", _ecc, _RESET + "; replace it when they come back"),
    "row_remap": gpu_check("row_remap", _row_remap, _RESET + "; failed remapping means replacing it"),
    "retired_pages": gpu_check("retired_pages", _retired_pages, _RESET + "; at the limit replace it"),
    "xid_recovery": gpu_check("xid_recovery", _xid_recovery, "do what it asks for; dmesg shows the XID"),
    "throttle": gpu_check("throttle", _throttle, "check cooling, power supplies and the power brake"),
    "power_limit": gpu_check("power_limit", _power_limit, "nvidia-smi -pl sets it; a lower limit slows all ranks"),
    "temperature": gpu_check("temperature", _temperature, "check fans, coolant and airflow"),
    "persistence_mode": gpu_check("persistence_mode", _persistence, "enable nvidia-persistenced: faster starts"),
    "mig_off": gpu_check("mig_off", _mig_off, "nvidia-smi -mig 0, or ask for full GPUs"),
    "gpu_processes": gpu_check("gpu_processes", _gpu_processes, "end what earlier jobs left"),
    "gpu_memory_used": gpu_check("gpu_memory_used", _gpu_memory_used, "end what earlier jobs left"),
    "clocks": gpu_check("clocks", _clocks, "compare VBIOS, locked clocks (nvidia-smi -q -d CLOCK) with a peer"),
}
