"""The preflight step: ask every node, judge the answers, choose the nodes, write it all down."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from clusterrun.config.schema import RunConfig
from clusterrun.launch.asking import ask
from clusterrun.launch.commands import preflight_argv, step_environment
from clusterrun.launch.slow_preflight import SlowPreflight
from clusterrun.launch.steps import StepRunner, StepSpec
from clusterrun.preflight.checks import check_all, check_slow
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import FRAME, Decision, NodeReport, Verdict
from clusterrun.rundir import AttemptDir, RunDir, write_durably


@dataclass(frozen=True)
class Preflight:
    """What came of it. ``reports`` holds those nodes that answered."""

    decision: Decision
    reports: dict[str, NodeReport]

    @property
    def chosen(self) -> list[NodeReport]:
        return [self.reports[node] for node in self.decision.chosen]


def run_preflight(
    run: RunDir,
    config: RunConfig,
    attempt: AttemptDir,
    steps: StepRunner,
    *,
    say: Callable[[str], None],
    told_to_stop: Callable[[], bool],
    nodes: list[str],
) -> Preflight:
    """One preflight over ``nodes``, spares included."""
    out, err = attempt.step_output("preflight")
    token = secrets.token_hex(8)
    write_durably(attempt.token(token), token)
    argv = preflight_argv(config, run, attempt.number, steps.head_address(), token)
    spec = StepSpec("preflight", nodes, argv, out, err, step_environment(config))
    begin = time.time()
    answers = {
        n: NodeReport.from_json(value)
        for n, value in ask(steps, spec, FRAME, config.preflight.timeout_s, told_to_stop).items()
    }
    end = time.time()
    evidence = Evidence(tuple(nodes), answers, config.cluster, config.preflight, (begin, end))
    findings = check_all(evidence)
    switches = steps.switches()
    decision = decide(nodes, findings, config.cluster.nodes, config.preflight, switches)
    if config.preflight.full and not told_to_stop():
        healthy = [node for node in nodes if node in answers and node not in decision.bad]
        slow = SlowPreflight(config, attempt, steps, evidence, say, told_to_stop).run(healthy)
        findings += check_slow(replace(evidence, slow=slow))
        decision = decide(nodes, findings, config.cluster.nodes, config.preflight, switches)
        end = time.time()
    _write(attempt, nodes, answers, decision)
    for finding in findings:
        if finding.verdict is not Verdict.PASS:
            say(f"preflight: {finding}")
    say(
        f"preflight: {len(answers)} of {len(nodes)} nodes answered in {end - begin:.1f} s; "
        f"chosen: {', '.join(decision.chosen) or 'none'}"
    )
    return Preflight(decision, answers)


def _write(attempt: AttemptDir, nodes: list[str], answers: dict[str, NodeReport], decision: Decision) -> None:
    """One file per node: what it reported, what was found, whether it was chosen."""
    for node in nodes:
        value = {
            "report": asdict(answers[node]) if node in answers else None,
            "findings": [f.as_json() for f in decision.findings if f.node == node],
            "chosen": node in decision.chosen,
            "refused": decision.bad.get(node),
        }
        write_durably(attempt.report(node), json.dumps(value, indent=1))
