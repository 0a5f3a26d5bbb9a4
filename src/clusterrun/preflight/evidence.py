"""Everything the checks may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from clusterrun.config.schema import ClusterConfig, PreflightConfig
from clusterrun.preflight.report import Finding, NodeReport
from clusterrun.preflight.slow import SlowEvidence


@dataclass(frozen=True)
class Evidence:
    """All reports of one preflight.

    Attributes:
        nodes: allocated nodes, in Slurm's order.
        reports: of those that answered.
        window: unix time on the conductor's host before the step and after it.
        slow: what the slow checks measured; None when they were not made (yet).
    """

    nodes: tuple[str, ...]
    reports: Mapping[str, NodeReport]
    cluster: ClusterConfig
    preflight: PreflightConfig
    window: tuple[float, float]
    slow: SlowEvidence | None = None


Check = Callable[[Evidence], Iterator[Finding]]
