"""Every check of GPUs, wiring and NICs: once failing, once passing, once UNKNOWN; then where they apply, and policy."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.checks import CHECKS, Policy, policies
from clusterrun.config.schema import (
    Accelerator,
    InterNode,
    IntraNode,
)
from clusterrun.preflight.checks import ALL
from clusterrun.preflight.checks.nic import NIC
from clusterrun.preflight.decide import decide
from clusterrun.preflight.gpu_facts import GpuFacts
from clusterrun.preflight.report import Verdict
from gpu_evidence import (
    COUNT,
    FAIL,
    OURS,
    PASS,
    SYS,
    UNKNOWN,
    WARN,
    all_found,
    evidence,
    found,
    said,
    topology,
    verdict,
)

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
