"""Predicted collectives: what must hold whatever the parameters, and that large sizes come out as published."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.schema import Accelerator, ClusterConfig, Executor, InterconnectConfig, InterNode, IntraNode
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.collectives import COLLECTIVES, all_reduce
from clusterrun.cost.rings import best_ring
from clusterrun.cost.wiring import Unknown, Wiring, declared

PARAMETERS = Catalog().parameters()
RATES = st.floats(0.1, 2000)
SIZES = st.floats(1, 2**36)
WIRINGS = st.builds(
    Wiring,
    nodes=st.integers(1, 64),
    per_node=st.integers(1, 16),
    intra_gb_per_s=RATES,
    intra_what=st.just("in"),
    nvls_gb_per_s=st.none() | RATES,
    inter_gb_per_s=RATES,
    inter_what=st.just("out"),
    network=st.sampled_from(["infiniband", "roce", "efa", "efa_v2", "ethernet"]),
    gloo=st.booleans(),
)
NAMES = st.sampled_from(sorted(COLLECTIVES))


@given(NAMES, WIRINGS, SIZES, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(name: str, wiring: Wiring, size: float, factor: float) -> None:
    now = COLLECTIVES[name](size, wiring, PARAMETERS).seconds
    for faster in (
        replace(wiring, inter_gb_per_s=wiring.inter_gb_per_s * factor),
        replace(wiring, intra_gb_per_s=wiring.intra_gb_per_s * factor),
        replace(wiring, nvls_gb_per_s=(wiring.nvls_gb_per_s or 1) * factor),
    ):
        assert COLLECTIVES[name](size, faster, PARAMETERS).seconds <= now * (1 + 1e-12)


@given(WIRINGS, SIZES)
def test_more_ranks_are_never_faster_on_a_ring(wiring: Wiring, size: float) -> None:
    """At equal bytes; a ring alone, since a tree over two nodes beats one over three."""
    ring = replace(wiring, nvls_gb_per_s=None, nodes=1, inter_gb_per_s=math.inf)
    assert all_reduce(size, ring, PARAMETERS).seconds <= all_reduce(
        size, replace(ring, per_node=ring.per_node + 1), PARAMETERS
    ).seconds * (1 + 1e-12)


@given(NAMES, WIRINGS, SIZES)
def test_more_bytes_take_longer(name: str, wiring: Wiring, size: float) -> None:
    once, twice = (COLLECTIVES[name](s, wiring, PARAMETERS).seconds for s in (size, 2 * size))
    assert once <= twice <= 2 * once + 1e-12
    assert (once == 0) == (wiring.ranks == 1)


@given(NAMES, WIRINGS)
def test_units(name: str, wiring: Wiring) -> None:
    """The rate is decimal GB/s: a very large size takes size / rate seconds."""
    if wiring.ranks > 1:
        cost = COLLECTIVES[name](1e15, wiring, PARAMETERS)
        assert cost.seconds == pytest.approx(1e15 / (cost.rate_gb_per_s * 1e9), rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "nodes", "network", "ports", "gbit", "published", "within"),
    [  # bus bandwidth of large sizes, GB/s: stas00/ml-engineering 744d01e, nccl-tests tables of tests/corpus
        ("NVIDIA A100-SXM4-80GB", 1, InterNode.none, None, None, 233, 0.05),
        ("NVIDIA H100 80GB HBM3", 1, InterNode.none, None, None, 480, 0.05),
        ("NVIDIA B200", 1, InterNode.none, None, None, 842, 0.08),
        ("NVIDIA A100-SXM4-40GB", 2, InterNode.roce, 8, 200, 185, 0.15),
        ("NVIDIA H100 80GB HBM3", 2, InterNode.efa, 32, 100, 487, 0.15),
        ("NVIDIA H200", 16, InterNode.efa, 16, 200, 366, 0.15),
    ],
)
def test_published_bus_bandwidth(
    gpu: str, nodes: int, network: InterNode, ports: int | None, gbit: float | None, published: float, within: float
) -> None:
    wires = InterconnectConfig(
        intra_node=IntraNode.nvswitch, inter_node=network, nics_per_node=ports, nic_gbit_per_s=gbit
    )
    cluster = ClusterConfig(
        accelerator=Accelerator.cuda, gpu_model=gpu, nodes=nodes, nproc_per_node=8, interconnect=wires
    )
    wiring = declared(cluster, Catalog())
    assert isinstance(wiring, Wiring)
    size, n = 8 * 2**30, 8 * nodes
    busbw = size / all_reduce(size, wiring, PARAMETERS).seconds / 1e9 * 2 * (n - 1) / n
    assert busbw == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        (ClusterConfig(executor=Executor.slurm, nodes=2), "nic_gbit_per_s is not given"),
        (ClusterConfig(accelerator=Accelerator.cuda), "gpu_model is not given"),
        (ClusterConfig(accelerator=Accelerator.cuda, gpu_model="Voodoo 2"), "Voodoo 2: not in the catalogue"),
        (ClusterConfig(accelerator=Accelerator.cuda, gpu_model="NVIDIA L40S", nodes=2), "nic_gbit_per_s is not given"),
    ],
)
def test_what_is_not_known_is_said(cluster: ClusterConfig, why: str) -> None:
    answer = declared(cluster, Catalog())
    assert isinstance(answer, Unknown)
    assert why in answer.why


def test_the_wiring_decides() -> None:
    """The same two GPUs: bridged NVLink beats PCIe by an order of magnitude; four bridged pairs are as slow as PCIe."""
    answers = []
    for intra, ranks in ((IntraNode.nvlink_pairs, 2), (IntraNode.pcie, 2), (IntraNode.nvlink_pairs, 4)):
        cluster = ClusterConfig(
            accelerator=Accelerator.cuda,
            gpu_model="NVIDIA A100 80GB PCIe",
            nproc_per_node=ranks,
            interconnect=InterconnectConfig(intra_node=intra),
        )
        answer = declared(cluster, Catalog())
        assert isinstance(answer, Wiring)
        answers.append(answer.intra_gb_per_s)
    assert answers[0] > 10 * answers[1]
    assert answers[1] <= answers[2] < 2 * answers[1]


def test_the_best_ring_goes_around_a_dead_link_but_not_around_a_dead_gpu() -> None:
    fast, slow = 300.0, 10.0
    rates = [[0.0 if i == j else fast for j in range(8)] for i in range(8)]
    assert best_ring(rates) == fast
    rates[5][7] = rates[7][5] = slow
    assert best_ring(rates) == fast
    for other in range(8):
        rates[5][other] = rates[other][5] = slow
    assert best_ring(rates) == slow
    pairs = [[0.0 if i == j else fast if i // 2 == j // 2 else slow for j in range(4)] for i in range(4)]
    assert best_ring(pairs) == slow  # bridged pairs: every ring crosses PCIe
    assert best_ring([[0, fast], [fast, 0]]) == fast
    assert best_ring([[0.0]]) is None


@given(st.integers(3, 6).flatmap(lambda n: st.lists(st.floats(1, 100), min_size=n * n, max_size=n * n)))
def test_the_best_ring_is_the_best_of_all(flat: list[float]) -> None:
    n = math.isqrt(len(flat))
    rates = [[flat[max(i, j) * n + min(i, j)] for j in range(n)] for i in range(n)]
    rings = ([0, *rest] for rest in permutations(range(1, n)))
    assert best_ring(rates) == max(min(rates[a][b] for a, b in zip(r, [*r[1:], 0], strict=True)) for r in rings)
