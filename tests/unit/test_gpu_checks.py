"""Every check of GPUs, wiring and NICs: once failing, once passing, once UNKNOWN; then the harder ones' corners."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.checks import CHECKS, Policy, made, policies
from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    InterconnectConfig,
    InterNode,
    IntraNode,
    PreflightConfig,
)
from clusterrun.preflight.checks import ALL
from clusterrun.preflight.checks.gpu import GPU
from clusterrun.preflight.checks.nic import NIC
from clusterrun.preflight.checks.wiring import WIRING, culprits
from clusterrun.preflight.checks.wiring import _compare as wiring_compare
from clusterrun.preflight.decide import decide
from clusterrun.preflight.evidence import Evidence
from clusterrun.preflight.gpu_facts import GpuFacts, GpuHealth
from clusterrun.preflight.report import Finding, NodeReport, Verdict
from clusterrun.topology import snapshot
from clusterrun.topology.model import SELF, Gpu, Link, LinkKind, Nic, Topology

PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
OURS = {**GPU, **WIRING, **NIC}
COUNT = 4
MODEL = "NVIDIA H100 80GB HBM3"
NV18, PIX, PHB, SYS = Link(LinkKind.NVLINK, 18), Link(LinkKind.PIX), Link(LinkKind.PHB), Link(LinkKind.SYS)
Links = dict[tuple[int, int], Link | None]

SOUND = GpuHealth(
    index=0,
    model=MODEL,
    capability="9.0",
    pcie_gen=1,
    pcie_gen_max=5,
    pcie_width=16,
    pcie_width_max=16,
    pcie_replays=0,
    ecc_on=True,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    recovery_action=0,
    throttle=1,
    power_limit_w=700.0,
    power_default_w=700.0,
    temperature_c=30,
    slowdown_c=89,
    margin_c=57,
    persistence=True,
    mig=False,
    pids=(),
    memory_used_bytes=0,
    clock_sm_mhz=1980,
    clock_memory_mhz=2619,
    ports_up=tuple(range(18)),
    ports_down=(),
    ports_unknown=(),
    link_mb_s=(26_562,) * 18,
    link_replay=0,
    link_recovery=0,
    link_crc_flit=0,
    link_crc_data=0,
    fabric="completed",
    fabric_ok=True,
)
CLUSTER = ClusterConfig(
    gpus_per_node=COUNT,
    nproc_per_node=COUNT,
    gpu_model=MODEL,
    accelerator=Accelerator.cuda,
    interconnect=InterconnectConfig(IntraNode.nvswitch, 18, InterNode.infiniband, COUNT, 400.0),
)


def matrix(default: Any, changed: dict[tuple[int, int], Any], diagonal: Any) -> Any:
    """Rows of a matrix; ``changed`` holds single cells, (row, column)."""
    cells = range(COUNT)
    return tuple(tuple(diagonal if i == j else changed.get((i, j), default) for j in cells) for i in cells)


def topology(links: Links | None = None, p2p: Any = None, nic: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Four GPUs on NVSwitch, a NIC beside each; ``nic`` changes the second NIC."""
    nics = [
        Nic(f"NIC{n}", f"mlx5_{n}", tuple(PIX if n == g else SYS for g in range(COUNT)), (), 400.0, "InfiniBand",
            "ACTIVE", "LinkUp")
        for n in range(COUNT)
    ]  # fmt: skip
    nics[1] = dataclasses.replace(nics[1], **(nic or {}))
    whole = {
        "gpus": tuple(Gpu(f"GPU{i}", i, model=MODEL) for i in range(COUNT)),
        "links": matrix(NV18, {**(links or {}), **{(j, i): link for (i, j), link in (links or {}).items()}}, SELF),
        "nics": tuple(nics),
        "p2p": matrix(True, dict(p2p or {}), None),
        **changed,
    }
    return json.loads(json.dumps(snapshot.plain(Topology(**whole))))


