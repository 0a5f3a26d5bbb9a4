"""Checks of the network adapters against cluster.interconnect: link layer, number, state, rate, and who is near a GPU.

NICs are the RDMA devices below /sys/class/infiniband; plain Ethernet adapters are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from clusterrun.config.schema import InterNode
from clusterrun.preflight.checks.per_gpu import FAIL, PASS, UNKNOWN, WARN, judged, several, topology_of, unread
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.report import Finding, Verdict
from clusterrun.topology.classify import classify
from clusterrun.topology.model import Nic, Topology

#: What sysfs calls the link layer of each kind of network. EFA devices say "Unspecified" (Linux's efa driver).
LAYERS = {InterNode.infiniband: "InfiniBand", InterNode.roce: "Ethernet", InterNode.efa: "Unspecified"}
RATE_TOLERANCE = 0.99  # rates are nominal: "56 Gb/sec (4X FDR)"
GPUS_PER_NIC = 2  # with fewer NICs than one for two GPUs, some GPUs are far from any by design (DGX A100: 8 to 8)

Told = tuple[Verdict, str, str]  # verdict, finding, advice


def nic_check(name: str, judge: Callable[[Evidence, Topology, list[Nic]], Told | None], *, all_nics: bool) -> Check:
    """A check of a node's NICs; those of another link layer (storage, management) are left aside unless all_nics."""

    def check(e: Evidence) -> Iterator[Finding]:
        wiring = e.cluster.interconnect
        for node, report in judged(e):
            if wiring.inter_node is InterNode.none:
                continue
            if wiring.inter_node is InterNode.ethernet:
                if wiring.nics_per_node is not None or wiring.nic_gbit_per_s is not None:
                    yield Finding(name, node, UNKNOWN, "plain Ethernet NICs are not looked at")
                continue
            found = topology_of(report)
            if found is None:
                yield unread(name, node, report.gpus)
                continue
            layer = LAYERS[wiring.inter_node]
            told = judge(e, found, [nic for nic in found.nics if all_nics or nic.link_layer == layer])
            if told is not None:
                yield Finding(name, node, *told)

    check.__doc__ = judge.__doc__
    return check


def _names(nics: Sequence[Nic]) -> str:
    return several([nic.device or nic.name for nic in nics], ", ")


def _layer(e: Evidence, found: Topology, nics: list[Nic]) -> Told | None:
    """As many NICs as declared speak the declared link layer."""
    wiring = e.cluster.interconnect
    layer = LAYERS[wiring.inter_node]
    right = [nic for nic in nics if nic.link_layer == layer]
    other = [nic for nic in nics if nic.link_layer not in (layer, None)]
    silent = [nic for nic in nics if nic.link_layer is None]
    wanted = wiring.nics_per_node or 1
    if len(right) >= wanted:
        return PASS, f"{len(right)} NICs on {layer}", ""
    if silent or not nics:
        return UNKNOWN, f"link layer of {_names(silent) or 'any NIC'} not known", ""
    if not other:
        return PASS, f"{len(right)} NICs on {layer}", ""  # too few of them is nic_count's business
    seen = several([f"{nic.device or nic.name} {nic.link_layer}" for nic in other], ", ")
    advice = "set the port's link type (mlxconfig LINK_TYPE), or cluster.interconnect.inter_node"
    return FAIL, f"declared {wiring.inter_node.value}, detected {seen}", advice


def _count(e: Evidence, found: Topology, nics: list[Nic]) -> Told | None:
    """As many NICs as declared; more are fine (storage)."""
    wanted = e.cluster.interconnect.nics_per_node
    if len(found.nics) < (wanted or 1):
        detected = f"{len(found.nics)} ({_names(found.nics)})" if found.nics else "none"
        advice = "see lspci and dmesg: is the adapter's driver loaded?"
        return FAIL, f"declared {wanted or 'RDMA'} NICs, detected {detected}", advice
    return PASS, f"{len(found.nics)} NICs", ""


