"""What two nodes of four GPUs could have told preflight, sound or with a fault, and what the checks say of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from clusterrun.config.checks import made
from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    InterconnectConfig,
    InterNode,
    IntraNode,
    PreflightConfig,
)
from clusterrun.preflight.checks.gpu import GPU
from clusterrun.preflight.checks.nic import NIC
from clusterrun.preflight.checks.wiring import WIRING
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, GpuHealth
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.topology import snapshot
from clusterrun.topology.model import SELF, Gpu, Link, LinkKind, Nic, Topology

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
OURS = {**GPU, **WIRING, **NIC}
COUNT = 4
MODEL = "NVIDIA H100 80GB HBM3"
NV18, PIX, PHB, SYS = Link(LinkKind.NVLINK, 18), Link(LinkKind.PIX), Link(LinkKind.PHB), Link(LinkKind.SYS)
Links = dict[tuple[int, int], Link | None]

SOUND = GpuHealth(
    index=0,
    model=MODEL,
    capability="9.0",
    pcie_gen=1,
    pcie_gen_max=5,
    pcie_width=16,
    pcie_width_max=16,
    pcie_replays=0,
    ecc_on=True,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    recovery_action=0,
    throttle=1,
    power_limit_w=700.0,
    power_default_w=700.0,
    temperature_c=30,
    slowdown_c=89,
    margin_c=57,
    persistence=True,
    mig=False,
    pids=(),
    memory_used_bytes=0,
    clock_sm_mhz=1980,
    clock_memory_mhz=2619,
    ports_up=tuple(range(18)),
    ports_down=(),
    ports_unknown=(),
    link_mb_s=(26_562,) * 18,
    link_replay=0,
    link_recovery=0,
    link_crc_flit=0,
    link_crc_data=0,
    fabric="completed",
    fabric_ok=True,
)
CLUSTER = ClusterConfig(
    gpus_per_node=COUNT,
    nproc_per_node=COUNT,
    gpu_model=MODEL,
    accelerator=Accelerator.cuda,
    interconnect=InterconnectConfig(IntraNode.nvswitch, 18, InterNode.infiniband, COUNT, 400.0),
)


def matrix(default: Any, changed: dict[tuple[int, int], Any], diagonal: Any) -> Any:
    """Rows of a matrix; ``changed`` holds single cells, (row, column)."""
    cells = range(COUNT)
    return tuple(tuple(diagonal if i == j else changed.get((i, j), default) for j in cells) for i in cells)


def topology(links: Links | None = None, p2p: Any = None, nic: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Four GPUs on NVSwitch, a NIC beside each; ``nic`` changes the second NIC."""
    nics = [
        Nic(f"NIC{n}", f"mlx5_{n}", tuple(PIX if n == g else SYS for g in range(COUNT)), (), 400.0, "InfiniBand",
            "ACTIVE", "LinkUp")
        for n in range(COUNT)
    ]  # fmt: skip
    nics[1] = dataclasses.replace(nics[1], **(nic or {}))
    whole = {
        "gpus": tuple(Gpu(f"GPU{i}", i, model=MODEL) for i in range(COUNT)),
        "links": matrix(NV18, {**(links or {}), **{(j, i): link for (i, j), link in (links or {}).items()}}, SELF),
        "nics": tuple(nics),
        "p2p": matrix(True, dict(p2p or {}), None),
        **changed,
    }
    return json.loads(json.dumps(snapshot.plain(Topology(**whole))))


def evidence(
    gpu1: dict[str, Any] | None = None,
    every: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    wiring: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **preflight: Any,
) -> Evidence:
    """Nodes c1 and c2; on c2 GPU1, every GPU, the facts or the report are changed as said."""
    health = [dataclasses.replace(SOUND, index=i, uuid=f"GPU-{i}", serial=str(900 + i)) for i in range(COUNT)]
    good = GpuFacts(topology(), tuple(health), "550.54", "12.4", "2.27.3", 0, (), COUNT)
    other = [dataclasses.replace(one, **(every or {}), **((gpu1 or {}) if one.index == 1 else {})) for one in health]
    bad = dataclasses.replace(good, **{"health": tuple(other), **(facts or {})})
    none: dict[str, Any] = {f.name: None for f in dataclasses.fields(NodeReport)}
    reports = {
        "c1": NodeReport(**{**none, "node": "c1", "gpus": good}),
        "c2": NodeReport(**{**none, "node": "c2", "gpus": bad, **(report or {})}),
    }
    declared = dataclasses.replace(
        CLUSTER, interconnect=dataclasses.replace(CLUSTER.interconnect, **(wiring or {})), **(cluster or {})
    )
    return Evidence(("c1", "c2"), reports, declared, PreflightConfig(**preflight), (0.0, 1.0))


def found(check: str, e: Evidence, node: str = "c2") -> Finding | None:
    (one,) = [f for f in OURS[check](e) if f.node == node] or [None]
    return one


def said(check: str, e: Evidence, node: str = "c2") -> Finding:
    one = found(check, e, node)
    assert one is not None, "no finding"
    return one


def verdict(check: str, e: Evidence) -> Verdict | None:
    one = found(check, e)
    return one.verdict if one else None


def all_found(e: Evidence) -> list[Finding]:
    """By the checks of this page that the configuration asks for."""
    return [f for name in made(e.preflight.policy) if name in OURS for f in OURS[name](e)]
