"""The slow checks over whole clusters: whoever is bad is named, nobody else, and it takes few steps.

What answers is a made-up cluster whose wires are as fast as the test says; the order of work, the search for the
culprit and the verdicts are the real ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun import frames
from clusterrun.config.schema import Accelerator, ClusterConfig, PreflightConfig, RunConfig
from clusterrun.launch.slow_preflight import SlowPreflight, blocks
from clusterrun.launch.steps import StepSpec
from clusterrun.measure.groups import BY_ITSELF, RAIL, work_phases
from clusterrun.measure.results import MEASURED, WAIT, DeviceResult, Job, NodeMeasured, Row, Stuck, Work
from clusterrun.preflight.checks import check_slow
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.rundir import RunDir

GOOD = 40e9
Rate = Callable[[str, str, int | None], float | None]  # two nodes, a rank of each or None for all: None hangs


class Ended:
    """A step that is over."""

    def poll(self) -> int | None:
        return 0

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


class Cluster:
    """A StepRunner of which every node answers what its wires are worth."""

    def __init__(self, nodes: int, rate: Rate, silent: Sequence[str] = (), sick: Sequence[str] = ()) -> None:
        self._nodes = [f"n{i}" for i in range(nodes)]
        self._rate, self._silent, self._sick = rate, silent, sick
        self.steps: list[str] = []

    def nodes(self) -> list[str]:
        return self._nodes

    def switches(self) -> dict[str, str]:
        return {}

    def head_address(self) -> str:
        return "10.0.0.1"

    def start(self, spec: StepSpec) -> Ended:
        self.steps.append(spec.name)
        work = Work.from_argument(next(a for a in spec.argv if a.startswith("--work=")).removeprefix("--work="))
        jobs = work.jobs or tuple(Job((node,), "", "") for node in spec.nodes)
        assert all(len(argument) < 131_072 for argument in spec.argv), "more than Linux takes in one argument"
        with spec.stdout.open("a") as out:
            for job in jobs:
                for said in self._job(work, job):
                    if said.node not in self._silent:
                        out.write(frames.encode(MEASURED, said.node, said.as_json()))
        return Ended()

    def _job(self, work: Work, job: Job) -> list[NodeMeasured]:
        """Phase by phase; a node that hangs goes no further, and nobody gets past the next meeting."""
        if work.kind == BY_ITSELF:
            return [self._itself(work, node) for node in job.nodes]
        rows: dict[str, list[Row]] = {node: [] for node in job.nodes}
        stuck: dict[str, list[Stuck]] = {node: [] for node in job.nodes}
        for phase in work_phases(work.kind, len(job.nodes), work.per_node):
            for ranks in phase.groups:
                a, b = (job.nodes[i] for i in sorted({rank // work.per_node for rank in ranks}))
                rate = self._rate(a, b, ranks[0] % work.per_node if phase.name == RAIL else None)
                if rate is None:
                    for node in (a, b):
                        stuck[node].append(Stuck(phase.name, 0, ranks, "no answer in 60 s"))
                else:
                    rows[a].append(made(phase.name, ranks, rate))
            if any(stuck.values()):
                for node in job.nodes:
                    stuck[node] = stuck[node] or [Stuck(WAIT, 0, (), "no answer in 95 s")]
                break
        return [NodeMeasured(n, rows=tuple(rows[n]), stuck=tuple(stuck[n]), ports=(21000,)) for n in job.nodes]

    def _itself(self, work: Work, node: str) -> NodeMeasured:
        devices = tuple(
            DeviceResult(i, "", 1e12 if node in self._sick else 700e12, True, 50e9, 50e9, 5, 16)
            for i in range(work.per_node)
        )
        phases = work_phases(work.kind, 1, work.per_node)
        rows = tuple(made(phase.name, phase.groups[0], 300e9) for phase in phases)
        return NodeMeasured(node, devices, rows, (), (21000,))


def made(phase: str, ranks: tuple[int, ...], rate: float) -> Row:
    seconds = 2 * (len(ranks) - 1) / len(ranks) * 2**26 / rate
    return Row(phase, ranks, "all_reduce", 2**26, seconds, seconds, 20, 0)


def go(place: Path, cluster: Cluster, per_node: int = 2) -> list[Finding]:
    nodes = cluster.nodes()
    wiring = ClusterConfig(nodes=len(nodes), nproc_per_node=per_node, accelerator=Accelerator.cuda)
    config = RunConfig(cluster=wiring, preflight=PreflightConfig(full=True, policy={"pcie_under_load": "off"}))
    attempt = RunDir(place).attempt(time.monotonic_ns())
    attempt.root.parent.mkdir(exist_ok=True)
    attempt.make()
    empty = dict.fromkeys(f.name for f in dataclasses.fields(NodeReport))
    reports = {n: NodeReport(**{**empty, "node": n, "address": "10.0.0.2"}) for n in nodes}
    evidence = Evidence(tuple(nodes), reports, wiring, config.preflight, (0.0, 1.0))
    said: list[str] = []
    slow = SlowPreflight(config, attempt, cluster, evidence, said.append, lambda: False).run(nodes)
    return check_slow(dataclasses.replace(evidence, slow=slow))


def failed(findings: Sequence[Finding]) -> dict[str, str]:
    return {f.node: f"{f.check}: {f.finding}" for f in findings if f.verdict is Verdict.FAIL}


def bad_node(bad: set[str], to: float | None) -> Rate:
    return lambda a, b, local: to if {a, b} & bad else GOOD


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(nodes=st.integers(3, 80), data=st.data(), to=st.sampled_from([1e9, None]))
def test_one_bad_node_is_named_alone(tmp_path: Path, nodes: int, data: st.DataObject, to: float | None) -> None:
    bad = f"n{data.draw(st.integers(0, nodes - 1))}"
    cluster = Cluster(nodes, bad_node({bad}, to))
    assert set(failed(go(tmp_path, cluster))) == {bad}
    assert len(cluster.steps) <= 5, cluster.steps


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(nodes=st.integers(8, 30), data=st.data(), to=st.sampled_from([1e9, None]))
def test_two_bad_nodes(tmp_path: Path, nodes: int, data: st.DataObject, to: float | None) -> None:
    numbers = data.draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=2, unique=True))
    bad = {f"n{number}" for number in numbers}
    assert set(failed(go(tmp_path, Cluster(nodes, bad_node(bad, to))))) == bad


def test_a_bad_path_is_told_from_bad_nodes(tmp_path: Path) -> None:
    cluster = Cluster(6, lambda a, b, local: 1e9 if {a, b} == {"n2", "n3"} else GOOD)
    (named,) = failed(go(tmp_path, cluster)).items()
    assert named[0] == "n3"
    assert "the path to n2 is slow" in named[1]


def test_one_rank_of_a_node_is_told_from_the_node(tmp_path: Path) -> None:
    def rate(a: str, b: str, local: int | None) -> float:
        return 1e9 if "n1" in (a, b) and local in (None, 3) else GOOD

    named = failed(go(tmp_path, Cluster(5, rate), per_node=4))
    assert set(named) == {"n1"}
    assert "slow through GPU3" in named["n1"]


def test_nothing_is_wrong(tmp_path: Path) -> None:
    cluster = Cluster(8, lambda a, b, local: GOOD)
    assert {f.verdict for f in go(tmp_path, cluster)} == {Verdict.PASS}
    assert cluster.steps == ["preflight-node", "preflight-pairs"]


def test_everything_hangs(tmp_path: Path) -> None:
    cluster = Cluster(4, lambda a, b, local: None)
    assert set(failed(go(tmp_path, cluster))) == {"n0", "n1", "n2", "n3"}
    assert len(cluster.steps) <= 5


def test_a_silent_node_and_a_sick_one_are_not_paired(tmp_path: Path) -> None:
    cluster = Cluster(5, lambda a, b, local: GOOD, silent=["n1"], sick=["n4"])
    findings = go(tmp_path, cluster)
    named = failed(findings)
    assert set(named) == {"n1", "n4"}
    assert "did not answer" in named["n1"]
    assert "gemm_speed" in named["n4"]
    assert {f.node for f in findings if f.check == "between_nodes"} == {"n0", "n2", "n3"}
    assert cluster.steps == ["preflight-node", "preflight-second", "preflight-pairs"]


@pytest.mark.parametrize(("nodes", "sizes"), [(0, []), (3, [3]), (64, [64]), (65, [32, 33]), (130, [43, 43, 44])])
def test_rings_are_of_a_size_that_one_group_can_be(nodes: int, sizes: list[int]) -> None:
    found = blocks([f"n{i}" for i in range(nodes)], 64)
    assert [len(block) for block in found] == sizes
    assert [node for block in found for node in block] == [f"n{i}" for i in range(nodes)]


def test_many_nodes(tmp_path: Path) -> None:
    """1,024 nodes of 8 GPUs with one slow node: the search and the verdicts take seconds."""
    begin = time.process_time()
    cluster = Cluster(1024, bad_node({"n700"}, 1e9))
    assert set(failed(go(tmp_path, cluster, per_node=8))) == {"n700"}
    assert time.process_time() - begin < 30
