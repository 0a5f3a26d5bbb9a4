"""The slow checks of preflight=full: each node by itself, the nodes with each other, then again whoever looks slow.

Steps, each of which ends by itself and is killed if it does not:

1. ``preflight-node``: matrix products, copies, all-reduce in the node and each pair of it; ``preflight-second``: the
   same once more on nodes that were slow.
2. ``preflight-pairs``: the nodes whose own part is sound, neighbours in a ring in pairs; a ring has up to 64 nodes.
3. ``preflight-again``: a suspect with a node that is fast, in a group of the two alone, first all ranks, then rank by
   rank: that tells a node from the path to it, and one GPU or NIC from the whole node.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from clusterrun.config.checks import Policy, policies
from clusterrun.config.schema import Accelerator, RunConfig
from clusterrun.launch.asking import ask
from clusterrun.launch.commands import slow_argv, step_environment
from clusterrun.launch.steps import StepRunner, StepSpec
from clusterrun.measure import groups
from clusterrun.measure.results import MEASURED, Job, NodeMeasured, Work, better_of
from clusterrun.preflight.checks import check_slow
from clusterrun.preflight.checks.slow_between import between, is_fast
from clusterrun.preflight.decide import is_fatal
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Verdict
from clusterrun.preflight.slow import NodePair, SlowEvidence, node_pairs
from clusterrun.rundir import AttemptDir

# Bytes of an all-reduce: on a GPU in the range where the wire decides, on a CPU small enough for 100 Mbit/s.
_SIZE = {Accelerator.cuda: 64 * 2**20, Accelerator.cpu: 4 * 2**20}
_MOST_LOOKS = 3
_MOST_AGAIN = 3  # steps that look again; each is one round of disjoint pairs
_BLOCK = 64  # nodes of one ring: one process group each
_RING_ROUNDS = 3
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
        slow = self._second_look(replace(slow, local=self._by_itself("node", nodes)))
        refused = self._refused(slow)
        sound = [n for n, said in slow.local.items() if not said.stuck and n not in refused]
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

    def _refused(self, slow: SlowEvidence) -> set[str]:
        policy = policies(self.config.preflight.policy)
        findings = check_slow(replace(self.evidence, slow=slow))
        strict = self.config.preflight.strict
        return {f.node for f in findings if is_fatal(f, policy.get(f.check, Policy.fatal), strict=strict)}

    def _second_look(self, slow: SlowEvidence) -> SlowEvidence:
        """Nodes that were slow by themselves measure once more, alone: somebody else may have been busy on them.

        What hung is not tried again. A node that then does better may leave others behind: they get the same.
        """
        seen: set[str] = set()
        for _ in range(_MOST_LOOKS):
            findings = check_slow(replace(self.evidence, slow=slow))
            failed = {finding.node for finding in findings if finding.verdict is Verdict.FAIL} - seen
            nodes = [node for node, said in slow.local.items() if node in failed and not said.stuck]
            if not nodes or self.told_to_stop():
                break
            seen.update(nodes)
            self.say(f"preflight: a second look at {', '.join(nodes)}")
            again = self._by_itself("second", nodes)
            slow = replace(slow, local={**slow.local, **{n: better_of(slow.local[n], a) for n, a in again.items()}})
        return slow

    def _by_itself(self, name: str, nodes: Sequence[str]) -> dict[str, NodeMeasured]:
        # Each part may take timeout_s; after a hang a node tries again, a few times (measure.node).
        parts = len(groups.in_node_phases(self._per_node)) + 6
        return self._step(name, nodes, self._work(groups.BY_ITSELF, devices=True), parts)

    def _pairs(self, slow: SlowEvidence, nodes: Sequence[str]) -> SlowEvidence:
        """Neighbours in a ring; the rounds one after the other, the pairs of a round at once."""
        jobs = [self._job(slow, block) for block in blocks(nodes, _BLOCK)]
        asked = tuple(job for job in jobs if job is not None)
        if not asked:
            return slow
        self.say(f"preflight: all-reduce between {len(nodes)} nodes in pairs")
        nodes = [node for job in asked for node in job.nodes]
        answers = self._step("pairs", nodes, self._work(groups.RING, jobs=asked), parts=_RING_ROUNDS + 2)
        found = [
            pair
            for job in asked
            for pair in node_pairs(job, self._per_node, [answers[node] for node in job.nodes if node in answers])
        ]
        return replace(slow, pairs=tuple(found))

    def _doubtful(self, slow: SlowEvidence) -> list[tuple[str, str]]:
        """Disjoint pairs to measure by themselves: each suspect that was not yet, and each node that has met nobody
        fast so far, with a partner that is known to be fast, if there is one, and new to it, if there is one."""
        known = slow.newest()
        who = between(self.evidence, slow)
        proven = {node for pair in known.values() if is_fast(self.evidence, pair, who.expected) for node in pair.key}
        tried = {node for pair in self._tried for node in pair}
        open_ = [
            node
            for node in slow.paired
            if (node in who.suspects and node not in tried) or (node not in proven and node not in who.members)
        ]
        pairs: list[tuple[str, str]] = []
        used: set[str] = set()
        for node in open_:
            partners = [
                other
                for other in slow.paired
                if other != node and other not in used and self._in_order(slow, node, other) not in self._tried
            ]
            if node in used or not partners:
                continue
            partner = min(
                partners,
                key=lambda other: (
                    other in who.members,
                    other not in proven,
                    other in who.suspects,
                    self._in_order(slow, node, other) in known,
                ),
            )
            used |= {node, partner}
            pairs.append(self._in_order(slow, node, partner))
        return pairs

    def _again(self, slow: SlowEvidence, pairs: Sequence[tuple[str, str]]) -> SlowEvidence:
        self.say(f"preflight: again, by themselves: {', '.join('-'.join(pair) for pair in pairs)}")
        jobs = tuple(job for pair in pairs if (job := self._job(slow, pair)) is not None)
        nodes = [node for node in slow.paired if any(node in job.nodes for job in jobs)]
        if not nodes:
            return slow
        self._tried |= {job.nodes for job in jobs}
        answers = self._step("again", nodes, self._work(groups.TWO, jobs=jobs), parts=self._per_node + 3)
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

    def _job(self, slow: SlowEvidence, nodes: Sequence[str]) -> Job | None:
        """They meet on the first of them that has a free port."""
        first = nodes[0]
        report, ports = self.evidence.reports[first], slow.local[first].ports
        if report.address is None or not ports:
            return None
        return Job(tuple(nodes), f"{report.address}:{ports[0]}", secrets.token_hex(16))

    def _work(self, kind: str, *, devices: bool = False, jobs: tuple[Job, ...] = ()) -> Work:
        cluster, timeout_s = self.config.cluster, self.config.preflight.slow_timeout_s
        size = _SIZE[cluster.accelerator]
        return Work(cluster.accelerator.name, self._per_node, kind, size, timeout_s, devices, jobs)

    def _step(self, name: str, nodes: Sequence[str], work: Work, parts: int) -> dict[str, NodeMeasured]:
        out, err = self.attempt.step_output(f"preflight-{name}")
        argv = slow_argv(self.config, self.steps.head_address(), work)
        spec = StepSpec(f"preflight-{name}", nodes, argv, out, err, step_environment(self.config))
        deadline_s = parts * 1.5 * work.timeout_s + _SPARE_S
        answers = ask(self.steps, spec, MEASURED, deadline_s, self.told_to_stop)
        return {node: NodeMeasured.from_json(answers[node]) for node in nodes if node in answers}


def blocks(nodes: Sequence[str], most: int) -> list[list[str]]:
    """Consecutive parts of nearly the same size, ``most`` at most."""
    count = -(-len(nodes) // most)
    cuts = [len(nodes) * i // count for i in range(count + 1)] if count else [0]
    return [list(nodes[a:b]) for a, b in itertools.pairwise(cuts)]