def evidence(
    gpu1: dict[str, Any] | None = None,
    every: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    wiring: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **preflight: Any,
) -> Evidence:
    """Nodes c1 and c2; on c2 GPU1, every GPU, the facts or the report are changed as said."""
    health = [dataclasses.replace(SOUND, index=i, uuid=f"GPU-{i}", serial=str(900 + i)) for i in range(COUNT)]
    good = GpuFacts(topology(), tuple(health), "550.54", "12.4", "2.27.3", 0, (), COUNT)
    other = [dataclasses.replace(one, **(every or {}), **((gpu1 or {}) if one.index == 1 else {})) for one in health]
    bad = dataclasses.replace(good, **{"health": tuple(other), **(facts or {})})
    none: dict[str, Any] = {f.name: None for f in dataclasses.fields(NodeReport)}
    reports = {
        "c1": NodeReport(**{**none, "node": "c1", "gpus": good}),
        "c2": NodeReport(**{**none, "node": "c2", "gpus": bad, **(report or {})}),
    }
    declared = dataclasses.replace(
        CLUSTER, interconnect=dataclasses.replace(CLUSTER.interconnect, **(wiring or {})), **(cluster or {})
    )
    return Evidence(("c1", "c2"), reports, declared, PreflightConfig(**preflight), (0.0, 1.0))


def found(check: str, e: Evidence, node: str = "c2") -> Finding | None:
    (one,) = [f for f in OURS[check](e) if f.node == node] or [None]
    return one


def said(check: str, e: Evidence, node: str = "c2") -> Finding:
    one = found(check, e, node)
    assert one is not None, "no finding"
    return one


def verdict(check: str, e: Evidence) -> Verdict | None:
    one = found(check, e)
    return one.verdict if one else None


def all_found(e: Evidence) -> list[Finding]:
    """By the checks of this page that the configuration asks for."""
    return [f for name in made(e.preflight.policy) if name in OURS for f in OURS[name](e)]


