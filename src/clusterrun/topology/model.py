"""Frozen values that say how the GPUs and NICs of one node are wired.

Every reader (pasted text, NVML, sysfs, recorded snapshot) gives these values. ``None`` means "not known" everywhere:
a reader that could not find a fact out leaves None, never a default that looks like a measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from clusterrun.errors import ClusterrunError, ExitCode


class TopologyError(ClusterrunError):
    """The input is not a topology, or can't be read as one. The message says what it is instead."""

    exit_code = ExitCode.BAD_CONFIG


class LinkKind(IntEnum):
    """What lies between two devices; a larger value is a better path (legend of ``nvidia-smi topo -m``)."""

    SYS = 0  # PCIe and the interconnect between NUMA nodes (QPI/UPI)
    NODE = 1  # PCIe and the interconnect between host bridges of one NUMA node
    PHB = 2  # PCIe and one host bridge
    PXB = 3  # several PCIe bridges, no host bridge
    PIX = 4  # at most one PCIe bridge
    NVLINK = 5
    SELF = 6


_NVLINK = re.compile(r"NV(\d{1,2})")


@dataclass(frozen=True)
class Link:
    """One cell of the matrix.

    Attributes:
        kind: what lies between the two.
        nvlinks: how many NVLinks are bonded; 0 unless kind is NVLINK.
        spelling: "SOC" when an old driver wrote SYS that way. It is shown, and does not take part in comparison.
    """

    kind: LinkKind
    nvlinks: int = 0
    spelling: str = field(default="", compare=False)

    @classmethod
    def parse(cls, token: str) -> Link | None:
        """The link that a token names, or None when the token is not in the grammar."""
        if token == "SOC":
            return cls(LinkKind.SYS, spelling="SOC")
        if token == "X":
            return cls(LinkKind.SELF)
        match = _NVLINK.fullmatch(token)
        if match:
            # NV0 would mean "NVLink without links": no driver prints it, so it is not in the grammar.
            return cls(LinkKind.NVLINK, int(match[1])) if int(match[1]) else None
        if token in ("SYS", "NODE", "PHB", "PXB", "PIX"):
            return cls(LinkKind[token])
        return None

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts links from worst to best: by kind, then by the number of NVLinks."""
        return (int(self.kind), self.nvlinks)

    @property
    def is_nvlink(self) -> bool:
        return self.kind is LinkKind.NVLINK

    def __str__(self) -> str:
        if self.kind is LinkKind.NVLINK:
            return f"NV{self.nvlinks}"
        return "X" if self.kind is LinkKind.SELF else (self.spelling or self.kind.name)


SELF = Link(LinkKind.SELF)


@dataclass(frozen=True)
class NvLinkPort:
    """One NVLink port of a GPU, as NVML describes it.

    Attributes:
        link: port number on this GPU, from 0.
        active: True when the link is up; None when the driver does not say.
        remote: what is at the other end: "gpu", "switch", "ibmnpu", or None when not known.
        remote_bus_id: PCI bus id at the other end, in the form of sysfs; None when the driver hides it (NVSwitch).
        version: NVLink generation as NVML counts it (1 to 7), or None.
        speed_mb_s: raw line rate per direction in MB/s (NVML field NVLINK_SPEED_MBPS), or None.
    """

    link: int
    active: bool | None
    remote: str | None = None
    remote_bus_id: str | None = None
    version: int | None = None
    speed_mb_s: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as ``nvidia-smi topo -m`` names it, "GPU0".
        index: position in PCI bus id order (NVML's index), not CUDA's device ordinal.
        cpu_affinity: CPU list such as "0-31,64-95".
        numa: NUMA nodes of the CPUs near this GPU.
        gpu_numa_id: NUMA node of the GPU's own memory (Grace), None elsewhere.
        uuid, bus_id, model, serial: identity; bus_id in the form of sysfs ("0000:07:00.0").
        memory_bytes: total memory.
        pcie_gen, pcie_width: current link; only meaningful under load, as links downshift when idle.
        pcie_gen_max, pcie_width_max: what GPU and slot can do together.
        mig: True when MIG mode is on.
        fabric: state of the NVSwitch fabric ("completed", "in_progress", "not_started", "not_supported"), or None.
        fabric_ok: True when the fabric is completed without error; None when not supported or not known.
        fabric_faults: names of the fabric health bits that are bad.
        ports: NVLink ports that can reach a peer; empty when the GPU has none, None when not known.
        error: why this GPU could not be read (fallen off the bus, reset required), or None.
    """

    name: str
    index: int
    cpu_affinity: str | None = None
    numa: tuple[int, ...] = ()
    gpu_numa_id: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    model: str | None = None
    serial: str | None = None
    memory_bytes: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    mig: bool | None = None
    fabric: str | None = None
    fabric_ok: bool | None = None
    fabric_faults: tuple[str, ...] = ()
    ports: tuple[NvLinkPort, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Nic:
    """One network adapter port that RDMA can use.

    Attributes:
        name: column in the matrix: "NIC0", or the device name.
        device: device name below /sys/class/infiniband, when known.
        links: path to each GPU, in the order of Topology.gpus.
        nic_links: path to each NIC, in the order of Topology.nics.
        rate_gbit_s: line rate in Gbit/s ("200 Gb/sec (4X HDR)" is 200).
        link_layer: "InfiniBand" or "Ethernet".
        state: logical state, "ACTIVE" when usable; physical_state: "LinkUp" when the cable works.
        numa: NUMA node; bus_id: PCI address.
    """

    name: str
    device: str | None = None
    links: tuple[Link | None, ...] = ()
    nic_links: tuple[Link | None, ...] = ()
    rate_gbit_s: float | None = None
    link_layer: str | None = None
    state: str | None = None
    physical_state: str | None = None
    numa: int | None = None
    bus_id: str | None = None


@dataclass(frozen=True)
class Topology:
    """One machine.

    Attributes:
        gpus, nics: in the order of the columns.
        links: links[i][j] is the path from GPU i to GPU j as read; None where not known.
        source: "text", "nvml", "sysfs" or the name of what it was read from.
        name: host or heading, when the source gives one.
        missing: what could not be read, one phrase each; empty means complete.
        notes: what a reader should know and that does not make the matrix incomplete.
        host_numa: NUMA nodes that the host has (sysfs), when known.
        p2p: p2p[i][j] is True when peer reads work (NVML), or None as a whole when not asked.
        driver: driver version.
    """

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[Link | None, ...], ...]
    nics: tuple[Nic, ...] = ()
    source: str = "text"
    name: str | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    host_numa: tuple[int, ...] = ()
    p2p: tuple[tuple[bool | None, ...], ...] | None = None
    driver: str | None = None

    def __post_init__(self) -> None:
        size = len(self.gpus)
        if len(self.links) != size or any(len(row) != size for row in self.links):
            raise TopologyError(f"the link matrix is not square: {size} GPUs, rows of {[len(r) for r in self.links]}")

    @property
    def complete(self) -> bool:
        """True when nothing is missing."""
        return not self.missing

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """NUMA nodes near any GPU, sorted; empty when the source does not say."""
        return tuple(sorted({node for gpu in self.gpus for node in gpu.numa}))

    def link(self, i: int, j: int) -> Link | None:
        """The path between two GPUs: the worse of the two directions when they differ (a fault of the source)."""
        known = [link for link in (self.links[i][j], self.links[j][i]) if link is not None]
        return min(known, key=lambda link: link.rank) if known else None

    def pairs(self) -> list[tuple[int, int, Link | None]]:
        """Every unordered pair of GPUs with its path."""
        size = len(self.gpus)
        return [(i, j, self.link(i, j)) for i in range(size) for j in range(i + 1, size)]
