"""A starter cluster configuration from what Slurm, and on a GPU node NVML and sysfs, say of this site.

What could not be seen is left at its default with a comment that says so, never guessed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import ConfigError, choices, nearest
from clusterrun.launch.gres import gpu_types, gpus
from clusterrun.launch.site import NodeKind, Partition, Site, listed
from clusterrun.topology.classify import WiringClass, classify
from clusterrun.topology.model import Topology

_WIRING = {
    WiringClass.NVLINK_PAIRS: "nvlink_pairs",
    WiringClass.PARTIAL_NVLINK_MESH: "nvlink_mesh",
    WiringClass.PCIE_SAME_SWITCH: "pcie",
    WiringClass.PCIE_SAME_SOCKET: "pcie",
    WiringClass.PCIE_CROSS_SOCKET: "pcie",
}


@dataclass(frozen=True)
class Draft:
    """The file, and the name it composes under."""

    name: str
    text: str


def choose_partition(site: Site, wanted: str | None) -> Partition:
    """The one asked for; else the default if it has GPUs; else the one with most GPUs; else the default.

    Raises:
        ConfigError: no such partition, or none at all.
    """
    names = [p.name for p in site.partitions]
    if wanted is not None:
        found = site.partition(wanted)
        if found is None:
            raise ConfigError(f"--partition {wanted}: no such one.{nearest(wanted, names)} Known: {choices(names)}")
        return found
    if not site.partitions:
        raise ConfigError("init: sinfo lists no partition that you may use")
    if site.default and site.default.gpus_per_node:
        return site.default
    with_gpus = [p for p in site.partitions if p.gpus_per_node]
    most = max(with_gpus, key=lambda p: sum(k.count * gpus(k.gres) for k in p.kinds), default=None)
    return most or site.default or site.partitions[0]


def draft(name: str, site: Site, partition: Partition, machine: Topology | None) -> Draft:
    """The YAML text. ``machine`` is this machine's wiring when it has GPUs, so that it may stand for the nodes."""
    kind = partition.gpu_kind or max(partition.kinds, key=lambda k: k.count)
    types = gpu_types(kind.gres)
    per_node = gpus(kind.gres)
    workers = per_node or max(1, min(4, kind.cpus))
    chosen = next(iter(types), None) if types else None
    here = machine if machine is not None and machine.gpus and len(machine.gpus) == per_node else None
    lines = [
        f"# {name}: written by `clusterrun init` from Slurm {site.version or '(version unknown)'}"
        f"{f' of cluster {site.name}' if site.name else ''}. Look through it and correct what it could not know.",
        *(f"# Not seen: {problem}" for problem in site.problems),
        *_others(site, partition),
        f"name: {name}",
        f"description: {_quoted(f'partition {partition.name}, {partition.gres_words}')}",
        "executor: slurm",
        f"nodes: {min(2, partition.max_nodes or 2, kind.count)} # of {kind.count} like this ({kind.usable} up now)"
        f"{f', at most {partition.max_nodes} a job' if partition.max_nodes is not None else ''}",
        f"gpus_per_node: {per_node}",
        f"nproc_per_node: {workers} # {'one worker per GPU' if per_node else 'no GPUs here: as many as you like'}",
        f"cpus_per_proc: {max(1, kind.cpus // workers)} # {kind.cpus} CPUs a node, {kind.memory_mb} MB of memory",
        f"accelerator: {'cuda' if per_node else 'cpu'}",
        *_model(here),
        *_interconnect(here),
        "# shared_dir: /shared/me/clusterrun  # on storage that all nodes see; default: CLUSTERRUN_SHARED_DIR",
        *_time(partition),
        "slurm:",
        f"  partition: {_quoted(partition.name)}{_starred(partition)}",
        *_account(site, partition),
        *_gpus(kind, types, chosen),
        *_features(partition),
    ]
    return Draft(name, "\n".join(lines) + "\n")


def _others(site: Site, own: Partition) -> list[str]:
    found = [
        f"# Partition {p.name}: {p.nodes} nodes, {p.gres_words}, up to {p.time_limit or 'any time'}"
        for p in site.partitions
        if p is not own
    ]
    more = [f"# ... and {len(found) - 12} more partitions (sinfo)"] if len(found) > 12 else []
    return [*found[:12], *more]


def _model(here: Topology | None) -> list[str]:
    models = {gpu.model for gpu in here.gpus if gpu.model} if here else set()
    if len(models) == 1:
        return [f"gpu_model: {_quoted(models.pop())} # as NVML names it on this machine"]
    return ["# gpu_model: NVIDIA A100-SXM4-80GB  # not seen from here; `nvidia-smi -L` on a GPU node says it"]


