"""Checks of what joins the GPUs of a node: wiring as declared pair by pair, NVLinks, fabric, peer-to-peer, IOMMU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterrun.config.schema import ClusterConfig, IntraNode
from clusterrun.config.user_dirs import user_config_dirs
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.rings import best_ring
from clusterrun.nccl.placing import link_rate
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
    topology_of,
    unread,
)
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.gpu_facts import GpuHealth
from clusterrun.preflight.report import Finding, Verdict
from clusterrun.topology.model import Link, LinkKind, Topology

#: Sum of a GPU's NVLink errors from which it fails (imbue: 5); any error at all is a warning (gcm: > 0).
NVLINK_ERRORS_MAX = 5
#: The least line rate of an NVLink in MB/s per direction, by compute capability (reference, section 2: links x GB/s).
#: Drivers show raw rates that are up to 6 % higher from Hopper on.
NVLINK_MB_S = {"6.0": 20_000, "7.0": 25_000, "8.0": 25_000, "8.6": 14_000, "9.0": 25_000, "10.0": 50_000}
_FABRIC_SINCE = "9.0"  # NVML reports the fabric's state from Hopper on
_EVERY_PAIR = (IntraNode.nvswitch, IntraNode.nvlink_mesh)
_NVLINK = (*_EVERY_PAIR, IntraNode.nvlink_pairs, IntraNode.nvlink_hybrid)


@dataclass(frozen=True)
class _Bad:
    """A pair that is not as declared."""

    pair: tuple[int, int]
    text: str  # "GPU5-GPU7: declared NV12, detected SYS"
    verdict: Verdict = FAIL


def wiring_as_declared(e: Evidence) -> Iterator[Finding]:
    """Every pair of GPUs joined as cluster.interconnect says."""
    declared = e.cluster.interconnect.intra_node
    if declared is IntraNode.none:
        return
    for node, report in judged(e):
        found = topology_of(report)
        if report.gpus is None or found is None or not found.gpus:
            yield unread("wiring_as_declared", node, report.gpus)
            continue
        if len(found.gpus) < 2:
            yield Finding("wiring_as_declared", node, UNKNOWN, "one GPU only: no pair to compare")
            continue
        bad, unknown = _compare(found, declared, e.cluster.interconnect.nvlinks_per_pair)
        wrong = [one for one in bad if one.verdict is FAIL]
        if wrong:
            blamed = culprits([one.pair for one in wrong], len(found.gpus))
            text = several([one.text for one in wrong], ", ")
            if blamed:
                names = [_named(report.gpus.health, gpu) for gpu in blamed]
                text += f"; likely culprit: {', '.join(names)}"
            text += _cost(found, declared, e.cluster)
            advice = "a dead or missing link: see nvlinks_up and dmesg; or the declaration is of another kind of node"
            yield Finding("wiring_as_declared", node, FAIL, text, advice)
        elif unknown:
            text = f"the link of {several(unknown, ', ')} is not known"
            yield Finding("wiring_as_declared", node, UNKNOWN, text, "; ".join(found.missing[:1]))
        elif bad:
            advice = "declare what is there: cluster.interconnect.intra_node and nvlinks_per_pair"
            yield Finding("wiring_as_declared", node, WARN, several([one.text for one in bad], ", "), advice)
        else:
            pairs = len(found.pairs())
            yield Finding("wiring_as_declared", node, PASS, f"all {pairs} pairs as declared ({declared.value})")


def _cost(found: Topology, declared: IntraNode, cluster: ClusterConfig) -> str:
    """What it costs: the best ring over the detected links against the declared one. Empty where that is not known."""
    model = cluster.gpu_model or found.gpus[0].model
    catalog = Catalog(user_config_dirs())
    gpu = catalog.find_gpu(model) if model else None
    links = cluster.interconnect.nvlinks_per_pair
    if gpu is None or gpu[1].link is None or declared not in _EVERY_PAIR or links is None:
        return ""
    parameters, figures = catalog.parameters(), gpu[1]
    now = best_ring([[link_rate(link, figures, parameters) for link in row] for row in found.links])
    wanted = link_rate(Link(LinkKind.NVLINK, links), figures, parameters)
    if not now:
        return ""
    if now >= wanted:
        return "; predicted: a ring of all GPUs can go around it"
    return f"; predicted: a ring of all GPUs carries {now:.3g} instead of {wanted:.3g} GB/s"


def _compare(found: Topology, declared: IntraNode, count: int | None) -> tuple[list[_Bad], list[str]]:
    """Pairs that differ from the declaration, and those that can't be judged."""
    unknown = [f"GPU{i}-GPU{j}" for i, j, link in found.pairs() if link is None]
    if declared is IntraNode.nvlink_hybrid:
        return _compare_hybrid(found, unknown), unknown
    if declared is IntraNode.nvlink_pairs:
        return _compare_pairs(found, count, unknown), unknown
    bad = []
    for i, j, link in found.pairs():
        if link is None:
            continue
        if declared is IntraNode.pcie:
            wanted, verdict = "PCIe only", WARN if link.is_nvlink else PASS
        else:
            wanted = f"NV{count}" if count else "NVLink"
            short = not link.is_nvlink or (count is not None and link.nvlinks < count)
            more = count is not None and link.nvlinks > count
            verdict = FAIL if short else WARN if more else PASS
        if verdict is not PASS:
            bad.append(_Bad((i, j), f"GPU{i}-GPU{j}: declared {wanted}, detected {link}", verdict))
    return bad, unknown