def _state(e: Evidence, found: Topology, nics: list[Nic]) -> Told | None:
    """As many NICs as declared are ACTIVE with the link up; without a declared number all should be."""
    if not nics:
        return UNKNOWN, "no NIC of the declared kind to judge", ""
    down = [nic for nic in nics if nic.state not in ("ACTIVE", None) or nic.physical_state not in ("LinkUp", None)]
    silent = [nic for nic in nics if nic not in down and (nic.state is None or nic.physical_state is None)]
    wanted = e.cluster.interconnect.nics_per_node
    good = len(nics) - len(down) - len(silent)
    said = several([f"{nic.device or nic.name} {nic.state}/{nic.physical_state}" for nic in down], ", ")
    if wanted is not None and good >= wanted:
        return PASS, f"{good} NICs active" + (f"; not used: {said}" if down else ""), ""
    if down and (wanted is None or good + len(silent) < wanted):
        advice = "check cable, port and subnet manager (ibstat)"
        return (WARN if wanted is None and good else FAIL), f"not up: {said}", advice
    if silent:
        return UNKNOWN, f"state of {_names(silent)} not known", ""
    return PASS, f"{good} NICs active", ""  # too few of them is nic_count's business


def _rate(e: Evidence, found: Topology, nics: list[Nic]) -> Told | None:
    """As many NICs as declared run at the declared rate; without one, all at the same."""
    if not nics:
        return UNKNOWN, "no NIC of the declared kind to judge", ""
    up = [nic for nic in nics if nic.state in ("ACTIVE", None)]
    rates = [nic.rate_gbit_s for nic in up if nic.rate_gbit_s is not None]
    if not rates:
        return UNKNOWN, f"rate of {_names(nics)} not known", ""
    wiring = e.cluster.interconnect
    declared = wiring.nic_gbit_per_s
    rate = max(rates) if declared is None else declared
    slow = [nic for nic in up if nic.rate_gbit_s is not None and nic.rate_gbit_s < rate * RATE_TOLERANCE]
    good = len(rates) - len(slow)
    if slow and (wiring.nics_per_node is None or good < wiring.nics_per_node):
        detected = several([f"{nic.device or nic.name} at {nic.rate_gbit_s:g}" for nic in slow], ", ")
        known = f"declared {rate:g} Gbit/s" if declared is not None else f"others at {rate:g} Gbit/s"
        return (FAIL if declared is not None else WARN), f"{known}, detected {detected}", "check cable and switch port"
    if len(rates) < len(up) and good < (wiring.nics_per_node or len(up)):
        return UNKNOWN, f"rate of {_names([nic for nic in up if nic.rate_gbit_s is None])} not known", ""
    return PASS, f"{good} NICs at {rate:g} Gbit/s or more", ""


def _affinity(e: Evidence, found: Topology, nics: list[Nic]) -> Told | None:
    """Each GPU has a NIC behind its own PCIe switch (PIX or PXB), as GPUDirect RDMA wants it (NCCL 2.30.7)."""
    if not found.gpus or not nics:
        return UNKNOWN, "no GPU or no NIC of the declared kind to judge", ""
    if len(nics) * GPUS_PER_NIC < len(found.gpus):
        return PASS, f"{len(nics)} NICs for {len(found.gpus)} GPUs: not all are near one by design", ""
    if any(path is None for nic in nics for path in nic.links) or any(not nic.links for nic in nics):
        return UNKNOWN, "paths from GPUs to NICs not known", ""
    # Two-port cards and NICs for storage are among the NICs: any of the declared kind will do.
    near = Topology(gpus=found.gpus, links=found.links, nics=tuple(nics))
    far = classify(near).far_from_nics
    if far:
        names = several([f"GPU{at}" for at in far], ", ")
        advice = "their traffic crosses the CPU; a NIC or riser in another slot than on its peers?"
        return WARN, f"{names} without a NIC at PIX or PXB", advice
    return PASS, "every GPU has a NIC at PIX or PXB", ""


NIC: dict[str, Check] = {
    "nic_count": nic_check("nic_count", _count, all_nics=True),
    "nic_link_layer": nic_check("nic_link_layer", _layer, all_nics=True),
    "nic_state": nic_check("nic_state", _state, all_nics=False),
    "nic_rate": nic_check("nic_rate", _rate, all_nics=False),
    "nic_affinity": nic_check("nic_affinity", _affinity, all_nics=False),
}
