"""Classes, islands, weak pairs and advice on small matrices."""

from __future__ import annotations

import pytest

from clusterrun.topology.advice import advise
from clusterrun.topology.classify import Wiring, WiringClass, classify
from clusterrun.topology.model import SELF, Gpu, Link, Nic, Topology, TopologyError


def machine(*rows: str, nics: tuple[str, ...] = (), numa: tuple[int, ...] = ()) -> Topology:
    """Rows are the cells right of the diagonal, "?" for unknown; nics are their cells to each GPU."""
    size = len(rows) + 1
    links: list[list[Link | None]] = [[SELF] * size for _ in range(size)]
    for i, row in enumerate(rows):
        for j, token in enumerate(row.split(), i + 1):
            links[i][j] = links[j][i] = None if token == "?" else Link.parse(token)
    gpus = tuple(Gpu(f"GPU{i}", i, numa=numa[i : i + 1]) for i in range(size))
    adapters = tuple(Nic(f"NIC{k}", links=tuple(map(Link.parse, cells.split()))) for k, cells in enumerate(nics))
    return Topology(gpus, tuple(map(tuple, links)), adapters)


def found(*rows: str) -> Wiring:
    return classify(machine(*rows))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (("NV4",), WiringClass.FULL_NVLINK_MESH),
        (("NV4 NODE", "NODE"), WiringClass.NVLINK_PAIRS),
        (("NV18 NV18 SYS SYS", "NV18 SYS SYS", "SYS SYS", "NV18"), WiringClass.PARTIAL_NVLINK_MESH),
        (("PIX PXB", "PXB"), WiringClass.PCIE_SAME_SWITCH),
        (("PIX PHB", "PHB"), WiringClass.PCIE_SAME_SOCKET),
        (("NODE",), WiringClass.PCIE_SAME_SOCKET),
        (("SOC",), WiringClass.PCIE_CROSS_SOCKET),
        (("?",), WiringClass.UNKNOWN),
        (("NV12 ?", "?"), WiringClass.FULL_NVLINK_MESH),
        ((), WiringClass.SINGLE_GPU),
    ],
)
def test_classes(rows: tuple[str, ...], kind: WiringClass) -> None:
    assert found(*rows).kind is kind


def test_no_gpu() -> None:
    assert classify(Topology((), ())).kind is WiringClass.NONE


def test_two_nvlink_islands() -> None:
    wiring = found("NV18 NV18 NV18 SYS SYS SYS SYS", "NV18 NV18 SYS SYS SYS SYS", "NV18 SYS SYS SYS SYS",
                   "SYS SYS SYS SYS", "NV18 NV18 NV18", "NV18 NV18", "NV18")  # fmt: skip
    assert wiring.kind is WiringClass.PARTIAL_NVLINK_MESH
    assert wiring.islands == wiring.sockets == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert len(wiring.cross_socket) == 16


def test_one_weak_pair_in_a_mesh() -> None:
    wiring = found("NV12 NV12 NV12", "NV10 NV12", "NV12")
    assert [(pair.gpus, str(pair.link), str(pair.expected)) for pair in wiring.weak] == [((1, 2), "NV10", "NV12")]
    assert wiring.weak_gpus == ()


def test_one_weak_gpu_behind_switches() -> None:
    wiring = found("NV18 NV16 NV18", "NV16 NV18", "NV16")
    assert wiring.weak_gpus == (2,)
    assert len(wiring.weak) == 3


@pytest.mark.parametrize(
    "rows",
    [
        ("NV1 NV1 NV2", "NV2 NV1", "NV2"),  # p3.8xlarge
        ("NV1 NV2 NV1 SYS", "NV1 NV2 SYS", "NV2 SYS", "NV1"),  # part of a hybrid cube
        ("NV12 SYS SYS", "SYS SYS", "NV12"),  # bridges only where bridges are
    ],
)
def test_designs_that_mix_are_not_called_degraded(rows: tuple[str, ...]) -> None:
    assert found(*rows).weak == ()


def test_gpus_without_a_near_nic() -> None:
    assert classify(machine("NV4 NV4", "NV4", nics=("PIX NODE SYS", "SYS PXB PHB"))).far_from_nics == (2,)
    assert classify(machine("NV4 NV4", "NV4")).far_from_nics == ()
    assert classify(machine("NV4", nics=("SYS ?",))).far_from_nics == (0,)  # GPU1's path is not known


def test_sockets_come_from_numa_where_nvlink_hides_the_path() -> None:
    assert classify(machine("NV4 NV4", "NV4", numa=(0, 0, 1))).sockets == ((0, 1), (2,))


def test_asymmetric_cells_count_as_the_worse_one() -> None:
    nv, sys = Link.parse("NV12"), Link.parse("SYS")
    assert str(classify(Topology((Gpu("GPU0", 0), Gpu("GPU1", 1)), ((SELF, nv), (sys, SELF)))).worst) == "SYS"


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (machine("NV12 NV12", "NV12"), ["every pair has NVLink (NV12)"]),
        (machine("NV12 ?", "NV12"), ["not shown: 1"]),
        (machine("NV12 SYS SYS", "SYS SYS", "NV12"), ["GPU0+GPU1 | GPU2+GPU3", "over SYS"]),
        (machine("NV18 NV16", "NV16"), ["GPU2: NV16 where NV18 is expected"]),
        (machine("NV12 NV12 NV12", "NV10 NV12", "NV12"), ["GPU1-GPU2 NV10"]),
        (machine("PIX SYS SYS", "SYS SYS", "PIX"), ["4 of 6 pairs cross sockets", "GPU0+GPU1 | GPU2+GPU3"]),
        (machine("PIX", nics=("SYS SYS",)), ["one PCIe switch", "no NIC nearer than SYS to GPU0+GPU1"]),
        (machine(), []),
    ],
)
def test_advice(topology: Topology, words: list[str]) -> None:
    lines = advise(topology, classify(topology))
    assert len(lines) <= 2
    assert all(word in "\n".join(lines) for word in words)
    assert bool(lines) is bool(words)


def test_links() -> None:
    assert Link.parse("SOC") == Link.parse("SYS")
    assert str(Link.parse("SOC")) == "SOC"
    order = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV12"]
    ranks = [link.rank for link in map(Link.parse, order) if link]
    assert ranks == sorted(ranks)
    assert [Link.parse(bad) for bad in ("NV0", "NV", "NV123", "OK", "", "pix", "GPU0")] == [None] * 7


def test_a_matrix_must_be_square() -> None:
    with pytest.raises(TopologyError, match="not square"):
        Topology((Gpu("GPU0", 0), Gpu("GPU1", 1)), ((SELF, None),))
