"""What a node says about its GPUs, links and NICs, read before training and judged elsewhere.

NVML is asked in one process that can be killed (``python -m clusterrun.preflight.gpu_facts``, topology and health
together): a sick driver can hang in a call that no signal interrupts. Without a driver nothing is started.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from clusterrun.topology import snapshot, sysfs
from clusterrun.topology.model import Gpu, Topology, TopologyError
from clusterrun.topology.node import NVML_TIMEOUT_S, ask_worker, with_host, without_gpus
from clusterrun.topology.nvml import read_with
from clusterrun.topology.nvml_ask import Ask, GpuGone, NvmlUnavailable, start
from clusterrun.topology.nvml_ports import read_field

LIBRARY = "libnvidia-ml.so.1"
PROC = Path("/proc")
_IOMMU_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough")  # kernel command line
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")

# Values of nvml.h, spelled here because old bindings lack some of the names.
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, a field of the whole GPU (scope 0)
_UNCORRECTED, _VOLATILE = 1, 0
_CAUSES = (0, 1)  # of page retirement: multiple single-bit errors, a double-bit error
_SENSOR, _SLOWDOWN = 0, 1
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_MEMORY_V2 = 0x02000028  # counts the driver's own reserve apart; version 1 counts it as used
_LINK_COUNTERS = {"link_replay": 0, "link_recovery": 1, "link_crc_flit": 2, "link_crc_data": 3}


@dataclass(frozen=True)
class GpuHealth:
    """The state of one GPU. None everywhere means that the driver did not say.

    Attributes:
        index: in PCI bus id order (NVML's).
        error: why the GPU can't be reached (fallen off the bus, reset required); "" when it answers.
        capability: CUDA compute capability, "9.0".
        mine: whether CUDA_VISIBLE_DEVICES names it; None when that is not set or can't be told.
        pcie_gen, pcie_width: of now (links downshift when idle); _max: what GPU and slot can do together.
        pcie_replays, link_*: counters since the driver was loaded; link_* are sums over the GPU's NVLink ports.
        ecc_uncorrected: since the driver was loaded ("volatile").
        retired_pages: for any cause, over the life of the GPU (before Ampere).
        recovery_action: what the driver asks for after an XID (nvmlDeviceGpuRecoveryAction_t, 0 is none).
        throttle: bits of nvmlClocksEventReasons.
        power_limit_w, power_default_w: enforced and factory limit, watts.
        temperature_c, slowdown_c, margin_c: now, where clocks are cut, and what is left until then (Hopper on); deg C.
        pids: compute processes on it. memory_used_bytes: by anybody.
        clock_sm_mhz, clock_memory_mhz: maximum clocks.
        ports_up, ports_down: NVLink ports that are up and not up; ports_unknown: those of which it is not known.
        link_mb_s: line rate of each port that is up, MB/s per direction.
        fabric, fabric_ok, fabric_faults: as in topology.model.Gpu.
    """

    index: int
    uuid: str | None = None
    serial: str | None = None
    bus_id: str | None = None
    model: str | None = None
    capability: str | None = None
    error: str = ""
    mine: bool | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    ecc_on: bool | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages: int | None = None
    retired_pending: bool | None = None
    recovery_action: int | None = None
    throttle: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    margin_c: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    pids: tuple[int, ...] | None = None
    memory_used_bytes: int | None = None
    clock_sm_mhz: int | None = None
    clock_memory_mhz: int | None = None
    ports_up: tuple[int, ...] | None = None
    ports_down: tuple[int, ...] | None = None
    ports_unknown: tuple[int, ...] | None = None
    link_mb_s: tuple[int | None, ...] | None = None
    link_replay: int | None = None
    link_recovery: int | None = None
    link_crc_flit: int | None = None
    link_crc_data: int | None = None
    fabric: str | None = None
    fabric_ok: bool | None = None
    fabric_faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuFacts:
    """GPUs and wiring of one node.

    Attributes:
        topology: as topology.snapshot writes it; its NICs are there also when the GPUs could not be read.
        driver, cuda: of the driver; nccl: of the installed package, None when there is none.
        iommu_groups: groups that the kernel made; 0 when the IOMMU is off; None when sysfs does not say.
        iommu_options: what the kernel's command line says of it; None when it can't be read.
        counted: GPUs that the driver counts, lost ones included; 0 when it finds none; None when it could not be asked.
        problem: why the GPUs could not be read, or "".
        absent: True when that is because there is no driver or GPU.
    """

    topology: dict[str, Any] | None = None
    health: tuple[GpuHealth, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    iommu_groups: int | None = None
    iommu_options: tuple[str, ...] | None = None
    counted: int | None = None
    problem: str = ""
    absent: bool = False

    @cached_property
    def wiring(self) -> Topology | None:
        """The topology as values, read once for all checks; None when there is none, or none that can be read."""
        try:
            return None if self.topology is None else snapshot.from_plain(self.topology)
        except (KeyError, TypeError, ValueError, AttributeError, TopologyError):
            return None


def library_loads() -> bool:
    """Whether an NVML library can be loaded here. Loading asks the driver nothing, so it can't hang."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def read_gpu_facts(
    *,
    timeout_s: float = NVML_TIMEOUT_S,
    loads: Callable[[], bool] = library_loads,
    root: Path = sysfs.SYS,
    proc: Path = PROC,
    env: Mapping[str, str] | None = None,
) -> GpuFacts:
    """Everything about this node's GPUs, links and NICs; problems are texts in it, never exceptions."""
    facts = GpuFacts(nccl=nccl_version(), iommu_groups=_iommu_groups(root), iommu_options=_iommu_options(proc))
    installed = loads()
    try:
        if not installed:
            raise NvmlUnavailable(f"no NVIDIA driver on this machine ({LIBRARY} is not there)", absent=True)
        found, facts = _understand(ask_worker(__name__, timeout_s=timeout_s, env=env), facts)
    except NvmlUnavailable as error:
        found = without_gpus(error, root)
        facts = replace(
            facts,
            counted=0 if error.absent and installed else None,
            problem="; ".join((*found.missing, *found.notes)),
            absent=not found.missing,
        )
    visible = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    return replace(
        facts,
        topology=json.loads(json.dumps(snapshot.plain(with_host(found, root)))),
        driver=found.driver,
        health=tuple(replace(gpu, mine=_mine(gpu, visible)) for gpu in facts.health),
    )