def _interconnect(here: Topology | None) -> list[str]:
    found = ["interconnect:"]
    if here is None:
        found += [
            "  intra_node: none # not seen from here: see `clusterrun topo` on a GPU node, then set",
            "  # nvswitch, nvlink_mesh, nvlink_pairs or pcie, so that preflight holds it against what it finds",
        ]
    else:
        found += _inside(here)
    nics = [nic for nic in here.nics if nic.state in (None, "ACTIVE") and nic.rate_gbit_s] if here else []
    layers = Counter(nic.link_layer for nic in nics)
    if nics and layers:
        layer = str(layers.most_common(1)[0][0] or "").lower()
        same = [nic for nic in nics if str(nic.link_layer or "").lower() == layer]
        rate = max(nic.rate_gbit_s or 0.0 for nic in same)
        found.append(
            f"  inter_node: {'infiniband' if layer == 'infiniband' else 'roce'} # as /sys/class/infiniband says"
        )
        found += [f"  nics_per_node: {len(same)}", f"  nic_gbit_per_s: {rate:g}"]
    else:
        found += [
            "  inter_node: ethernet # not seen from here: infiniband, roce, efa or ethernet",
            "  # nics_per_node: 4",
            "  # nic_gbit_per_s: 200  # of one port",
        ]
    return found


def _inside(here: Topology) -> list[str]:
    wiring = classify(here)
    if wiring.kind is WiringClass.FULL_NVLINK_MESH and wiring.best is not None:
        kind = "nvswitch" if len(here.gpus) > 4 else "nvlink_mesh"
        why = "every pair has NVLink" + ("" if kind == "nvswitch" else "; nvswitch if the board has switches")
        return [f"  intra_node: {kind} # {why}", f"  nvlinks_per_pair: {wiring.best.nvlinks}"]
    return [f"  intra_node: {_WIRING.get(wiring.kind, 'none')} # {wiring.kind.value} by NVML and sysfs"]


def _time(partition: Partition) -> list[str]:
    limit = partition.time_limit
    default = f", {partition.default_time} when nothing is asked for" if partition.default_time else ""
    if limit is None:
        return [f'time_limit: "24:00:00" # the partition has no limit{default}']
    return [f"time_limit: {_quoted(_normal(limit))} # the partition's limit{default}"]


def _normal(limit: str) -> str:
    """sinfo writes 30:00 for half an hour, which we refuse, as it could be 30 hours."""
    return f"00:{limit.zfill(5)}" if limit.count(":") == 1 and "-" not in limit else limit


def _starred(partition: Partition) -> str:
    closed = "" if partition.up else " # closed now"
    return " # the default" if partition.default else closed


def _account(site: Site, partition: Partition) -> list[str]:
    usable = [a for a in site.associations if not partition.accounts or a.account in partition.accounts]
    usable = [a for a in usable if a.partition in ("", partition.name)]
    if not usable:
        only = f"  # the partition takes only {', '.join(partition.accounts)}" if partition.accounts else ""
        return [f"  # account: myproject{only}", "  # qos: normal"]
    names = list(dict.fromkeys(a.account for a in usable))
    also = f" # also: {listed(names[1:])}" if len(names) > 1 else ""
    first = usable[0]
    qos = [q for q in first.qos if not partition.qos or q in partition.qos]
    return [
        f"  account: {_quoted(first.account)}{also}",
        f"  # qos: {first.default_qos or (qos[0] if qos else 'normal')}"
        f"{f'  # allowed with this account: {listed(qos)}' if qos else ''}",
    ]


def _gpus(kind: NodeKind, types: dict[str | None, int], chosen: str | None) -> list[str]:
    if not types:
        return ["  gpu_request: none # the nodes have no GPUs"]
    words = ", ".join(f"{count} x {name or 'untyped'}" for name, count in types.items())
    if chosen is None:
        return [f"  # gpu_type: the GPUs have no type here ({words})"]
    mixed = " (several types in one node: set gpus_per_node to what you ask for)" if len(types) > 1 else ""
    other = [f"{g.name}{f':{g.type}' if g.type else ''}:{g.count}" for g in kind.gres if g.name != "gpu"]
    beside = f"; beside: {', '.join(other)}" if other else ""
    return [f"  gpu_type: {_quoted(chosen)} # {words}{mixed}{beside}"]


def _features(partition: Partition) -> list[str]:
    found = list(dict.fromkeys(f for kind in partition.kinds for f in kind.features))
    return [f"  # constraint: {found[0]}  # features here: {listed(found)}"] if found else []


def _quoted(text: str) -> str:
    """JSON's strings are YAML's."""
    return json.dumps(text)


def write(text: str, path: Path, force: bool) -> None:
    """Raises ConfigError when it is there already."""
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; --force replaces it, --print only shows the new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