Change = dict[str, Any]
# check: (what makes it fail, the verdict, what it says, what makes it UNKNOWN)
CASES: dict[str, tuple[Change, Verdict, str, Change]] = {
    "gpu_lost": (
        {"gpu1": {"error": "GPU is lost"}}, FAIL, "GPU1 (serial 901): GPU is lost",
        {"facts": {"health": (), "problem": "the driver hangs"}},
    ),
    "gpu_model": (
        {"gpu1": {"model": "NVIDIA A100-SXM4-80GB"}}, FAIL,
        "GPU1 (serial 901): declared NVIDIA H100 80GB HBM3, detected NVIDIA A100-SXM4-80GB", {"gpu1": {"model": None}},
    ),
    "driver_versions": (
        {"facts": {"driver": "535.1"}}, FAIL, "driver 535.1 (others: 550.54)",
        {"facts": {"health": (), "problem": "the driver hangs"}},
    ),
    "pcie_width": ({"gpu1": {"pcie_width": 8}}, FAIL, "PCIe x8 of x16", {"gpu1": {"pcie_width": None}}),
    "pcie_generation": (
        {"gpu1": {"pcie_gen_max": 4}}, FAIL, "PCIe Gen4 at most, its peers reach Gen5",
        {"gpu1": {"pcie_gen_max": None}},
    ),
    "pcie_replays": ({"gpu1": {"pcie_replays": 81}}, FAIL, "81 PCIe replays (> 80)", {"gpu1": {"pcie_replays": None}}),
    "ecc": ({"gpu1": {"ecc_uncorrected": 1}}, FAIL, "1 uncorrected", {"gpu1": {"ecc_uncorrected": None}}),
    "row_remap": ({"gpu1": {"remap_pending": True}}, FAIL, "pending", {"gpu1": {"remap_failed": None}}),
    "retired_pages": (
        {"every": {"capability": "7.0", "retired_pages": 0}, "gpu1": {"retired_pending": True}}, FAIL, "pending",
        {"every": {"capability": "7.0"}},
    ),
    "xid_recovery": (
        {"gpu1": {"recovery_action": 4}}, FAIL, "drain and reset", {"gpu1": {"recovery_action": None}},
    ),
    "throttle": ({"gpu1": {"throttle": 0x81}}, FAIL, "throttled: power brake", {"gpu1": {"throttle": None}}),
    "power_limit": (
        {"gpu1": {"power_limit_w": 500.0}}, FAIL, "limited to 500 W, its peers to 700 W",
        {"gpu1": {"power_limit_w": None}},
    ),
    "temperature": ({"gpu1": {"margin_c": 0}}, FAIL, "at or above", {"gpu1": {"margin_c": None, "slowdown_c": None}}),
    "persistence_mode": ({"gpu1": {"persistence": False}}, WARN, "off", {"gpu1": {"persistence": None}}),
    "mig_off": ({"gpu1": {"mig": True}}, FAIL, "MIG is on", {"gpu1": {"mig": None}}),
    "gpu_processes": ({"gpu1": {"pids": (7, 9)}}, FAIL, "in use by pid 7, 9", {"gpu1": {"pids": None}}),
    "gpu_memory_used": (
        {"gpu1": {"memory_used_bytes": 3 << 30}}, FAIL, "3.0 GiB in use before", {"gpu1": {"memory_used_bytes": None}},
    ),
    "clocks": (
        {"gpu1": {"clock_sm_mhz": 1200}}, FAIL, "SM clock 1200 MHz at most, its peers 1980 MHz",
        {"gpu1": {"clock_memory_mhz": None}},
    ),
    "wiring_as_declared": (
        {"facts": {"topology": topology({(1, 3): SYS})}}, FAIL, "GPU1-GPU3: declared NV18, detected SYS",
        {"facts": {"topology": topology({(1, 3): None})}},
    ),
    "nvlinks_up": (
        {"gpu1": {"ports_up": tuple(range(16)), "ports_down": (16, 17)}}, FAIL, "16 of 18 NVLinks up, not up: 16, 17",
        {"gpu1": {"ports_up": None}},
    ),
    "nvlink_speed": (
        {"gpu1": {"link_mb_s": (26_562,) * 17 + (13_281,)}}, FAIL, "NVLink 17 at 13.281 of 26.562 GB/s",
        {"gpu1": {"link_mb_s": (None,) * 18}},
    ),
    "nvlink_errors": (
        {"gpu1": {"link_replay": 5}}, FAIL, "NVLink errors: replay 5", {"gpu1": {"link_crc_flit": None}},
    ),
    "fabric": (
        {"gpu1": {"fabric_ok": False, "fabric_faults": ("degraded bandwidth",)}}, FAIL, "degraded bandwidth",
        {"gpu1": {"fabric": None, "fabric_ok": None}},
    ),
    "p2p": (
        {"facts": {"topology": topology(p2p={(2, 1): False})}}, FAIL, "GPU1-GPU2 (NV18) one way",
        {"facts": {"topology": topology(p2p={(1, 2): None})}},
    ),
    "iommu_acs": ({"facts": {"iommu_groups": 60}}, WARN, "IOMMU on (60 groups)", {"facts": {"iommu_groups": None}}),
    "nic_count": (
        {"facts": {"topology": topology(nics=())}}, FAIL, "declared 4 NICs, detected none",
        {"facts": {"topology": None}},
    ),
    "nic_link_layer": (
        {"facts": {"topology": topology(nic={"link_layer": "Ethernet"})}}, FAIL,
        "declared infiniband, detected mlx5_1 Ethernet", {"facts": {"topology": topology(nic={"link_layer": None})}},
    ),
    "nic_state": (
        {"facts": {"topology": topology(nic={"state": "DOWN", "physical_state": "Polling"})}}, FAIL,
        "not up: mlx5_1 DOWN/Polling", {"facts": {"topology": topology(nic={"physical_state": None})}},
    ),
    "nic_rate": (
        {"facts": {"topology": topology(nic={"rate_gbit_s": 200.0})}}, FAIL,
        "declared 400 Gbit/s, detected mlx5_1 at 200",
        {"facts": {"topology": topology(nic={"rate_gbit_s": None})}},
    ),
    "nic_affinity": (
        {"facts": {"topology": topology(nic={"links": (SYS,) * COUNT})}}, WARN, "GPU1 without a NIC at PIX or PXB",
        {"facts": {"topology": topology(nic={"links": (None,) * COUNT})}},
    ),
}  # fmt: skip


