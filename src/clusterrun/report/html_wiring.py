"""The wiring of the nodes as a picture: declared beside detected, pair by pair; the cluster's nodes where no GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from clusterrun.config.schema import ClusterConfig, InterNode, IntraNode
from clusterrun.report import svg
from clusterrun.report.html_page import badge, table
from clusterrun.topology.classify import classify
from clusterrun.topology.model import Link, LinkKind, Topology

# Link -> colour of the chart palette: NVLink blue, PCIe switch green, host bridge amber, across sockets vermilion.
_COLOUR = {
    LinkKind.NVLINK: 0,
    LinkKind.PIX: 2,
    LinkKind.PXB: 2,
    LinkKind.PHB: 3,
    LinkKind.NODE: 3,
    LinkKind.SYS: 1,
}
_WORDS = {
    LinkKind.NVLINK: "NVLink",
    LinkKind.PIX: "one PCIe switch (PIX)",
    LinkKind.PXB: "several PCIe switches (PXB)",
    LinkKind.PHB: "host bridge (PHB)",
    LinkKind.NODE: "across host bridges (NODE)",
    LinkKind.SYS: "across sockets (SYS)",
}
_UNKNOWN = 7
_MOST_GPUS = 16


def wiring_html(cluster: ClusterConfig, detected: Mapping[str, Topology]) -> str:
    """Declared against detected. Nodes with the same wiring share one picture."""
    wiring = cluster.interconnect
    told = _declared_text(cluster)
    with_gpus = {node: topology for node, topology in detected.items() if topology.gpus}
    if not with_gpus:
        if cluster.gpus_per_node and wiring.intra_node is not IntraNode.none:
            return f"<p>Declared: {escape(told)}.</p><p>Detected: nothing, no node reported its GPUs.</p>"
        return f"<p>Declared: {escape(told)}. No GPU wiring was looked for.</p>"
    alike: dict[str, list[str]] = {}
    for node, topology in with_gpus.items():
        alike.setdefault(repr(topology.links), []).append(node)
    count = cluster.gpus_per_node
    figures = [_figure(f"declared: {told}", _declared_graph(cluster, count))] if 1 < count <= _MOST_GPUS else []
    rows = []
    seen: set[LinkKind | None] = set()
    for nodes in alike.values():
        topology = with_gpus[nodes[0]]
        unlike = _unlike(cluster, topology)
        where = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
        found = classify(topology)
        if len(topology.gpus) <= _MOST_GPUS:
            figures.append(_figure(f"detected on {where}", _detected_graph(topology, unlike, where)))
        seen |= {None if link is None else link.kind for _, _, link in topology.pairs()}
        verdict = badge("as declared", "good") if not unlike else badge(f"{len(unlike)} pairs differ", "bad")
        worst = "-" if found.worst is None else str(found.worst)
        differs = ", ".join(f"GPU{i}-GPU{j}: {_word(topology.link(i, j))}" for i, j in sorted(unlike)[:6])
        models = ", ".join(dict.fromkeys(gpu.model or "?" for gpu in topology.gpus))
        rows.append(
            (
                escape(where),
                f"{len(topology.gpus)} x {escape(models)}",
                escape(found.kind.value.replace("_", " ")),
                escape(worst),
                verdict + (f"<br>{escape(differs)}" if differs else ""),
            )
        )
    shown = [kind for kind in sorted(k for k in seen if k is not None) if kind in _COLOUR]
    names = [(_COLOUR[kind], _WORDS[kind]) for kind in reversed(shown)] + (
        [(_UNKNOWN, "unknown")] if None in seen else []
    )
    columns = ("nodes", "GPUs", "detected", "worst link", "against the declaration")
    return f'{svg.legend(names)}<div class="graphs">{"".join(figures)}</div>' + table(
        columns, rows, label="wiring by node"
    )


def _declared_text(cluster: ClusterConfig) -> str:
    inside, outside = inside_text(cluster), outside_text(cluster)
    return f"{inside} in a node" + (f", {outside} between nodes" if outside else "")


def inside_text(cluster: ClusterConfig) -> str:
    """The declared wiring in a node."""
    wiring = cluster.interconnect
    inside = {
        IntraNode.none: "no GPU links",
        IntraNode.pcie: "PCIe only",
        IntraNode.nvswitch: "NVSwitch",
        IntraNode.nvlink_mesh: "NVLink between all pairs",
        IntraNode.nvlink_pairs: "NVLink in pairs",
        IntraNode.nvlink_hybrid: "NVLink as a hybrid cube mesh",
    }[wiring.intra_node]
    if wiring.nvlinks_per_pair and wiring.intra_node not in (IntraNode.none, IntraNode.pcie):
        inside += f" (NV{wiring.nvlinks_per_pair})"
    return inside


def outside_text(cluster: ClusterConfig) -> str:
    """The declared network between nodes, "" without one."""
    wiring = cluster.interconnect
    if wiring.inter_node is InterNode.none:
        return ""
    nics = f"{wiring.nics_per_node} x " if wiring.nics_per_node else ""
    rate = f"{wiring.nic_gbit_per_s:g} Gbit/s " if wiring.nic_gbit_per_s else ""
    return f"{nics}{rate}{wiring.inter_node.value}"


def _figure(caption: str, picture: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _declared_graph(cluster: ClusterConfig, count: int) -> str:
    wiring = cluster.interconnect
    edges = []
    for i in range(count):
        for j in range(i + 1, count):
            nvlink = (
                wiring.intra_node in (IntraNode.nvswitch, IntraNode.nvlink_mesh)
                or (wiring.intra_node is IntraNode.nvlink_pairs and j == i + 1 and i % 2 == 0)
                # two quads, joined corner by corner (NVIDIA DGX-1 System Architecture)
                or (wiring.intra_node is IntraNode.nvlink_hybrid and (i // 4 == j // 4 or j - i == 4))
            )
            if nvlink:
                text = f"GPU{i}-GPU{j}: NV{wiring.nvlinks_per_pair or '?'}"
                edges.append((i, j, "c0", text))
            elif wiring.intra_node is IntraNode.pcie:
                edges.append((i, j, "c2", f"GPU{i}-GPU{j}: PCIe"))
    return svg.graph("declared wiring of a node", [f"{i}" for i in range(count)], edges)


def _detected_graph(topology: Topology, unlike: set[tuple[int, int]], where: str) -> str:
    edges = []
    for i, j, link in topology.pairs():
        colour = _UNKNOWN if link is None else _COLOUR.get(link.kind, _UNKNOWN)
        marked = " unlike" if (i, j) in unlike else ""
        edges.append((i, j, f"c{colour}{marked}", f"GPU{i}-GPU{j}: {_word(link)}"))
    edges.sort(key=lambda e: "unlike" in e[2])  # what differs is drawn last, on top
    return svg.graph(f"detected wiring of {where}", [f"{i}" for i in range(len(topology.gpus))], edges)


def _unlike(cluster: ClusterConfig, topology: Topology) -> set[tuple[int, int]]:
    """Pairs that are not as declared. What is unknown does not differ."""
    wiring, found = cluster.interconnect, set()
    for i, j, link in topology.pairs():
        if link is None:
            continue
        every = wiring.intra_node in (IntraNode.nvswitch, IntraNode.nvlink_mesh)
        other = link.is_nvlink and wiring.nvlinks_per_pair and str(link) != f"NV{wiring.nvlinks_per_pair}"
        if (every and not link.is_nvlink) or other or (wiring.intra_node is IntraNode.pcie and link.is_nvlink):
            found.add((i, j))
    return found


def _word(link: Link | None) -> str:
    return "unknown" if link is None else str(link)
