"""One or two lines of advice, computed from the facts of a Wiring; nothing is said that the matrix does not show."""

from __future__ import annotations

from collections.abc import Iterable

from clusterrun.topology.classify import Wiring, WiringClass
from clusterrun.topology.model import LinkKind, Topology

_MAX_NAMED = 4  # pairs or groups named in a line before "and N more"


def advise(topology: Topology, wiring: Wiring) -> list[str]:
    """At most two lines, the most important first."""
    lines = [line for line in (_weak(topology, wiring), _shape(topology, wiring), _nics(topology, wiring)) if line]
    return lines[:2]


def names(topology: Topology, group: Iterable[int]) -> str:
    """GPU names of a group, three or more in a row as a range: "GPU0-GPU3+GPU6"."""
    runs: list[list[int]] = []
    for gpu in sorted(group):
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    parts = [[run[0], run[-1]] if len(run) > 2 else run for run in runs]
    return "+".join(
        ("-" if len(run) > 2 else "+").join(topology.gpus[at].name for at in part)
        for run, part in zip(runs, parts, strict=True)
    )


def groups(topology: Topology, parts: Iterable[Iterable[int]]) -> str:
    """Several groups in a line, the first few of them by name."""
    listed = [names(topology, part) for part in parts]
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return " | ".join(listed[:_MAX_NAMED]) + more


def weak_pairs(topology: Topology, wiring: Wiring) -> str:
    """The degraded pairs with what they have: "GPU0-GPU2 NV10"."""
    shown = [
        f"{topology.gpus[pair.gpus[0]].name}-{topology.gpus[pair.gpus[1]].name} {pair.link}"
        for pair in wiring.weak[:_MAX_NAMED]
    ]
    more = f" and {len(wiring.weak) - _MAX_NAMED} more" if len(wiring.weak) > _MAX_NAMED else ""
    return ", ".join(shown) + more


def _weak(topology: Topology, wiring: Wiring) -> str:
    if not wiring.weak:
        return ""
    if wiring.weak_gpus:
        worst = min((pair.link for pair in wiring.weak), key=lambda link: link.rank)
        who = names(topology, wiring.weak_gpus)
        index = topology.gpus[wiring.weak_gpus[0]].index
        return (
            f"{who}: {worst} where {wiring.weak[0].expected} is expected, so NVLinks are down or off; "
            f"see `nvidia-smi nvlink -s -i {index}`"
        )
    return (
        f"fewer NVLinks than the {wiring.weak[0].expected} of other pairs: {weak_pairs(topology, wiring)}; "
        "a link is down or a bridge is missing: see `nvidia-smi nvlink -s`"
    )


def _shape(topology: Topology, wiring: Wiring) -> str:
    size, kind = len(topology.gpus), wiring.kind
    if kind is WiringClass.FULL_NVLINK_MESH:
        if wiring.unknown:
            return f"every pair that is shown has NVLink ({wiring.worst}); not shown: {len(wiring.unknown)}"
        return f"every pair has NVLink ({wiring.worst}): tensor parallel over any of the {size} GPUs stays on NVLink"
    if kind is WiringClass.PARTIAL_NVLINK_MESH:
        gap = _gap(wiring)
        if len(wiring.islands) > 1:
            islands = groups(topology, wiring.islands)
            return f"NVLink islands {islands}: keep tensor parallel inside one; between them {gap}"
        return f"NVLink joins all GPUs but not every pair (else {gap}): order ranks along NVLink neighbours"
    if kind is WiringClass.NVLINK_PAIRS:
        return (
            f"NVLink only within {groups(topology, wiring.pairs)}: tensor parallel of 2 on those pairs; "
            f"everything else goes over {_gap(wiring)}"
        )
    if kind is WiringClass.PCIE_CROSS_SOCKET:
        parts = [group for group in wiring.islands if len(group) > 1] or [g for g in wiring.sockets if len(g) > 1]
        inside = f"; closest groups: {groups(topology, parts)}" if parts and len(parts[0]) < size else ""
        return f"no NVLink, and {len(wiring.cross_socket)} of {size * (size - 1) // 2} pairs cross sockets{inside}"
    if kind in (WiringClass.PCIE_SAME_SOCKET, WiringClass.PCIE_SAME_SWITCH):
        parts = [group for group in wiring.islands if len(group) > 1]
        inside = f"; switch groups: {groups(topology, parts)}" if parts and len(parts[0]) < size else ""
        where = "one PCIe switch" if kind is WiringClass.PCIE_SAME_SWITCH else f"PCIe, worst path {wiring.worst}"
        return f"no NVLink: every pair over {where}{inside}; prefer data parallel to tensor parallel"
    return ""


def _gap(wiring: Wiring) -> str:
    return str(wiring.worst) if wiring.worst is not None and not wiring.worst.is_nvlink else "links that are not shown"


def _nics(topology: Topology, wiring: Wiring) -> str:
    if not wiring.far_from_nics:
        return ""
    kinds = [
        max((path.kind for path in (nic.links[at] for nic in topology.nics) if path is not None), default=LinkKind.SYS)
        for at in wiring.far_from_nics
    ]
    best = max(kinds).name
    return (
        f"no NIC nearer than {best} to {names(topology, wiring.far_from_nics)}: "
        "NCCL uses GPUDirect RDMA only at PIX or PXB, so their traffic between nodes goes through host memory"
    )
