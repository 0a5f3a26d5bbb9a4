"""The slow checks: each passes, fails and says UNKNOWN, on what nodes might have measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from clusterrun.config.checks import SLOW, made, made_slow
from clusterrun.config.schema import Accelerator, ClusterConfig, InterconnectConfig, PreflightConfig
from clusterrun.measure.results import (
    COPIES,
    IMPORT,
    PRODUCT,
    WAIT,
    DeviceResult,
    Job,
    NodeMeasured,
    Row,
    Stuck,
    better_of,
)
from clusterrun.preflight.checks import check_slow
from clusterrun.preflight.checks.slow import SLOW_CHECKS
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, GpuHealth
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.preflight.slow import NodePair, SlowEvidence, node_pairs

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
RANKS = 4
GPUS = ClusterConfig(nodes=3, nproc_per_node=RANKS, gpus_per_node=RANKS, accelerator=Accelerator.cuda)
NODES = ("c1", "c2", "c3")
GOOD = DeviceResult(0, "", 700e12, True, 50e9, 52e9, 5, 16)


def row(phase: str, ranks: tuple[int, ...], gb_s: float, wrong: int = 0) -> Row:
    """An all-reduce of 1 GB at this busbw."""
    seconds = 2 * (len(ranks) - 1) / len(ranks) / gb_s
    return Row(phase, ranks, "all_reduce", 10**9, seconds * 1.1, seconds, 20, wrong)


def healthy(node: str, **pairs: float) -> NodeMeasured:
    devices = tuple(dataclasses.replace(GOOD, local=i, uuid=f"GPU-{node}-{i}") for i in range(RANKS))
    rows = [row("in_node", tuple(range(RANKS)), 400)]
    for a, b in itertools.combinations(range(RANKS), 2):
        rows.append(row("pairs", (a, b), pairs.get(f"p{a}{b}", 300)))
    return NodeMeasured(node, devices, tuple(rows), (), (21000,))


def report(node: str) -> NodeReport:
    health = tuple(
        GpuHealth(i, uuid=f"GPU-{node}-{i}", serial=f"{node}{i}", model="H100", pcie_gen_max=5, pcie_width_max=16)
        for i in range(RANKS)
    )
    plain: dict[str, Any] = dict.fromkeys(f.name for f in dataclasses.fields(NodeReport))
    return NodeReport(**{**plain, "node": node, "gpus": GpuFacts(problem="", health=health)})


def evidence(
    changed: Mapping[str, NodeMeasured | None] | None = None,
    pairs: Mapping[tuple[str, str], float | None] | None = None,
    cluster: ClusterConfig = GPUS,
    **slow: Any,
) -> Evidence:
    local = {node: healthy(node) for node in NODES} | dict(changed or {})
    rates = {("c1", "c2"): 40e9, ("c2", "c3"): 40e9, ("c1", "c3"): 40e9} | dict(pairs or {})
    return Evidence(
        NODES,
        {node: report(node) for node in NODES},
        cluster,
        PreflightConfig(),
        (0.0, 1.0),
        SlowEvidence(
            **{
                "asked": NODES,
                "local": {node: said for node, said in local.items() if said is not None},
                "paired": NODES,
                "pairs": tuple(NodePair(*key, rate) for key, rate in rates.items()),
                **slow,
            }
        ),
    )


def verdicts(e: Evidence, check: str) -> dict[str, Verdict]:
    return {finding.node: finding.verdict for finding in SLOW_CHECKS[check](e)}


def finding(e: Evidence, check: str, node: str = "c2") -> Finding:
    return next(one for one in SLOW_CHECKS[check](e) if one.node == node)


def with_device(node: str = "c2", local: int = 3, **fields: Any) -> NodeMeasured:
    said = healthy(node)
    devices = tuple(dataclasses.replace(d, **fields) if d.local == local else d for d in said.devices)
    return dataclasses.replace(said, devices=devices)


def with_all(node: str, **fields: Any) -> NodeMeasured:
    said = healthy(node)
    return dataclasses.replace(said, devices=tuple(dataclasses.replace(d, **fields) for d in said.devices))


def stuck_at(what: str, local: int = 3, ranks: tuple[int, ...] = (), why: str = "no answer in 60 s") -> NodeMeasured:
    said = healthy("c2")
    devices = tuple(d for d in said.devices if d.local != local or what != PRODUCT)
    return dataclasses.replace(said, devices=devices, rows=(), stuck=(Stuck(what, local, ranks, why),))


def test_a_healthy_cluster_passes_every_check() -> None:
    findings = check_slow(evidence())
    assert {f.verdict for f in findings} == {PASS}
    assert {f.check for f in findings} == set(SLOW) == set(SLOW_CHECKS)
    assert len(findings) == len(SLOW) * len(NODES)


def test_they_are_made_only_when_asked_for_and_can_be_turned_off() -> None:
    assert not set(made({})) & set(SLOW)
    assert "gemm_speed" not in made_slow({"gemm_speed": "off"})
    assert check_slow(dataclasses.replace(evidence(), slow=None)) == []


def test_a_node_without_a_word() -> None:
    e = evidence({"c2": None})
    assert verdicts(e, "measured") == {"c1": PASS, "c2": FAIL, "c3": PASS}
    assert "c2" not in verdicts(e, "gemm_speed")


@pytest.mark.parametrize("what", [IMPORT, WAIT])
def test_a_rank_that_got_nowhere_is_not_known(what: str) -> None:
    e = evidence({"c2": dataclasses.replace(stuck_at(what, local=0), devices=())})
    for check in ("measured", "gemm_speed", "copy_speed", "pcie_under_load", "all_reduce_in_node", "gpu_pairs"):
        assert verdicts(e, check)["c2"] is UNKNOWN, check
    assert "no answer in 60 s" in finding(e, "measured").finding


class TestDevices:
    def test_a_slow_product_names_the_gpu(self) -> None:
        e = evidence({"c2": with_device(flops=400e12)})
        assert verdicts(e, "gemm_speed") == {"c1": PASS, "c2": FAIL, "c3": PASS}
        said = finding(e, "gemm_speed").finding
        assert "GPU3 (serial c23): 400 TFLOP/s, the peers 700 TFLOP/s" in said
        assert "GPU2" not in said

    def test_a_product_with_other_bits(self) -> None:
        assert "other bits" in finding(evidence({"c2": with_device(repeatable=False)}), "gemm_speed").finding

    def test_a_product_that_hangs(self) -> None:
        e = evidence({"c2": stuck_at(PRODUCT)})
        assert finding(e, "gemm_speed").verdict is FAIL
        assert "GPU3: matrix product: no answer in 60 s" in finding(e, "gemm_speed").finding
        assert verdicts(e, "all_reduce_in_node")["c2"] is UNKNOWN
        assert verdicts(e, "measured")["c2"] is PASS

    @pytest.mark.parametrize("way", ["to_device", "from_device"])
    def test_slow_copies(self, way: str) -> None:
        found = finding(evidence({"c2": with_device(**{way: 6e9})}), "copy_speed")
        assert found.verdict is FAIL
        assert f"{way.replace('_device', ' the device')} 6 GB/s" in found.finding

    def test_copies_that_hang(self) -> None:
        assert finding(evidence({"c2": stuck_at(COPIES)}), "copy_speed").verdict is FAIL

    def test_nobody_to_compare_with(self) -> None:
        one = dataclasses.replace(healthy("c1"), devices=(dataclasses.replace(GOOD, pcie_gen=None),))
        cluster = dataclasses.replace(GPUS, nproc_per_node=1, nodes=1)
        e = evidence({"c1": one, "c2": None, "c3": None}, cluster=cluster)
        assert verdicts(e, "gemm_speed") == {"c1": UNKNOWN}
        assert verdicts(e, "copy_speed") == {"c1": UNKNOWN}

    @pytest.mark.parametrize(
        ("fields", "verdict", "words"),
        [
            ({"pcie_gen": 3}, FAIL, "generation 3 x16 while copying, could be generation 5 x16"),
            ({"pcie_width": 8}, FAIL, "generation 5 x8"),
            ({"pcie_gen": None, "pcie_problem": "NVML does not say"}, UNKNOWN, "NVML does not say"),
        ],
    )
    def test_pcie_under_load(self, fields: dict[str, Any], verdict: Verdict, words: str) -> None:
        found = finding(evidence({"c2": with_device(**fields)}), "pcie_under_load")
        assert found.verdict is verdict
        assert words in found.finding

    def test_pcie_says_nothing_about_cpus(self) -> None:
        cpus = dataclasses.replace(GPUS, accelerator=Accelerator.cpu)
        assert verdicts(evidence(cluster=cpus), "pcie_under_load") == {}


class TestCatalogue:
    """All peers may be slow, and one alone has none: then published figures speak (H100: 730 TFLOPS, PCIe 5)."""

    @staticmethod
    def of(nodes: int, **fields: Any) -> Evidence:
        e = evidence({f"c{i + 1}": with_all(f"c{i + 1}", **fields) if i < nodes else None for i in range(3)})
        reports = {}
        for node, one in e.reports.items():
            assert one.gpus is not None
            health = tuple(dataclasses.replace(gpu, model="NVIDIA H100 80GB HBM3") for gpu in one.gpus.health)
            reports[node] = dataclasses.replace(one, gpus=dataclasses.replace(one.gpus, health=health))
        return dataclasses.replace(e, reports=reports)

    def test_all_slow_alike_is_a_warning(self) -> None:
        e = self.of(3, flops=300e12)
        assert set(verdicts(e, "gemm_speed").values()) == {WARN}
        assert "300 TFLOP/s, by the catalogue at least" in finding(e, "gemm_speed").finding
        assert set(verdicts(self.of(3, to_device=10e9), "copy_speed").values()) == {WARN}

    def test_one_alone_is_judged(self) -> None:
        one = dataclasses.replace(healthy("c1"), devices=(dataclasses.replace(GOOD, uuid="GPU-c1-0"),))
        e = self.of(1)
        e = dataclasses.replace(e, cluster=dataclasses.replace(GPUS, nproc_per_node=1))
        assert e.slow is not None
        e = dataclasses.replace(e, slow=dataclasses.replace(e.slow, local={"c1": one}))
        assert verdicts(e, "gemm_speed") == {"c1": PASS}
        assert verdicts(e, "copy_speed") == {"c1": PASS}
        assert "as the catalogue has it" in finding(e, "gemm_speed", "c1").finding


class TestInNode:
    def test_a_slow_node(self) -> None:
        said = healthy("c2")
        e = evidence({"c2": dataclasses.replace(said, rows=(row("in_node", (0, 1, 2, 3), 90), *said.rows[1:]))})
        assert verdicts(e, "all_reduce_in_node") == {"c1": PASS, "c2": FAIL, "c3": PASS}
        assert "busbw 90 GB/s, the peers 400 GB/s" in finding(e, "all_reduce_in_node").finding

    def test_one_that_hangs(self) -> None:
        assert finding(evidence({"c2": stuck_at("in_node", 0, (0, 1, 2, 3))}), "all_reduce_in_node").verdict is FAIL

    def test_wrong_results(self) -> None:
        e = evidence({"c2": dataclasses.replace(healthy("c2"), rows=(row("in_node", (0, 1, 2, 3), 400, wrong=5),))})
        assert "wrong results: 5" in finding(e, "all_reduce_in_node").finding

    def test_a_slow_pair_is_named(self) -> None:
        e = evidence({"c2": healthy("c2", p13=20)})
        assert verdicts(e, "gpu_pairs") == {"c1": PASS, "c2": FAIL, "c3": PASS}
        assert finding(e, "gpu_pairs").finding == "GPU1 (serial c21)-GPU3 (serial c23): 20 GB/s"

    def test_a_slow_gpu_is_named(self) -> None:
        e = evidence({"c2": healthy("c2", p01=20, p12=25, p13=20)})
        assert finding(e, "gpu_pairs").finding == "GPU1 (serial c21): all its 3 pairs are slow, at best 25 GB/s"

    def test_a_gpu_that_hangs_with_everybody(self) -> None:
        said = healthy("c2")
        stuck = tuple(Stuck("pairs", 1, pair, "no answer in 60 s") for pair in ((0, 1), (1, 2), (1, 3)))
        rows = tuple(r for r in said.rows if 1 not in r.ranks)
        e = evidence({"c2": dataclasses.replace(said, rows=rows, stuck=stuck)})
        assert finding(e, "gpu_pairs").finding == "GPU1 (serial c21): all its 3 pairs are slow, none comes to an end"

    def test_a_wrong_pair(self) -> None:
        said = healthy("c2")
        rows = (*said.rows[:-1], dataclasses.replace(said.rows[-1], wrong=1))
        assert "wrong results" in finding(evidence({"c2": dataclasses.replace(said, rows=rows)}), "gpu_pairs").finding

    def test_two_ranks_in_one_node_are_one_pair(self) -> None:
        cluster = dataclasses.replace(GPUS, nproc_per_node=2)
        said = {n: NodeMeasured(n, rows=(row("in_node", (0, 1), 30 if n == "c2" else 300),)) for n in NODES}
        e = evidence(said, cluster=cluster)
        assert verdicts(e, "gpu_pairs") == {"c1": PASS, "c2": FAIL, "c3": PASS}
        alone = evidence({"c1": said["c1"], "c2": None, "c3": None}, cluster=cluster)
        assert verdicts(alone, "gpu_pairs") == {"c1": UNKNOWN}


class TestBetweenNodes:
    def test_a_slow_node_is_named(self) -> None:
        e = evidence(pairs={("c1", "c2"): 4e9, ("c2", "c3"): 4e9})
        assert verdicts(e, "between_nodes") == {"c1": PASS, "c2": FAIL, "c3": PASS}
        said = finding(e, "between_nodes").finding
        assert "slow with everybody: 4 GB/s with c1; 4 GB/s with c3, others reach 40 GB/s" in said

    def test_and_the_nic_of_one_rank_of_it(self) -> None:
        rails = {0: 10e9, 1: 10e9, 2: 1e9, 3: 10e9}
        pairs = (
            NodePair("c1", "c2", 4e9, rails=rails, alone=True),
            NodePair("c2", "c3", 4e9),
            NodePair("c1", "c3", 40e9),
        )
        said = finding(with_pairs(pairs), "between_nodes").finding
        assert "slow through GPU2 (serial c22) 1 GB/s (others 10 GB/s): that GPU or its NIC" in said
        alike = with_pairs((dataclasses.replace(pairs[0], rails=dict.fromkeys(range(4), 1e9)), *pairs[1:]))
        assert "all 4 ranks of it alike" in finding(alike, "between_nodes").finding

    def test_a_slow_path_leaves_out_one_end(self) -> None:
        e = evidence(pairs={("c2", "c3"): 4e9})
        assert verdicts(e, "between_nodes") == {"c1": PASS, "c2": WARN, "c3": FAIL}
        assert "the path to c2 is slow" in finding(e, "between_nodes", "c3").finding

    def test_two_nodes_that_do_not_reach_each_other(self) -> None:
        e = with_pairs((NodePair("c1", "c2", None, why="no answer in 60 s"),), paired=("c1", "c2"))
        assert verdicts(e, "between_nodes") == {"c1": FAIL, "c2": FAIL}

    def test_two_nodes_without_a_declared_rate(self) -> None:
        e = with_pairs((NodePair("c1", "c2", 4e9),), paired=("c1", "c2"))
        assert verdicts(e, "between_nodes") == {"c1": UNKNOWN, "c2": UNKNOWN}

    @pytest.mark.parametrize(("gbit", "verdict"), [(32.0, PASS), (400.0, WARN)])
    def test_two_nodes_with_one(self, gbit: float, verdict: Verdict) -> None:
        cluster = dataclasses.replace(GPUS, interconnect=InterconnectConfig(nic_gbit_per_s=gbit))
        e = with_pairs((NodePair("c1", "c2", 4e9),), paired=("c1", "c2"))
        assert verdicts(dataclasses.replace(e, cluster=cluster), "between_nodes") == {"c1": verdict, "c2": verdict}

    def test_wrong_results(self) -> None:
        pairs = (NodePair("c1", "c2", 40e9, wrong=1), NodePair("c1", "c3", 40e9))
        assert verdicts(with_pairs(pairs), "between_nodes") == {"c1": FAIL, "c2": FAIL, "c3": PASS}

    def test_a_node_nobody_met(self) -> None:
        assert verdicts(with_pairs((NodePair("c1", "c2", 40e9),)), "between_nodes")["c3"] is UNKNOWN

    def test_one_node_has_no_between(self) -> None:
        assert verdicts(with_pairs((), paired=("c1",)), "between_nodes") == {}


def with_pairs(pairs: tuple[NodePair, ...], paired: tuple[str, ...] = NODES) -> Evidence:
    e = evidence()
    assert e.slow is not None
    return dataclasses.replace(e, slow=dataclasses.replace(e.slow, pairs=pairs, paired=paired))


def test_pairs_from_what_the_nodes_said() -> None:
    job = Job(("c1", "c2", "c3"), "10.0.0.1:21000", "secret")
    answers = [
        NodeMeasured("c1", rows=(row("node_pair", (0, 1, 2, 3), 4), row("rail", (1, 3), 5))),
        NodeMeasured("c2", stuck=(Stuck("node_pair", 0, (2, 3, 4, 5), "no answer in 9 s"),)),
        NodeMeasured("c3", stuck=(Stuck(WAIT, 0, (), "no answer in 18 s"),)),
    ]
    first, second = node_pairs(job, 2, answers)
    assert (first.a, first.b, first.rate, dict(first.rails)) == (
        "c1",
        "c2",
        pytest.approx(4e9),
        {1: pytest.approx(5e9)},
    )
    assert (second.key, second.rate, second.why) == (("c2", "c3"), None, "no answer in 9 s")
    never = node_pairs(Job(("c1", "c2"), "", ""), 2, [NodeMeasured("c1", stuck=(Stuck(WAIT, 0, (), "no answer"),))])
    assert [(pair.key, pair.rate) for pair in never] == [(("c1", "c2"), None)]
    assert "never met" in never[0].why


def test_the_better_of_two_measurements() -> None:
    slow = dataclasses.replace(with_device(flops=1e12), rows=(row("in_node", (0, 1), 1, wrong=2),))
    fast = dataclasses.replace(healthy("c2"), rows=(row("in_node", (0, 1), 9),))
    for one, other in ((slow, fast), (fast, slow)):
        merged = better_of(one, other)
        assert merged.devices == fast.devices
        assert merged.rows[0].best_busbw == pytest.approx(9e9)
        assert merged.rows[0].wrong == 2
    assert NodeMeasured.from_json(healthy("c2").as_json()) == healthy("c2")


def test_the_plan_says_which_checks_are_slow(clusterrun_here: Callable[..., Any]) -> None:
    full, fast = (clusterrun_here("plan", *more).stdout for more in (("preflight=full",), ()))
    assert "then, slow" in full
    assert "gemm_speed" in full
    assert "then, slow" not in fast
    assert "gemm_speed" not in fast
    off = clusterrun_here("plan", "preflight=full", "preflight.policy={gemm_speed: off}").stdout
    assert "gemm_speed" not in off
    assert "copy_speed" in off