def _compare_pairs(found: Topology, count: int | None, unknown: list[str]) -> list[_Bad]:
    """Bridges: each GPU has exactly one NVLink partner. With an unknown link a partner can't be ruled out."""
    wanted = f"NV{count}" if count else "one NVLink partner"
    bad = []
    joined = [(i, j, link) for i, j, link in found.pairs() if link is not None and link.is_nvlink]
    for at in range(len(found.gpus)):
        partners = [j if i == at else i for i, j, _ in joined if at in (i, j)]
        if len(partners) > 1:
            names = ", ".join(f"GPU{other}" for other in partners)
            text = f"GPU{at}: declared one NVLink partner, detected {len(partners)} ({names})"
            bad.append(_Bad((at, at), text, WARN))
        elif not partners and not any(f"GPU{at}" in pair.split("-") for pair in unknown):
            best = max(
                (link for i, j, link in found.pairs() if at in (i, j) and link), key=lambda k: k.rank, default=None
            )
            bad.append(_Bad((at, at), f"GPU{at}: declared {wanted}, detected {best or 'no other GPU'} at best"))
    for i, j, link in joined:
        if count is not None and link.nvlinks != count:
            verdict = FAIL if link.nvlinks < count else WARN
            bad.append(_Bad((i, j), f"GPU{i}-GPU{j}: declared NV{count}, detected {link}", verdict))
    return bad


def _compare_hybrid(found: Topology, unknown: list[str]) -> list[_Bad]:
    """The hybrid cube mesh of 8 GPUs: two quads wired fully, each GPU with one partner in the other quad, and two
    of its four partners over two links (NVIDIA DGX-1 System Architecture, V100: 6 links a GPU, 16 pairs, 8 NV2).

    Machines number their GPUs differently, so what counts is each GPU: 4 NVLink partners, of 6 links together.
    """
    if len(found.gpus) != 8:
        text = f"declared nvlink_hybrid, which has 8 GPUs; detected {len(found.gpus)}"
        return [_Bad((0, 0), text)]
    bad = []
    for at in range(8):
        links = {j if i == at else i: link for i, j, link in found.pairs() if at in (i, j) and link and link.is_nvlink}
        total = sum(link.nvlinks for link in links.values())
        if any(f"GPU{at}" in pair.split("-") for pair in unknown):
            continue  # a partner can't be ruled out
        if len(links) != 4 or total != 6:
            shown = ", ".join(f"GPU{other} {link}" for other, link in sorted(links.items())) or "none"
            verdict = FAIL if len(links) < 4 or total < 6 else WARN
            bad.append(_Bad((at, at), f"GPU{at}: declared 4 NVLink partners over 6 links, detected {shown}", verdict))
    return bad


