"""Corners of the harder checks of GPUs, wiring and NICs: what must not alarm, and who is named when many could be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.schema import (
    InterNode,
    IntraNode,
)
from clusterrun.preflight.checks.nic import NIC
from clusterrun.preflight.checks.wiring import _compare as wiring_compare
from clusterrun.preflight.checks.wiring import culprits
from clusterrun.preflight.report import Finding, Verdict
from clusterrun.topology import snapshot
from clusterrun.topology.model import SELF, Gpu, Link, LinkKind, Nic, Topology
from gpu_evidence import (
    COUNT,
    FAIL,
    MODEL,
    NV18,
    PASS,
    PHB,
    SYS,
    UNKNOWN,
    WARN,
    Links,
    evidence,
    said,
    topology,
    verdict,
)


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
