"""Nodes that preflight refused, remembered per cluster in the shared directory: later submissions avoid them.

    <shared_dir>/excluded/<cluster>/<node>.json

One file per node, replaced as a whole: conductors of several runs may write at the same time, and the last word counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterrun.config.checks import Policy, policies
from clusterrun.config.schema import PreflightConfig, RunConfig
from clusterrun.preflight.decide import is_fatal
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.rundir import make_private, write_durably


@dataclass(frozen=True)
class Exclusion:
    """Why a node is left out, and until when.

    Attributes:
        evidence: every fatal finding on it.
        gpus: uuid and serial of its GPUs, so that a replaced card can be told from the bad one.
        since, until: unix time.
    """

    node: str
    cluster: str
    reason: str
    evidence: tuple[str, ...]
    gpus: tuple[str, ...]
    run_id: str
    since: float
    until: float


@dataclass(frozen=True)
class Exclusions:
    """The list of one cluster."""

    shared_dir: Path
    cluster: str

    @property
    def directory(self) -> Path:
        return self.shared_dir / "excluded" / self.cluster

    def all(self) -> list[Exclusion]:
        """What is listed and has not expired, by node name. Unreadable entries are passed over: they exclude nobody."""
        found = []
        for path in sorted(self.directory.glob("*.json")):
            try:
                value: dict[str, Any] = json.loads(path.read_text())
                entry = Exclusion(**{**value, "evidence": tuple(value["evidence"]), "gpus": tuple(value["gpus"])})
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if entry.until > time.time():
                found.append(entry)
        return found

    def add(self, entry: Exclusion) -> None:
        make_private(self.shared_dir / "excluded")
        make_private(self.directory)
        write_durably(self.directory / f"{entry.node}.json", json.dumps(asdict(entry), indent=1))

    def forgive(self, node: str) -> bool:
        """Take a node off the list. False when it was not on it."""
        path = self.directory / f"{node}.json"
        if "/" in node or not path.exists():
            return False
        path.unlink()
        return True


def of(config: RunConfig) -> Exclusions:
    """The list that belongs to a (validated) configuration."""
    return Exclusions(Path(config.cluster.shared_dir), config.cluster.name)


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