def test_every_check_has_a_case_a_row_and_a_function() -> None:
    assert set(CASES) == set(OURS) <= set(CHECKS)
    assert set(OURS) <= set(ALL)
    assert all(check.__doc__ for check in OURS.values())


@pytest.mark.parametrize("check", CASES)
def test_fails(check: str) -> None:
    change, expected, words, _ = CASES[check]
    one = said(check, evidence(**change))
    assert (one.verdict, one.check) == (expected, check)
    assert words in one.finding
    assert one.advice
    assert "\n" not in one.finding
    healthy_node = found(check, evidence(**change), "c1")
    assert healthy_node is None or healthy_node.verdict is PASS


@pytest.mark.parametrize("check", CASES)
def test_passes(check: str) -> None:
    old = {"every": {"capability": "7.0", "retired_pages": 61, "retired_pending": False}}
    one = said(check, evidence(**(old if check == "retired_pages" else {})))
    assert (one.verdict, one.advice) == (PASS, "")


@pytest.mark.parametrize("check", CASES)
def test_unknown(check: str) -> None:
    one = said(check, evidence(**CASES[check][3]))
    assert one.verdict is UNKNOWN
    assert one.finding


@pytest.mark.parametrize("check", sorted(set(CASES) - {"iommu_acs"}))
@pytest.mark.parametrize(
    "facts", [None, GpuFacts(problem="NVML did not answer within 20 s"), GpuFacts(topology={"gpus": 3}, problem="x")]
)
def test_unknown_when_nothing_was_read(check: str, facts: GpuFacts | None) -> None:
    one = said(check, evidence(report={"gpus": facts}))
    assert one.verdict is UNKNOWN
    assert (facts.problem if facts else "did not report") in one.finding


def test_the_fault_alone_is_found() -> None:
    """No change above makes another check fail, except where one fault has two faces."""
    twice = {"nic_link_layer": {"nic_affinity"}}  # the near NIC is none of the declared kind
    for check, (change, _, _, _) in CASES.items():
        others = {f.check for f in all_found(evidence(**change)) if f.verdict in (FAIL, WARN)}
        assert others - twice.get(check, set()) == {check}


class TestWhereChecksApply:
    def test_not_on_cpu_nodes_without_gpus(self) -> None:
        e = evidence(report={"gpus": GpuFacts()}, cluster={"accelerator": Accelerator.cpu})
        assert {f.node for check in OURS.values() for f in check(e)} == {"c1"}  # which shows GPUs

    def test_nothing_declared_nothing_said(self) -> None:
        e = evidence(wiring={"intra_node": IntraNode.none, "inter_node": InterNode.none})
        names = {f.check for check in OURS.values() for f in check(e)}
        assert not names & {"wiring_as_declared", "nvlinks_up", *NIC}

    def test_plain_ethernet(self) -> None:
        declared = {"inter_node": InterNode.ethernet, "nics_per_node": None, "nic_gbit_per_s": None}
        assert found("nic_count", evidence(wiring=declared)) is None
        assert verdict("nic_rate", evidence(wiring={**declared, "nic_gbit_per_s": 100.0})) is UNKNOWN

    def test_only_our_gpus_must_be_free(self) -> None:
        busy = {"pids": (7,), "memory_used_bytes": 3 << 30}
        assert verdict("gpu_processes", evidence(gpu1={**busy, "mine": False})) is PASS
        assert verdict("gpu_memory_used", evidence(gpu1={**busy, "mine": False})) is PASS
        assert verdict("gpu_processes", evidence(gpu1={**busy, "mine": True})) is FAIL

    def test_old_and_new_ways_to_repair_memory(self) -> None:
        assert found("retired_pages", evidence()) is None  # H100
        assert found("row_remap", evidence(every={"capability": "7.0", "remap_failed": None})) is None
        assert verdict("retired_pages", evidence(every={"capability": None})) is UNKNOWN

    def test_fabric_before_hopper(self) -> None:
        assert found("fabric", evidence(every={"capability": "8.0", "fabric": None, "fabric_ok": None})) is None
        assert found("fabric", evidence(every={"fabric": "not_supported", "fabric_ok": None})) is None