def _understand(printed: str, facts: GpuFacts) -> tuple[Topology, GpuFacts]:
    """What the worker printed.

    Raises:
        NvmlUnavailable: it is not what a worker prints.
    """
    try:
        value = json.loads(printed)
        health = tuple(_health_of(item) for item in value["health"])
        found = snapshot.from_plain(value["topology"])
        return found, replace(facts, health=health, counted=len(health), cuda=value["cuda"])
    except (ValueError, KeyError, TypeError, AttributeError, TopologyError) as error:
        raise NvmlUnavailable(f"the process that asks NVML printed something unreadable: {error!r}") from None


def _health_of(item: dict[str, Any]) -> GpuHealth:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    return GpuHealth(**plain)


def nccl_version() -> str | None:
    """Of the package that torch's wheels bring; None when NCCL comes from elsewhere, or isn't there."""
    for name in _NCCL_PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _iommu_groups(root: Path) -> int | None:
    try:
        return sum(1 for _ in (root / "kernel/iommu_groups").iterdir())
    except OSError:
        return None


def _iommu_options(proc: Path) -> tuple[str, ...] | None:
    try:
        words = (proc / "cmdline").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return tuple(word for word in words if word.partition("=")[0] in _IOMMU_OPTIONS)


def _mine(gpu: GpuHealth, visible: str | None) -> bool | None:
    """Indices are taken in bus order, which is CUDA's own where all GPUs are of one model."""
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    if any(name.startswith("MIG") for name in names):
        return None
    return str(gpu.index) in names or any(
        name.startswith("GPU-") and gpu.uuid is not None and gpu.uuid.startswith(name) for name in names
    )


