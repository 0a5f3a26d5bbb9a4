"""From findings to the nodes that train."""

from __future__ import annotations

from collections.abc import Sequence

from clusterrun.preflight.report import Decision, Finding, Verdict


def decide(nodes: Sequence[str], findings: Sequence[Finding], wanted: int, *, strict: bool) -> Decision:
    """Choose the first ``wanted`` nodes without a fatal finding, in allocation order.

    With ``strict`` an UNKNOWN is fatal. Fewer than wanted may be chosen; the caller decides what that means.
    """
    fatal = {Verdict.FAIL, Verdict.UNKNOWN} if strict else {Verdict.FAIL}
    bad: dict[str, str] = {}
    for finding in findings:
        if finding.verdict in fatal:
            bad.setdefault(finding.node, f"{finding.check}: {finding.finding}")
    healthy = [node for node in nodes if node not in bad]
    return Decision(chosen=tuple(healthy[:wanted]), bad=bad, findings=tuple(findings))
