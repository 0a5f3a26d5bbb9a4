"""Reader of this machine's GPUs through NVML: every fact that ``nvidia-smi topo -m`` shows, and the state behind it.

What NVML refuses (NOT_SUPPORTED, a function that the driver lacks) is None in the result. ``read_nvml`` asks in this
process and can hang with a sick driver; ``clusterrun.topology.node`` runs it in a process that can be killed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from clusterrun.topology.model import SELF, Gpu, Link, LinkKind, Topology
from clusterrun.topology.nvml_ask import FUNCTION_NOT_FOUND, Ask, GpuGone, NvmlUnavailable, start
from clusterrun.topology.nvml_ports import bonded, nvlink, read_ports
from clusterrun.topology.snapshot import dumps
from clusterrun.topology.sysfs import bus_id

#: nvmlGpuTopologyLevel_t. These are PCIe paths only: a low level does not mean NVLink.
_ANCESTOR = {
    0: LinkKind.PIX,  # two GPUs of one board
    10: LinkKind.PIX,
    20: LinkKind.PXB,
    30: LinkKind.PHB,
    40: LinkKind.NODE,
    50: LinkKind.SYS,
}
_P2P_READ, _P2P_OK, _P2P_UNKNOWN = 0, 0, 6  # nvidia-ml-py's NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
_CPU_WORDS, _NODE_WORDS = 64, 16  # room for 4096 CPUs and 1024 NUMA nodes
_SCOPE_NODE = 0
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
#: Two bits each in healthMask; 1 means that it is so. (name, shift)
_FABRIC_HEALTH = (
    ("degraded bandwidth", 0),
    ("route recovery in progress", 2),
    ("route unhealthy", 4),
    ("access timeout recovery", 6),
)


def read_nvml() -> Topology:
    """GPUs and the links between them.

    Raises:
        NvmlUnavailable: no binding, no driver, or no GPU; the message says which.
    """
    ask = start()
    try:
        return read_with(ask)
    finally:
        ask.code("nvmlShutdown")


def read_with(ask: Ask) -> Topology:
    """As ``read_nvml``, with NVML already started by the caller."""
    count = ask("nvmlDeviceGetCount")
    if count is None:
        raise NvmlUnavailable(f"NVML does not count GPUs (error {ask.refused.get('nvmlDeviceGetCount')})")
    if count == 0:
        raise NvmlUnavailable("the NVIDIA driver is loaded, but finds no GPU", absent=True)
    return _read(ask, int(count))


def _read(ask: Ask, count: int) -> Topology:
    read = [_gpu(ask, index) for index in range(count)]
    handles = [handle for handle, _ in read]
    gpus = [gpu for _, gpu in read]
    links = [[SELF if i == j else _link(ask, handles, gpus, i, j) for j in range(count)] for i in range(count)]
    missing = [f"{gpu.name}: {gpu.error}" for gpu in gpus if gpu.error] + _unknown(ask, gpus, links)
    return Topology(
        gpus=tuple(gpus),
        links=tuple(map(tuple, links)),
        source="nvml",
        missing=tuple(missing),
        notes=tuple(f"{gpu.name} is in MIG mode: no peer-to-peer, also not over NVLink" for gpu in gpus if gpu.mig),
        p2p=tuple(tuple(_peer(ask, handles, i, j) for j in range(count)) for i in range(count)),
        driver=ask("nvmlSystemGetDriverVersion"),
    )


def _gpu(ask: Ask, index: int) -> tuple[Any, Gpu]:
    """The handle (None when the GPU can't be reached) and the facts of one GPU."""
    name = f"GPU{index}"
    try:
        code, handle = ask.code("nvmlDeviceGetHandleByIndex", index)
        if code != 0:
            return None, Gpu(name, index, error=f"NVML gives no handle (error {code})")
        return handle, _facts(ask, handle, name, index)
    except GpuGone as error:
        return None, Gpu(name, index, error=f"{error} (fallen off the bus, or in need of a reset)")


def _facts(ask: Ask, handle: Any, name: str, index: int) -> Gpu:
    pci = ask("nvmlDeviceGetPciInfo", handle)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    own_node = ask("nvmlDeviceGetNumaNodeId", handle)
    cpus = _bits(ask("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS))
    state, fine, faults = _fabric(ask, handle)
    return Gpu(
        name=name,
        index=index,
        cpu_affinity=_ranges(cpus) or None,
        numa=tuple(_bits(ask("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _SCOPE_NODE))),
        gpu_numa_id=own_node if own_node is not None and own_node >= 0 else None,
        uuid=ask("nvmlDeviceGetUUID", handle) or None,
        bus_id=bus_id(_text(pci.busId)) if pci is not None and _text(pci.busId) else None,
        model=ask("nvmlDeviceGetName", handle) or None,
        serial=ask("nvmlDeviceGetSerial", handle) or None,
        memory_bytes=int(memory.total) if memory is not None else None,
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        mig=None if mig is None else mig[0] == 1,
        fabric=state,
        fabric_ok=fine,
        fabric_faults=faults,
        ports=read_ports(ask, handle, None if capability is None else (int(capability[0]), int(capability[1]))),
    )


def _text(raw: bytes | str) -> str:
    return raw.decode("ascii", errors="replace") if isinstance(raw, bytes) else raw


def _bits(words: Any) -> list[int]:
    """Positions of the set bits in an array of 64-bit words."""
    if words is None:
        return []
    return [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 64 as "0-2,64"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _fabric(ask: Ask, handle: Any) -> tuple[str | None, bool | None, tuple[str, ...]]:
    """State of the NVSwitch fabric, whether it is fine, and what is wrong with it."""
    for layout in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        struct = getattr(ask.pynvml, layout, None)
        if struct is None:
            continue
        info = struct()
        code, _ = ask.code("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        if code == 0:
            break
        if code == FUNCTION_NOT_FOUND:
            return None, None, ()
    else:
        return None, None, ()
    state = _FABRIC_STATES.get(int(info.state))
    if state == "not_supported":
        return state, None, ()
    mask = int(info.healthMask)
    faults = [name for name, shift in _FABRIC_HEALTH if mask >> shift & 3 == 1]
    if mask >> 8 & 15 > 1:
        faults.append("incorrect configuration")
    if mask >> 14 & 3 == 2:
        faults.append("fabric manager disconnected")
    if state == "completed" and int(info.status) != 0:
        faults.append(f"fabric probe ended with error {int(info.status)}")
    return state, None if state is None else state == "completed" and not faults, tuple(faults)


def _link(ask: Ask, handles: Sequence[Any], gpus: Sequence[Gpu], i: int, j: int) -> Link | None:
    """The best path from one GPU to another, as the matrix shows it: NVLink before PCIe."""
    if handles[i] is None or handles[j] is None:
        return None
    count = bonded(gpus, i, j)
    if count is None:
        return None  # PCIe alone would be a wrong answer where NVLink can't be ruled out
    if count:
        return nvlink(count)
    try:
        level = ask("nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])
    except GpuGone:
        return None
    kind = _ANCESTOR.get(level) if level is not None else None
    return None if kind is None else Link(kind)


def _peer(ask: Ask, handles: Sequence[Any], i: int, j: int) -> bool | None:
    if i == j or handles[i] is None or handles[j] is None:
        return None
    try:
        status = ask("nvmlDeviceGetP2PStatus", handles[i], handles[j], _P2P_READ)
    except GpuGone:
        return None
    return None if status in (None, _P2P_UNKNOWN) else status == _P2P_OK


def _unknown(ask: Ask, gpus: Sequence[Gpu], links: Sequence[Sequence[Link | None]]) -> list[str]:
    """Pairs without an answer, one phrase for all, with the calls that were refused."""
    pairs = [
        f"{gpus[i].name}-{gpus[j].name}"
        for i in range(len(gpus))
        for j in range(i + 1, len(gpus))
        if (links[i][j] is None or links[j][i] is None) and not gpus[i].error and not gpus[j].error
    ]
    if not pairs:
        return []
    calls = ("nvmlDeviceGetNvLinkCapability", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor")
    why = [f"{call} gave error {ask.refused[call]}" for call in calls if call in ask.refused]
    shown = ", ".join(pairs[:6]) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")
    return [f"the link of {shown}" + (f" ({'; '.join(why)})" if why else "")]


def main() -> int:
    """Worker of ``node.read_gpus``: a snapshot on stdout; or the reason on stderr, and exit 3 (no GPU) or 4 (sick)."""
    try:
        sys.stdout.write(dumps([read_nvml()]))
    except NvmlUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 3 if error.absent else 4
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
