"""From findings to the nodes that train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from clusterrun.config.checks import Policy, policies
from clusterrun.config.schema import PreflightConfig
from clusterrun.preflight.report import Decision, Finding, Verdict


def decide(
    nodes: Sequence[str],
    findings: Sequence[Finding],
    wanted: int,
    settings: PreflightConfig,
    switches: Mapping[str, str] | None = None,
) -> Decision:
    """Choose ``wanted`` nodes without a fatal finding, on as few leaf switches as possible, in allocation order.

    Fatal is a FAIL of a check whose policy is fatal; with ``strict`` its UNKNOWN is fatal too. Fewer than wanted may be
    chosen; the caller decides what that means.
    """
    policy = policies(settings.policy)
    bad: dict[str, str] = {}
    for finding in findings:
        if is_fatal(finding, policy.get(finding.check, Policy.fatal), strict=settings.strict):
            bad.setdefault(finding.node, f"{finding.check}: {finding.finding}")
    healthy = [node for node in nodes if node not in bad]
    return Decision(chosen=tuple(_nearest(healthy, wanted, switches or {})), bad=bad, findings=tuple(findings))


def _nearest(healthy: list[str], wanted: int, switches: Mapping[str, str]) -> list[str]:
    """Whole switches first, the fullest before the others: traffic within a leaf switch crosses one hop."""
    if len(healthy) <= wanted or not switches:
        return healthy[:wanted]
    sizes = Counter(switches.get(node, "") for node in healthy)
    by_switch = sorted(healthy, key=lambda node: (-sizes[switches.get(node, "")], switches.get(node, "")))
    chosen = set(by_switch[:wanted])
    return [node for node in healthy if node in chosen]


def is_fatal(finding: Finding, policy: Policy, *, strict: bool) -> bool:
    """Whether this finding keeps its node from training."""
    if policy is not Policy.fatal:
        return False
    return finding.verdict is Verdict.FAIL or (strict and finding.verdict is Verdict.UNKNOWN)
