"""From a preflight's findings to the nodes that later submissions should avoid."""

from __future__ import annotations

import time
from collections.abc import Sequence

from clusterrun.config.checks import Policy, policies
from clusterrun.config.schema import PreflightConfig
from clusterrun.launch.exclusions import Exclusion
from clusterrun.preflight.decide import is_fatal
from clusterrun.preflight.report import Finding, NodeReport, Verdict


def to_exclude(
    findings: Sequence[Finding],
    reports: dict[str, NodeReport],
    settings: PreflightConfig,
    *,
    cluster: str,
    run_id: str,
) -> list[Exclusion]:
    """The nodes whose fatal findings speak against the node, not against the declaration.

    When no node passes a check that has several to judge, the configuration is wrong (a PCIe box declared as NVSwitch),
    and listing every node of the cluster would only hide that.
    """
    policy = policies(settings.policy)
    passed = {f.check for f in findings if f.verdict in (Verdict.PASS, Verdict.WARN)}
    now = time.time()
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        fatal = is_fatal(finding, policy.get(finding.check, Policy.fatal), strict=False)
        if fatal and finding.check in passed:
            found.setdefault(finding.node, []).append(finding)
    return [
        Exclusion(
            node=node,
            cluster=cluster,
            reason=f"{bad[0].check}: {bad[0].finding}",
            evidence=tuple(f"{f.check}: {f.finding}" for f in bad),
            gpus=_gpus(reports.get(node)),
            run_id=run_id,
            since=now,
            until=now + settings.exclude_for_h * 3600,
        )
        for node, bad in found.items()
    ]


def _gpus(report: NodeReport | None) -> tuple[str, ...]:
    facts = getattr(report, "gpus", None)
    if facts is None:
        return ()
    return tuple(" ".join(part for part in (gpu.uuid, gpu.serial) if part) for gpu in facts.health)