def read_health(ask: Ask, gpu: Gpu) -> GpuHealth:
    """The state of one GPU, by NVML. A GPU that is lost on the way keeps what was read before, and the error."""
    ports = gpu.ports
    up = None if ports is None else tuple(port.link for port in ports if port.active)
    health = GpuHealth(
        **{name: getattr(gpu, name) for name in _SHARED},
        error=gpu.error or "",
        ports_up=up,
        ports_down=None if ports is None else tuple(port.link for port in ports if port.active is False),
        ports_unknown=None if ports is None else tuple(port.link for port in ports if port.active is None),
        link_mb_s=None if ports is None else tuple(port.speed_mb_s for port in ports if port.active),
    )
    if gpu.error:
        return health
    try:
        code, handle = ask.code("nvmlDeviceGetHandleByIndex", gpu.index)
        if code != 0:
            return replace(health, error=f"NVML gives no handle (error {code})")
        return replace(health, **_state(ask, handle), **_link_errors(ask, handle, up))
    except GpuGone as error:
        return replace(health, error=f"{error} (fallen off the bus, or in need of a reset)")


_SHARED = tuple({f.name for f in fields(GpuHealth)} & {f.name for f in fields(Gpu)} - {"error"})


def _state(ask: Ask, handle: Any) -> dict[str, Any]:
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    ecc = ask("nvmlDeviceGetEccMode", handle)
    remapped = ask("nvmlDeviceGetRemappedRows", handle)
    retired = [ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in _CAUSES]
    known_retired = [pages for pages in retired if pages is not None]
    throttle = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if throttle is None:  # its name before driver 535
        throttle = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    memory = ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2) or ask("nvmlDeviceGetMemoryInfo", handle)
    processes = ask("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    if processes is None:  # before driver 510
        processes = ask("nvmlDeviceGetComputeRunningProcesses_v2", handle)
    return {
        "capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", handle),
        "ecc_on": None if ecc is None else bool(ecc[0]),
        "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        "remap_pending": None if remapped is None else bool(remapped[2]),
        "remap_failed": None if remapped is None else bool(remapped[3]),
        "retired_pages": sum(map(len, known_retired)) if len(known_retired) == len(_CAUSES) else None,
        "retired_pending": _flag(ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        "recovery_action": read_field(ask, handle, _RECOVERY_ACTION, 0),
        "throttle": throttle,
        "power_limit_w": _watts(ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
        "power_default_w": _watts(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        "temperature_c": ask("nvmlDeviceGetTemperature", handle, _SENSOR),
        "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN),
        "margin_c": ask("nvmlDeviceGetMarginTemperature", handle),
        "persistence": _flag(ask("nvmlDeviceGetPersistenceMode", handle)),
        "pids": None if processes is None else tuple(sorted({int(one.pid) for one in processes})),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "clock_sm_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM),
        "clock_memory_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY),
    }


def _flag(value: int | None) -> bool | None:
    return None if value is None else value != 0


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _link_errors(ask: Ask, handle: Any, links: tuple[int, ...] | None) -> dict[str, Any]:
    """Each counter summed over the ports that are up; None as soon as one port can't say."""
    sums: dict[str, Any] = {}
    for name, counter in _LINK_COUNTERS.items():
        total: int | None = 0 if links else None
        for link in links or ():
            value = ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
            if value is None:
                total = None
                break
            total = (total or 0) + int(value)
        sums[name] = total
    return sums


def main() -> int:
    """Worker: JSON on stdout; or the reason on stderr, and exit 3 (no GPU) or 4 (sick), as ``topology.nvml``'s."""
    try:
        ask = start()
        try:
            found = read_with(ask)
            health = [asdict(read_health(ask, gpu)) for gpu in found.gpus]
            number = ask("nvmlSystemGetCudaDriverVersion")
        finally:
            ask.code("nvmlShutdown")
    except NvmlUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 3 if error.absent else 4
    cuda = None if number is None else f"{number // 1000}.{number % 1000 // 10}"  # 12040 is 12.4
    sys.stdout.write(json.dumps({"topology": snapshot.plain(found), "health": health, "cuda": cuda}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