def culprits(pairs: Sequence[tuple[int, int]], gpus: int) -> list[int]:
    """The GPUs that explain the bad pairs: one that all share, or those whose pairs are all bad; [] if unclear."""
    if len(pairs) < 2:
        return []
    shared = set(pairs[0]).intersection(*pairs[1:])
    if shared:
        return sorted(shared)
    number = {at: sum(at in pair for pair in pairs) for at in range(gpus)}
    whole = [at for at in range(gpus) if number[at] == gpus - 1]
    explained = all(set(pair) & set(whole) for pair in pairs)
    return whole if explained and len(whole) <= gpus // 2 else []


def _named(health: Sequence[GpuHealth], index: int) -> str:
    return next((label(gpu) for gpu in health if gpu.index == index), f"GPU{index}")


def _nvlinks_up(gpu: GpuHealth, peers: Peers) -> Said:
    """As many NVLinks up as declared and as on the peers; behind NVSwitch and in a mesh none that is not up.

    Bridged PCIe cards have ports that lead nowhere by design, so there only the count matters.
    """
    wiring = peers.evidence.cluster.interconnect
    if wiring.intra_node not in _NVLINK:
        return None  # wiring_as_declared says when there is NVLink nevertheless
    if gpu.ports_up is None or gpu.ports_down is None:
        return UNKNOWN, "NVLinks not known"
    up, down = len(gpu.ports_up), gpu.ports_down if wiring.intra_node in _EVERY_PAIR else ()
    wanted = max(wiring.nvlinks_per_pair or 1, peers.usual(gpu, "ports_up"))
    if up < wanted or down:
        ports = several([*map(str, gpu.ports_down)], ", ")
        total = max(wanted, up + len(down))
        return FAIL, f"{up} of {total} NVLinks up" + (f", not up: {ports}" if ports else "")
    return (
        (UNKNOWN, f"state of {len(gpu.ports_unknown)} NVLinks not known")
        if gpu.ports_unknown
        else (PASS, f"{up} NVLinks up")
    )


def _nvlink_speed(gpu: GpuHealth, peers: Peers) -> Said:
    """Every NVLink at the rate of its generation, and none slower than the GPU's others."""
    if gpu.link_mb_s == () or (gpu.link_mb_s is None and peers.evidence.cluster.interconnect.intra_node not in _NVLINK):
        return None
    known = [speed for speed in gpu.link_mb_s or () if speed is not None]
    if gpu.link_mb_s is None or not known:
        return UNKNOWN, "NVLink speed not known"
    wanted = max(NVLINK_MB_S.get(gpu.capability or "", 0), *known)
    low = NVLINK_MB_S.get(gpu.capability or "", wanted) if min(known) == max(known) else wanted
    slow = [f"{link}" for link, s in zip(gpu.ports_up or (), gpu.link_mb_s, strict=False) if s is not None and s < low]
    if slow:
        return FAIL, f"NVLink {several(slow, ', ')} at {min(known) / 1000:g} of {wanted / 1000:g} GB/s"
    if len(known) < len(gpu.link_mb_s):
        return UNKNOWN, f"speed of {len(gpu.link_mb_s) - len(known)} NVLinks not known"
    return PASS, f"NVLinks at {min(known) / 1000:g} GB/s"


def _nvlink_errors(gpu: GpuHealth, peers: Peers) -> Said:
    """CRC, replay and recovery counters of the NVLinks, since the driver was loaded."""
    if gpu.ports_up == () or (gpu.ports_up is None and peers.evidence.cluster.interconnect.intra_node not in _NVLINK):
        return None
    counters = {
        "CRC flit": gpu.link_crc_flit,
        "CRC data": gpu.link_crc_data,
        "replay": gpu.link_replay,
        "recovery": gpu.link_recovery,
    }
    seen = {name: value for name, value in counters.items() if value}
    total = sum(seen.values())
    if total:
        text = "NVLink errors: " + ", ".join(f"{name} {value}" for name, value in seen.items())
        return (FAIL if total >= NVLINK_ERRORS_MAX else WARN), text
    unknown = [name for name, value in counters.items() if value is None]
    if unknown:
        return UNKNOWN, f"NVLink error counters not known ({', '.join(unknown)})"
    return PASS, "no NVLink error"