class TestWiring:
    @staticmethod
    def compare(links: Links, default: Link = NV18, **wiring: Any) -> Finding:
        whole = dict.fromkeys([(i, j) for i in range(COUNT) for j in range(i + 1, COUNT)], default)
        return said("wiring_as_declared", evidence(facts={"topology": topology({**whole, **links})}, wiring=wiring))

    def test_one_gpu_explains_all(self) -> None:
        one = self.compare({(0, 2): SYS, (1, 2): SYS, (2, 3): PHB})
        said_of_it, _, cost = one.finding.partition("; predicted: ")
        assert said_of_it.endswith("GPU2-GPU3: declared NV18, detected PHB; likely culprit: GPU2 (serial 902)")
        assert cost == "a ring of all GPUs carries 18.9 instead of 351 GB/s"

    def test_the_users_own_catalogue_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = tmp_path / "hardware" / "gpu" / "h100_sxm.yaml"
        own.parent.mkdir(parents=True)
        packaged = Path(__file__).parents[2] / "conf" / "hardware" / "gpu" / "h100_sxm.yaml"
        own.write_text(packaged.read_text().replace("  gb_per_s: 25", "  gb_per_s: 12.5"))
        monkeypatch.setenv("CLUSTERRUN_CONFIG_PATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)  # the working directory's conf is stronger
        one = self.compare({(0, 2): SYS, (1, 2): SYS, (2, 3): PHB})
        assert one.finding.endswith("a ring of all GPUs carries 18.9 instead of 176 GB/s")

    def test_one_dead_link_costs_a_ring_nothing(self) -> None:
        assert self.compare({(0, 2): SYS}).finding.endswith("; predicted: a ring of all GPUs can go around it")

    def test_a_missing_count_takes_any_nvlink(self) -> None:
        assert self.compare({(0, 2): Link(LinkKind.NVLINK, 1)}, nvlinks_per_pair=None).verdict is PASS
        assert "declared NVLink, detected SYS" in self.compare({(0, 2): SYS}, nvlinks_per_pair=None).finding

    def test_more_than_declared_is_too_modest(self) -> None:
        one = self.compare({}, nvlinks_per_pair=12)
        assert (one.verdict, "declared NV12, detected NV18" in one.finding) == (WARN, True)

    def test_bad_pairs_count_more_than_unknown_ones(self) -> None:
        assert self.compare({(0, 1): None, (2, 3): SYS}).verdict is FAIL

    def test_pcie(self) -> None:
        assert self.compare({}, PHB, intra_node=IntraNode.pcie).verdict is PASS
        one = self.compare({(0, 1): NV18}, PHB, intra_node=IntraNode.pcie)
        assert (one.verdict, one.finding) == (WARN, "GPU0-GPU1: declared PCIe only, detected NV18")

    def test_hybrid_cube_mesh(self) -> None:
        """NVIDIA DGX-1: quads 0-3 and 4-7, and i with i + 4; which pairs have two links differs between machines."""
        double = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
        single = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}

        def cube(changed: Links) -> tuple[list[str], list[str]]:
            table = {
                **dict.fromkeys(double, Link(LinkKind.NVLINK, 2)),
                **dict.fromkeys(single, Link(LinkKind.NVLINK, 1)),
            }
            table = {**table, **changed}
            rows = tuple(
                tuple(SELF if i == j else table.get((min(i, j), max(i, j)), SYS) for j in range(8)) for i in range(8)
            )
            found = Topology(tuple(Gpu(f"GPU{i}", i) for i in range(8)), rows)
            bad, unknown = wiring_compare(found, IntraNode.nvlink_hybrid, None)
            return [one.text.partition(":")[0] for one in bad], unknown

        assert cube({}) == ([], [])
        assert cube({(2, 6): SYS})[0] == ["GPU2", "GPU6"]
        assert cube({(2, 6): None}) == ([], ["GPU2-GPU6"])

    def test_pairs(self) -> None:
        pairs = {"intra_node": IntraNode.nvlink_pairs, "nvlinks_per_pair": 12}
        bridge = Link(LinkKind.NVLINK, 12)
        assert self.compare({(0, 1): bridge, (2, 3): bridge}, PHB, **pairs).verdict is PASS
        one = self.compare({(0, 1): bridge, (2, 3): Link(LinkKind.NVLINK, 8)}, PHB, **pairs)
        assert (one.verdict, one.finding) == (FAIL, "GPU2-GPU3: declared NV12, detected NV8")
        one = self.compare({(0, 1): bridge}, PHB, **pairs)
        assert "GPU2: declared NV12, detected PHB at best, GPU3: declared NV12, detected PHB at best" in one.finding
        assert self.compare({(0, 1): bridge, (2, 3): None}, PHB, **pairs).verdict is UNKNOWN
        assert self.compare({}, bridge, **pairs).verdict is WARN  # a mesh is more than pairs

    @pytest.mark.parametrize(
        ("pairs", "gpus", "blamed"),
        [
            ([(0, 5)], 8, []),
            ([(0, 5), (3, 5), (5, 7)], 8, [5]),
            ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], 4, [0, 1]),
            ([(0, 1), (2, 3)], 4, []),
            ([(i, j) for i in range(4) for j in range(i + 1, 4)], 4, []),  # everything is bad: nobody's fault
        ],
    )
    def test_culprits(self, pairs: list[tuple[int, int]], gpus: int, blamed: list[int]) -> None:
        assert culprits(pairs, gpus) == blamed

    def test_ports_that_lead_nowhere_by_design(self) -> None:
        """Of a bridged card's 12 ports 4 may be in use."""
        half = {"ports_up": (0, 1, 2, 3), "ports_down": tuple(range(4, 12))}
        pairs = {"intra_node": IntraNode.nvlink_pairs, "nvlinks_per_pair": 4}
        e = evidence(every=half, wiring=pairs)
        e = dataclasses.replace(e, reports={"c2": e.reports["c2"]})  # on c1 all 18 are in use
        assert verdict("nvlinks_up", e) is PASS

    def test_slow_but_equal_links(self) -> None:
        """Peers can't show it, the generation does."""
        assert verdict("nvlink_speed", evidence(every={"link_mb_s": (20_000,) * 18})) is FAIL
        assert verdict("nvlink_speed", evidence(every={"link_mb_s": (20_000,) * 18, "capability": None})) is PASS

    @pytest.mark.parametrize(("errors", "expected"), [(0, PASS), (1, WARN), (4, WARN), (5, FAIL)])
    def test_nvlink_errors(self, errors: int, expected: Verdict) -> None:
        assert verdict("nvlink_errors", evidence(gpu1={"link_crc_data": errors})) is expected

    def test_no_p2p_over_pcie_is_by_design(self) -> None:
        off = dict.fromkeys([(i, j) for i in range(COUNT) for j in range(COUNT)], False)
        flat = dict.fromkeys([(i, j) for i in range(COUNT) for j in range(i + 1, COUNT)], PHB)
        one = said("p2p", evidence(facts={"topology": topology(flat, off)}))
        assert (one.verdict, "6 PCIe pairs without" in one.finding) == (PASS, True)

    def test_iommu_that_passes_through(self) -> None:
        facts = {"iommu_groups": 60, "iommu_options": ("intel_iommu=on", "iommu=pt")}
        assert verdict("iommu_acs", evidence(facts=facts)) is PASS


