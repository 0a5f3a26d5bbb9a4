"""The preflight step: ask every node, judge the answers, choose the nodes, write it all down."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from clusterrun import frames
from clusterrun.config.schema import RunConfig
from clusterrun.launch.plan import preflight_argv, step_environment
from clusterrun.launch.steps import Step, StepRunner, StepSpec
from clusterrun.preflight.checks import check_all
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import FRAME, Decision, NodeReport, Verdict
from clusterrun.rundir import AttemptDir, RunDir, write_durably

_POLL_S = 0.05
_END_PATIENCE_S = 10.0  # for the step to end after every node has answered


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
) -> Preflight:
    """One preflight over all nodes of the allocation, spares included."""
    nodes = steps.nodes()
    out, err = attempt.step_output("preflight")
    token = secrets.token_hex(8)
    write_durably(attempt.token, token)
    argv = preflight_argv(config, run, attempt.number, steps.head_address(), token)
    reader = frames.FileReader(FRAME, out)
    begin = time.time()
    step = steps.start(StepSpec("preflight", nodes, argv, out, err, step_environment(config)))
    deadline = time.monotonic() + config.preflight.timeout_s
    while step.poll() is None and time.monotonic() < deadline and not told_to_stop():
        reader.poll()
        if len(reader.nodes) == len(nodes):
            break  # srun itself takes a moment longer to end
        time.sleep(_POLL_S)
    reader.poll()
    answers = {n: NodeReport.from_json(value) for n, value in reader.messages().items() if n in nodes}
    end = time.time()
    findings = check_all(Evidence(tuple(nodes), answers, config.cluster, config.preflight, (begin, end)))
    decision = decide(nodes, findings, config.cluster.nodes, config.preflight, steps.switches())
    _write(attempt, nodes, answers, decision)
    for finding in findings:
        if finding.verdict is not Verdict.PASS:
            say(f"preflight: {finding}")
    say(
        f"preflight: {len(answers)} of {len(nodes)} nodes answered in {end - begin:.1f} s; "
        f"chosen: {', '.join(decision.chosen) or 'none'}"
    )
    _finish(step, patience_s=_END_PATIENCE_S if len(answers) == len(nodes) else 0.0)
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


def _finish(step: Step, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while step.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    if step.poll() is None:
        step.kill()