def _fabric(gpu: GpuHealth, peers: Peers) -> Said:
    """The NVSwitch fabric is set up and healthy: until the fabric manager is done, CUDA does not start."""
    if gpu.fabric_ok is not None and gpu.fabric is not None:
        if gpu.fabric_ok:
            return PASS, "fabric completed"
        return FAIL, f"fabric {gpu.fabric}" + (f": {', '.join(gpu.fabric_faults)}" if gpu.fabric_faults else "")
    if peers.evidence.cluster.interconnect.intra_node is not IntraNode.nvswitch or gpu.fabric == "not_supported":
        return None
    before = gpu.capability is not None and float(gpu.capability) < float(_FABRIC_SINCE)
    return None if before else (UNKNOWN, "fabric state not known")


def p2p(e: Evidence) -> Iterator[Finding]:
    """Peer-to-peer both ways on every NVLink pair: NCCL itself stops without. Over PCIe it depends on the model."""
    for node, report in judged(e):
        found = topology_of(report)
        if report.gpus is None or found is None or not found.gpus or found.p2p is None:
            yield unread("p2p", node, report.gpus)
            continue
        refused, unknown, over_pcie = [], [], 0
        for i, j, link in found.pairs():
            ways = (found.p2p[i][j], found.p2p[j][i])
            name = f"GPU{i}-GPU{j}"
            if found.gpus[i].error or found.gpus[j].error:
                continue  # gpu_lost says so
            if link is not None and link.kind is LinkKind.NVLINK and False in ways:
                refused.append(f"{name} ({link})" + ("" if ways == (False, False) else " one way"))
            elif None in ways:
                unknown.append(name)
            elif False in ways:
                over_pcie += 1
        if refused:
            text = f"no peer-to-peer over NVLink: {several(refused, ', ')}"
            yield Finding("p2p", node, FAIL, text, "NCCL will refuse this; see dmesg, fabric and iommu_acs")
        elif unknown:
            yield Finding("p2p", node, UNKNOWN, f"peer-to-peer of {several(unknown, ', ')} not known")
        else:
            note = f"; {over_pcie} PCIe pairs without (data goes through host memory)" if over_pcie else ""
            yield Finding("p2p", node, PASS, f"peer-to-peer works where NVLink is{note}")


def iommu_acs(e: Evidence) -> Iterator[Finding]:
    """A hint: with a translating IOMMU, PCIe access control sends GPU and NIC traffic through the root complex."""
    for node, report in judged(e):
        facts = report.gpus
        if facts is None or facts.iommu_groups is None or facts.iommu_options is None:
            yield Finding("iommu_acs", node, UNKNOWN, "IOMMU state not known")
        elif facts.iommu_groups == 0:
            yield Finding("iommu_acs", node, PASS, "IOMMU off")
        elif {"iommu=pt", "iommu.passthrough=1"} & set(facts.iommu_options):
            yield Finding("iommu_acs", node, PASS, "IOMMU passes through")
        else:
            text = f"IOMMU on ({facts.iommu_groups} groups) without iommu=pt"
            advice = "GPU peer-to-peer and GPUDirect may be slow or hang: iommu=pt, and ACS off on PCIe switches"
            yield Finding("iommu_acs", node, WARN, text, advice)


WIRING: dict[str, Check] = {
    "wiring_as_declared": wiring_as_declared,
    "nvlinks_up": gpu_check("nvlinks_up", _nvlinks_up, "reset the GPU; a link that stays down needs service"),
    "nvlink_speed": gpu_check("nvlink_speed", _nvlink_speed, "reset the GPU; a link that stays slow needs service"),
    "nvlink_errors": gpu_check("nvlink_errors", _nvlink_errors, "a link that keeps counting needs service"),
    "fabric": gpu_check("fabric", _fabric, "is nvidia-fabricmanager running, of the driver's own version?"),
    "p2p": p2p,
    "iommu_acs": iommu_acs,
}
