"""The JSON of ``clusterrun topo --json``: facts and conclusions of each machine, in plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterrun.topology.advice import advise
from clusterrun.topology.classify import classify
from clusterrun.topology.model import Gpu, Link, Nic, Topology


def document(machines: Sequence[Topology]) -> dict[str, Any]:
    """``{"machines": [...]}``; links are tokens, unknown is null, GPUs are named by position in the matrix."""
    return {"machines": [_machine(machine) for machine in machines]}


def _token(link: Link | None) -> str | None:
    return None if link is None else str(link)


def _machine(topology: Topology) -> dict[str, Any]:
    wiring = classify(topology)
    return {
        "name": topology.name,
        "source": topology.source,
        "gpus": len(topology.gpus),
        "class": wiring.kind.value,
        "worst_link": _token(wiring.worst),
        "best_link": _token(wiring.best),
        "nics": len(topology.nics),
        "numa_nodes": list(topology.numa_nodes),
        "complete": topology.complete,
        "missing": list(topology.missing),
        "links": [[_token(link) for link in row] for row in topology.links],
        "islands": [list(group) for group in wiring.islands],
        "sockets": [list(group) for group in wiring.sockets],
        "nvlink_pairs": [list(pair) for pair in wiring.pairs],
        "cross_socket_pairs": [list(pair) for pair in wiring.cross_socket],
        "degraded_pairs": [
            {"gpus": list(pair.gpus), "link": str(pair.link), "expected": str(pair.expected)} for pair in wiring.weak
        ],
        "degraded_gpus": list(wiring.weak_gpus),
        "gpus_without_near_nic": list(wiring.far_from_nics),
        "gpu_list": [_gpu(gpu) for gpu in topology.gpus],
        "nic_list": [_nic(nic) for nic in topology.nics],
        "host_numa_nodes": list(topology.host_numa),
        "p2p": topology.p2p,
        "driver": topology.driver,
        "notes": list(topology.notes),
        "advice": advise(topology, wiring),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    entry = {key: value for key, value in vars(gpu).items() if key != "ports" and value is not None}
    entry["numa"] = list(gpu.numa)
    entry["fabric_faults"] = list(gpu.fabric_faults)
    if gpu.ports:
        entry["nvlinks_up"] = sum(port.active is True for port in gpu.ports)
        entry["nvlinks_down"] = [port.link for port in gpu.ports if port.active is False]
    return entry


def _nic(nic: Nic) -> dict[str, Any]:
    entry = {k: v for k, v in vars(nic).items() if k not in ("links", "nic_links") and v is not None}
    entry["links"] = [_token(link) for link in nic.links]
    return entry
