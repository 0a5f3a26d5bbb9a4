"""The slow checks (preflight=full): what was measured, held against the peers. Who is slow is named, not only that
something is."""

from __future__ import annotations

from collections.abc import Iterator

from clusterrun.measure.results import IMPORT, WAIT
from clusterrun.preflight.checks.per_gpu import several
from clusterrun.preflight.checks.slow_between import between_nodes
from clusterrun.preflight.checks.slow_device import copy_speed, gemm_speed, pcie_under_load
from clusterrun.preflight.checks.slow_node import all_reduce_in_node, gpu_pairs
from clusterrun.preflight.checks.slow_parts import FAIL, PASS, RETRY, UNKNOWN, at, rank_name
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.report import Finding


def measured(e: Evidence) -> Iterator[Finding]:
    """Every node answered, and what did not come to an end is another check's business."""
    for node in e.slow.asked if e.slow else ():
        said = e.slow.local.get(node) if e.slow else None
        if said is None:
            yield Finding("measured", node, FAIL, "the slow checks did not answer; they were killed", RETRY)
            continue
        broken = [one for one in said.stuck if one.what in (IMPORT, WAIT)]
        if broken:
            text = several([f"{rank_name(e, node, one.local)}: {at(one)}: {one.why}" for one in broken], "; ")
            yield Finding("measured", node, UNKNOWN, text, RETRY)
        else:
            yield Finding("measured", node, PASS, "all parts ended")


SLOW_CHECKS: dict[str, Check] = {
    "measured": measured,
    "gemm_speed": gemm_speed,
    "copy_speed": copy_speed,
    "pcie_under_load": pcie_under_load,
    "all_reduce_in_node": all_reduce_in_node,
    "gpu_pairs": gpu_pairs,
    "between_nodes": between_nodes,
}
