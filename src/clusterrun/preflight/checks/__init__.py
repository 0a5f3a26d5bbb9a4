"""Judging the reports: small pure functions from what all nodes saw to findings.

A check yields one finding per node that it has something to say about. What a FAIL then does is policy
(``config.checks``), not the check's business. A check never passes because its command failed: that is UNKNOWN.
"""

from __future__ import annotations

from clusterrun.config.checks import made, made_slow
from clusterrun.preflight.checks.basic import BASIC
from clusterrun.preflight.checks.gpu import GPU
from clusterrun.preflight.checks.host import HOST
from clusterrun.preflight.checks.nic import NIC
from clusterrun.preflight.checks.slow import SLOW_CHECKS
from clusterrun.preflight.checks.wiring import WIRING
from clusterrun.preflight.evidence import Check, Evidence
from clusterrun.preflight.report import Finding

ALL: dict[str, Check] = {**BASIC, **HOST, **GPU, **WIRING, **NIC}


def check_all(evidence: Evidence) -> list[Finding]:
    """All (fast) checks that the configuration asks for, on all nodes, in a fixed order."""
    wanted = made(evidence.preflight.policy)
    return [finding for name in wanted for finding in ALL[name](evidence)]


def check_slow(evidence: Evidence) -> list[Finding]:
    """The same of the slow checks, on the nodes that were measured."""
    return [finding for name in made_slow(evidence.preflight.policy) for finding in SLOW_CHECKS[name](evidence)]