class TestGpu:
    def test_idle_pcie_generation_never_alarms(self) -> None:
        assert verdict("pcie_generation", evidence(every={"pcie_gen": 1})) is PASS

    def test_a_slot_with_fewer_lanes_than_the_peers(self) -> None:
        one = said("pcie_width", evidence(gpu1={"pcie_width": 8, "pcie_width_max": 8}))
        assert one.finding == "GPU1 (serial 901): PCIe x8 of x16 that its peers have"

    @pytest.mark.parametrize("bits", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100, 0x117])
    def test_harmless_throttle_reasons(self, bits: int) -> None:
        assert verdict("throttle", evidence(gpu1={"throttle": bits})) is PASS

    def test_ecc_off(self) -> None:
        assert verdict("ecc", evidence(gpu1={"ecc_on": False, "ecc_uncorrected": None})) is WARN

    def test_power(self) -> None:
        assert verdict("power_limit", evidence(power_limit_w=700.0)) is PASS
        one = said("power_limit", evidence(every={"power_limit_w": 650.0}, power_limit_w=700.0))
        assert one.finding == "all 4 GPUs: declared 700 W, detected 650 W"
        every = evidence(every={"power_limit_w": 650.0, "power_default_w": 900.0})
        every = dataclasses.replace(every, reports={"c2": every.reports["c2"]})
        assert verdict("power_limit", every) is WARN  # all alike: somebody's decision

    @pytest.mark.parametrize(("now", "expected"), [(50, PASS), (84, WARN), (89, FAIL)])
    def test_temperature_without_a_margin(self, now: int, expected: Verdict) -> None:
        assert verdict("temperature", evidence(gpu1={"margin_c": None, "temperature_c": now})) is expected

    def test_retired_pages(self) -> None:
        old = {"capability": "7.0", "retired_pending": False}
        assert verdict("retired_pages", evidence(every={**old, "retired_pages": 62})) is FAIL

    @pytest.mark.parametrize(
        ("declared", "detected", "expected"),
        [
            (MODEL, "H100 80GB HBM3", PASS),  # an older driver
            (None, MODEL, PASS),
            (None, "NVIDIA L40S", WARN),  # others differ
        ],
    )
    def test_model(self, declared: str | None, detected: str, expected: Verdict) -> None:
        assert verdict("gpu_model", evidence(gpu1={"model": detected}, cluster={"gpu_model": declared})) is expected

    @pytest.mark.parametrize(
        ("wanted", "expected"), [("550", PASS), ("550.54", PASS), ("550.100", FAIL), ("9.9", PASS), ("new", UNKNOWN)]
    )
    def test_oldest_driver(self, wanted: str, expected: Verdict) -> None:
        assert verdict("driver_versions", evidence(min_driver=wanted)) is expected

    @pytest.mark.parametrize("change", [{"nccl": None}, {"cuda": "12.2"}])
    def test_versions_differ(self, change: dict[str, Any]) -> None:
        one = said("driver_versions", evidence(facts=change))
        assert (one.verdict, "others: " in one.finding) == (FAIL, True)

    def test_a_driver_without_a_version(self) -> None:
        assert verdict("driver_versions", evidence(facts={"driver": None})) is UNKNOWN

    def test_fewer_gpus_than_given(self) -> None:
        assert verdict("gpu_lost", evidence(report={"visible_gpus": COUNT})) is PASS
        one = said("gpu_lost", evidence(report={"visible_gpus": 8}))
        assert one.finding == "CUDA_VISIBLE_DEVICES names 8 GPUs, the driver shows 4"

    def test_only_lost_gpus(self) -> None:
        assert verdict("ecc", evidence(every={"error": "GPU is lost"})) is UNKNOWN

    def test_the_worst_part_comes_first(self) -> None:
        e = evidence(every={"ecc_on": False}, gpu1={"ecc_uncorrected": 3})
        one = said("ecc", e)
        assert one.verdict is FAIL
        assert one.finding == (
            "GPU1 (serial 901): 3 uncorrected ECC errors; GPU0, GPU2, GPU3: ECC is off: memory errors go unnoticed"
        )


