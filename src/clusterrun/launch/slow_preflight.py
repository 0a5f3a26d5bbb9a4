"""The slow checks of preflight=full: each node by itself, the nodes with each other, then again whoever looks slow.

Steps, each of which ends by itself and is killed if it does not:

1. ``preflight-node``: matrix products, copies, all-reduce in the node and each pair of it; ``preflight-second``: the
   same once more on nodes that were slow.
2. ``preflight-pairs``: the nodes whose own part is sound, neighbours in a ring in pairs, all in one process group.
3. ``preflight-again``: a suspect with a node that is fast, in a group of the two alone, first all ranks, then rank by
   rank: that tells a node from the path to it, and one GPU or NIC from the whole node.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from clusterrun.config.checks import Policy, policies
from clusterrun.config.schema import Accelerator, RunConfig
from clusterrun.launch.asking import ask
from clusterrun.launch.plan import slow_argv, step_environment
from clusterrun.launch.steps import StepRunner, StepSpec
from clusterrun.measure import groups
from clusterrun.measure.groups import NODE_PAIR, RAIL, Phase, ring_rounds, tournament
from clusterrun.measure.results import MEASURED, Job, NodeMeasured, Work, better_of
from clusterrun.preflight.checks import check_slow
from clusterrun.preflight.checks.slow import between
from clusterrun.preflight.decide import is_fatal
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Verdict
from clusterrun.preflight.slow import NodePair, SlowEvidence, node_pairs
from clusterrun.rundir import AttemptDir

# Bytes of an all-reduce: on a GPU in the range where the wire decides, on a CPU small enough for 100 Mbit/s.
_SIZE = {Accelerator.cuda: 64 * 2**20, Accelerator.cpu: 4 * 2**20}
_MOST_LOOKS = 3
_MOST_AGAIN = 3  # steps that look again; each is one round of disjoint pairs
_SPARE_S = 30.0  # for a step to start and end, beyond what its parts may take


@dataclass
class SlowPreflight:
    """One pass over the nodes that passed the fast checks."""

    config: RunConfig
    attempt: AttemptDir
    steps: StepRunner
    evidence: Evidence  # of the fast checks
    say: Callable[[str], None]
    told_to_stop: Callable[[], bool]
    _tried: set[tuple[str, ...]] = field(default_factory=set)  # pairs that were measured by themselves

    def run(self, nodes: Sequence[str]) -> SlowEvidence:
        """Everything that was measured on ``nodes`` (in allocation order)."""
        slow = SlowEvidence(asked=tuple(nodes))
        phases = groups.in_node_phases(self._per_node)
        # A node by itself tries again after a hang, _MOST_HANGS times in measure.node.
        local = self._step("node", nodes, self._work(phases, devices=True), parts=len(phases) + 6)
        slow = replace(slow, local=local)
        slow = self._second_look(slow)
        sound = [n for n in nodes if n in local and not local[n].stuck and not self._refused(slow, n)]
        if len(sound) < 2 or self.told_to_stop():
            return slow
        slow = replace(slow, paired=tuple(sound))
        slow = self._pairs(slow, sound)
        for _ in range(_MOST_AGAIN):
            again = self._doubtful(slow)
            if not again or self.told_to_stop():
                break
            slow = self._again(slow, again)
        return slow

    @property
    def _per_node(self) -> int:
        return self.config.cluster.nproc_per_node

    def _refused(self, slow: SlowEvidence, node: str) -> bool:
        policy = policies(self.config.preflight.policy)
        findings = check_slow(replace(self.evidence, slow=slow))
        strict = self.config.preflight.strict
        return any(f.node == node and is_fatal(f, policy.get(f.check, Policy.fatal), strict=strict) for f in findings)

    def _second_look(self, slow: SlowEvidence) -> SlowEvidence:
        """Nodes that were slow by themselves measure once more, alone: somebody else may have been busy on them.

        What hung is not tried again. A node that then does better may leave others behind: they get the same.
        """
        phases = groups.in_node_phases(self._per_node)
        seen: set[str] = set()
        for _ in range(_MOST_LOOKS):
            findings = check_slow(replace(self.evidence, slow=slow))
            failed = {finding.node for finding in findings if finding.verdict is Verdict.FAIL} - seen
            nodes = [node for node, said in slow.local.items() if node in failed and not said.stuck]
            if not nodes or self.told_to_stop():
                break
            seen.update(nodes)
            self.say(f"preflight: a second look at {', '.join(nodes)}")
            again = self._step("second", nodes, self._work(phases, devices=True), parts=len(phases) + 6)
            slow = replace(slow, local={**slow.local, **{n: better_of(slow.local[n], a) for n, a in again.items()}})
        return slow

    def _pairs(self, slow: SlowEvidence, nodes: Sequence[str]) -> SlowEvidence:
        """Neighbours in a ring; the rounds one after the other, the pairs of a round at once."""
        phases = tuple(
            Phase(NODE_PAIR, tuple(self._ranks(a) + self._ranks(b) for a, b in round_))
            for round_ in ring_rounds(len(nodes))
        )
        job = self._job(slow, nodes)
        if job is None:
            return slow
        self.say(f"preflight: all-reduce between {len(nodes)} nodes in pairs")
        answers = self._step("pairs", nodes, self._work(phases, jobs=(job,)), parts=len(phases) + 2)
        return replace(slow, pairs=tuple(node_pairs(job, self._per_node, answers.values())))

    def _doubtful(self, slow: SlowEvidence) -> list[tuple[str, str]]:
        """The pairs to measure by themselves: who is suspected, with somebody who is not. Disjoint."""
        known = slow.newest()
        who = between(self.evidence, slow)
        unmet = {node for node in slow.paired if not any(node in key for key in known)}
        suspects = [node for node in slow.paired if node in who.suspects or node in unmet]
        done = self._tried
        good = [node for node in slow.paired if node not in suspects]
        if not suspects:
            return []
        if not good:  # nobody to hold them against: each with each, as far as it goes
            rounds = tournament(len(suspects))
            for round_ in rounds:
                pairs = [self._in_order(slow, suspects[a], suspects[b]) for a, b in round_]
                if not done & set(pairs):
                    return pairs
            return []
        pairs = []
        for suspect in suspects:
            if any(suspect in key for key in done):
                continue  # once by itself is enough
            partner = next((n for n in good if self._in_order(slow, suspect, n) not in known), good[0])
            good.remove(partner)
            pairs.append(self._in_order(slow, suspect, partner))
            if not good:
                break
        return pairs

    def _again(self, slow: SlowEvidence, pairs: Sequence[tuple[str, str]]) -> SlowEvidence:
        self.say(f"preflight: again, by themselves: {', '.join('-'.join(pair) for pair in pairs)}")
        rails = [Phase(RAIL, ((local, self._per_node + local),)) for local in range(self._per_node)]
        phases = (Phase(NODE_PAIR, (tuple(range(2 * self._per_node)),)), *(rails if self._per_node > 1 else ()))
        jobs = tuple(job for pair in pairs if (job := self._job(slow, pair)) is not None)
        nodes = [node for node in slow.paired if any(node in job.nodes for job in jobs)]
        if not nodes:
            return slow
        self._tried |= {job.nodes for job in jobs}
        answers = self._step("again", nodes, self._work(phases, jobs=jobs), parts=len(phases) + 2)
        found: list[NodePair] = []
        for job in jobs:
            own = [answers[node] for node in job.nodes if node in answers]
            seen = node_pairs(job, self._per_node, own)
            if not seen and len(own) < len(job.nodes):
                seen = [NodePair(job.nodes[0], job.nodes[1], None, why="no answer")]
            found += [replace(pair, alone=True) for pair in seen]
        ports = {**slow.local, **{n: replace(slow.local[n], ports=a.ports) for n, a in answers.items() if a.ports}}
        return replace(slow, pairs=(*slow.pairs, *found), local=ports)

    def _in_order(self, slow: SlowEvidence, one: str, other: str) -> tuple[str, str]:
        a, b = sorted((one, other), key=slow.paired.index)
        return a, b

    def _ranks(self, place: int) -> tuple[int, ...]:
        return tuple(range(place * self._per_node, (place + 1) * self._per_node))

    def _job(self, slow: SlowEvidence, nodes: Sequence[str]) -> Job | None:
        """They meet on the first of them that has a free port."""
        first = nodes[0]
        report, ports = self.evidence.reports[first], slow.local[first].ports
        if report.address is None or not ports:
            return None
        return Job(tuple(nodes), f"{report.address}:{ports[0]}", secrets.token_hex(16))

    def _work(self, phases: Sequence[Phase], *, devices: bool = False, jobs: tuple[Job, ...] = ()) -> Work:
        cluster, timeout_s = self.config.cluster, self.config.preflight.slow_timeout_s
        size = _SIZE[cluster.accelerator]
        return Work(cluster.accelerator.name, self._per_node, tuple(phases), size, timeout_s, devices, jobs)

    def _step(self, name: str, nodes: Sequence[str], work: Work, parts: int) -> dict[str, NodeMeasured]:
        out, err = self.attempt.step_output(f"preflight-{name}")
        argv = slow_argv(self.config, self.steps.head_address(), work)
        spec = StepSpec(f"preflight-{name}", nodes, argv, out, err, step_environment(self.config))
        deadline_s = parts * 1.5 * work.timeout_s + _SPARE_S
        answers = ask(self.steps, spec, MEASURED, deadline_s, self.told_to_stop)
        return {node: NodeMeasured.from_json(answers[node]) for node in nodes if node in answers}
