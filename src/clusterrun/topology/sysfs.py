"""Reader of /sys: RDMA NICs with their ports, PCI ancestry, NUMA nodes. Every function takes the root of the tree.

NVML knows nothing about NICs; their distance to a GPU comes from the PCI bridges that both sit below, as in
``nvidia-smi topo -m``. A file that is absent or empty is an unknown fact (None), never a default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterrun.topology.grammar import expand
from clusterrun.topology.model import SELF, Link, LinkKind, Nic

SYS = Path("/sys")

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_BUS_ID = re.compile(r"(?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA, _DISPLAY, _3D = "0x10de", "0x0300", "0x0302"


@dataclass(frozen=True)
class PciPlace:
    """Where a PCI function sits.

    Attributes:
        path: host bridge first, then each bridge, then the function itself.
        numa: its NUMA node; None when the kernel says -1.
    """

    path: tuple[str, ...]
    numa: int | None


def read_text(path: Path) -> str | None:
    """Content of a one-line file without its line end; None when it is absent, unreadable or empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def bus_id(text: str) -> str:
    """A PCI address in the form of sysfs: NVML writes 00000000:07:00.0, sysfs 0000:07:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch(r"[0-9a-f]{4,8}", domain) else text.strip().lower()


def host_numa(root: Path = SYS) -> tuple[int, ...]:
    """NUMA nodes that are online; empty when the kernel does not say."""
    return expand(read_text(root / "devices/system/node/online") or "")


def place(address: str, root: Path = SYS) -> PciPlace | None:
    """Where the function with this bus id sits, or None when it is not in this tree (containers, WSL)."""
    link = root / "bus/pci/devices" / bus_id(address)
    return _place(link) if link.exists() else None


def _place(device: Path) -> PciPlace | None:
    parts = device.resolve().parts
    start = next((at for at, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if start is None:
        return None
    numa = read_text(device / "numa_node")
    return PciPlace(parts[start:], int(numa) if numa and numa.isdigit() else None)


def local_cpus(address: str, root: Path = SYS) -> str | None:
    """CPU list near a PCI function, as the kernel prints it."""
    return read_text(root / "bus/pci/devices" / bus_id(address) / "local_cpulist")


def distance(one: PciPlace | None, other: PciPlace | None, numa_nodes: Sequence[int] = ()) -> Link | None:
    """The path between two PCI functions; None when it can't be known.

    Same host bridge and a common bridge below it: PIX when neither has more than one bridge below the common one (a
    PCIe switch is two bridges: its upstream port and one downstream port), else PXB. Same host bridge only: PHB.
    Different host bridges: NODE within a NUMA node, SYS between them.
    """
    if one is None or other is None:
        return None
    a, b = one.path, other.path
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    if common == 0:
        if one.numa is None or other.numa is None:
            return Link(LinkKind.NODE) if len(numa_nodes) == 1 else None
        return Link(LinkKind.NODE if one.numa == other.numa else LinkKind.SYS)
    if common == len(a) == len(b):
        return SELF
    if common == 1 and _function(a[1]) != _function(b[1]):
        return Link(LinkKind.PHB)
    between = max(len(a), len(b)) - common - 1  # bridges below the common one, on the longer side
    return Link(LinkKind.PIX if between <= 1 else LinkKind.PXB)


def _function(address: str) -> str:
    """A device without its function number: two ports of one card share it, also directly on a host bridge."""
    return address.rpartition(".")[0]


def read_nics(root: Path = SYS) -> list[tuple[Nic, PciPlace | None]]:
    """RDMA devices in natural order (mlx5_10 after mlx5_9), each with its place on PCI (None for software devices)."""
    base = root / "class/infiniband"
    try:
        names = sorted((entry.name for entry in base.iterdir()), key=_natural)
    except OSError:
        return []
    found = []
    for number, name in enumerate(names):
        device = base / name / "device"
        where = _place(device) if device.exists() else None
        numa = where.numa if where else None
        address = where.path[-1] if where and _BUS_ID.fullmatch(where.path[-1]) else None
        nic = Nic(name=f"NIC{number}", device=name, numa=numa, bus_id=address)
        found.append((_with_port(nic, base / name / "ports"), where))
    return found


def with_paths(
    nics: Sequence[tuple[Nic, PciPlace | None]], gpus: Sequence[PciPlace | None], numa_nodes: Sequence[int]
) -> tuple[Nic, ...]:
    """The NICs with their paths to each GPU and to one another."""
    places = [where for _, where in nics]
    return tuple(
        replace(
            nic,
            links=tuple(distance(where, gpu, numa_nodes) for gpu in gpus),
            nic_links=tuple(
                SELF if at == number else distance(where, other, numa_nodes) for at, other in enumerate(places)
            ),
        )
        for number, (nic, where) in enumerate(nics)
    )


def nvidia_functions(root: Path = SYS) -> list[str]:
    """Bus ids of NVIDIA GPUs on PCI, also when no driver is loaded."""
    try:
        devices = sorted((root / "bus/pci/devices").iterdir())
    except OSError:
        return []
    return [
        device.name
        for device in devices
        if read_text(device / "vendor") == _NVIDIA and (read_text(device / "class") or "")[:6] in (_DISPLAY, _3D)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def _with_port(nic: Nic, ports: Path) -> Nic:
    """The NIC with the facts of its best port: active before inactive, then the faster one."""
    try:
        numbers = sorted(ports.iterdir(), key=lambda port: _natural(port.name))
    except OSError:
        return nic
    read = []
    for port in numbers:
        rate = re.match(r"([\d.]+)", read_text(port / "rate") or "")
        read.append(
            replace(
                nic,
                rate_gbit_s=float(rate[1]) if rate else None,
                link_layer=read_text(port / "link_layer"),
                state=_word(read_text(port / "state")),
                physical_state=_word(read_text(port / "phys_state")),
            )
        )
    return max(read, key=lambda one: (one.state == "ACTIVE", one.rate_gbit_s or 0.0)) if read else nic


def _word(text: str | None) -> str | None:
    """ "4: ACTIVE" is ACTIVE."""
    return text.partition(":")[2].strip() or text if text else None