class TestNic:
    @staticmethod
    def nics(changes: Callable[[Nic], Nic], only: int = COUNT) -> dict[str, Any]:
        machine = snapshot.from_plain(topology())
        return {"topology": topology(nics=tuple(changes(nic) for nic in machine.nics[:only]))}

    def test_more_nics_than_declared(self) -> None:
        """A storage NIC may be down, slow or of another kind."""
        down = topology(nic={"state": "DOWN", "physical_state": "Disabled", "rate_gbit_s": 10.0})
        e = evidence(facts={"topology": down}, wiring={"nics_per_node": 3})
        assert [verdict(check, e) for check in NIC][:4] == [PASS] * 4
        assert "not used: mlx5_1 DOWN/Disabled" in said("nic_state", e).finding

    def test_undeclared(self) -> None:
        free = {"nics_per_node": None, "nic_gbit_per_s": None}
        assert [verdict(check, evidence(wiring=free)) for check in NIC] == [PASS] * 5
        slow = {"topology": topology(nic={"rate_gbit_s": 100.0})}
        assert verdict("nic_rate", evidence(wiring=free, facts=slow)) is WARN
        down = {"topology": topology(nic={"state": "DOWN"})}
        assert verdict("nic_state", evidence(wiring=free, facts=down)) is WARN

    @pytest.mark.parametrize(
        ("kind", "layer"),
        [(InterNode.roce, "Ethernet"), (InterNode.efa, "Unspecified"), (InterNode.infiniband, "InfiniBand")],
    )
    def test_link_layers(self, kind: InterNode, layer: str) -> None:
        facts = self.nics(lambda nic: dataclasses.replace(nic, link_layer=layer))
        assert verdict("nic_link_layer", evidence(wiring={"inter_node": kind}, facts=facts)) is PASS
        assert verdict("nic_rate", evidence(wiring={"inter_node": kind}, facts=facts)) is PASS

    def test_too_few_is_said_once(self) -> None:
        e = evidence(facts=self.nics(lambda nic: nic, only=2))
        assert {check for check in NIC if verdict(check, e) is FAIL} == {"nic_count"}

    def test_few_nics_by_design(self) -> None:
        e = evidence(facts=self.nics(lambda nic: nic, only=1), wiring={"nics_per_node": 1})
        assert [verdict(check, e) for check in NIC] == [PASS] * 5
        assert "by design" in said("nic_affinity", e).finding


class TestPolicy:
    @pytest.mark.parametrize(
        ("policy", "chosen"), [({}, ("c1",)), ({"ecc": "warn"}, ("c1", "c2")), ({"ecc": "off"}, ("c1", "c2"))]
    )
    def test_a_fault_by_policy(self, policy: dict[str, str], chosen: tuple[str, ...]) -> None:
        e = evidence(gpu1={"ecc_uncorrected": 1}, policy=policy)
        findings = all_found(e)
        decision = decide(e.nodes, findings, 2, e.preflight)
        assert decision.chosen == chosen
        assert ("ecc" in {f.check for f in findings}) == (policy != {"ecc": "off"})
        if not policy:
            assert decision.bad == {"c2": "ecc: GPU1 (serial 901): 1 uncorrected ECC errors"}

    @pytest.mark.parametrize(("strict", "chosen"), [(False, ("c1", "c2")), (True, ("c1",))])
    def test_unknown_is_fatal_when_strict(self, strict: bool, chosen: tuple[str, ...]) -> None:
        e = evidence(gpu1={"throttle": None}, strict=strict)
        findings = all_found(e)
        assert decide(e.nodes, findings, 2, e.preflight).chosen == chosen

    def test_hygiene_warns_and_faults_are_fatal(self) -> None:
        by_default = policies({})
        warned = {name for name in OURS if by_default[name] is Policy.warn}
        assert warned == {
            "nvlink_errors", "pcie_replays", "power_limit", "persistence_mode", "gpu_processes", "gpu_memory_used",
            "clocks", "nic_affinity", "iommu_acs",
        }  # fmt: skip
        assert policies({"clocks": "fatal"})["clocks"] is Policy.fatal
