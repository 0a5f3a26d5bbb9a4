"""Predicted time of collectives: the best of ring, tree and NVLS over a wiring.

An alpha-beta model whose rate is that of the slowest link an algorithm crosses, with NCCL's algorithms (structure after
src/graph/tuning.cc of NCCL 2.30, in words in docs/prediction.md). A message is cut into chunks that follow one another
through the steps. Each chunk costs something at each step beside its bytes, so small chunks are dear, and large ones
fill the pipeline slowly; with the best chunk this adds a term with the square root of the size, which is what the plain
alpha-beta line lacks between 1 and 64 MiB. What a chunk costs is taken as a share of the step's latency:

    t = base + L + size / rate + 2 sqrt(C size / rate)      L = sum of hop,  C = sum of chunk share x hop

Sizes are bytes as nccl-tests counts them; rates decimal GB/s; times seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterrun.cost.catalog import ModelParameters
from clusterrun.cost.wiring import Wiring


@dataclass(frozen=True)
class Cost:
    """The time of one collective.

    Attributes:
        algorithm: ring, tree, nvls, nvls_tree or direct.
        bottleneck: the link that decides the rate, in words.
        rate_gb_per_s: size over time that a very large one reaches.
    """

    seconds: float
    algorithm: str
    bottleneck: str
    rate_gb_per_s: float


def all_reduce(size: float, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """Every rank ends with the sum of ``size`` bytes."""
    n, m = wiring.ranks, wiring.nodes
    if n < 2:
        return Cost(0.0, "none", "one rank", math.inf)
    if wiring.gloo:
        return _gloo(size, n / (2 * (n - 1)), 2 * (n - 1), wiring, parameters)
    in_node = wiring.per_node - 1
    tree_hops = 2 * math.ceil(math.log2(m)) if m > 1 else 0
    tree_out = 1.0 if m == 2 else 0.5  # a node of a double tree sends its sum up, and down to two children when m > 2
    ways = [
        _way("ring", size, n / (2 * (n - 1)), 1.0, wiring, 2 * in_node, 2 * (m - 1), parameters),
    ]
    if m > 1:
        bus = wiring.intra_gb_per_s * parameters.tree_share / 2
        ways.append(_limited("tree", size, bus, tree_out, wiring, 2 * in_node, tree_hops, parameters))
    if wiring.nvls_gb_per_s is not None:
        name = "nvls" if m == 1 else "nvls_tree"
        ways.append(_limited(name, size, wiring.nvls_gb_per_s, tree_out, wiring, 2, tree_hops, parameters))
    allowed = [way for way in ways if wiring.algorithms is None or way.algorithm in wiring.algorithms]
    return min(allowed or ways, key=lambda cost: cost.seconds)


def all_gather(size: float, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """Every rank ends with ``size`` bytes, a part from each."""
    n, m = wiring.ranks, wiring.nodes
    if n < 2:
        return Cost(0.0, "none", "one rank", math.inf)
    if wiring.gloo:
        return _gloo(size, n / (n - 1), n - 1, wiring, parameters)
    return _way("ring", size, n / (n - 1), 1.0, wiring, wiring.per_node - 1, m - 1, parameters)


def reduce_scatter(size: float, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """Every rank begins with ``size`` bytes and ends with its part of the sum: an all-gather backwards."""
    return all_gather(size, wiring, parameters)


def broadcast(size: float, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """One rank's ``size`` bytes go along a chain of all."""
    if wiring.ranks < 2:
        return Cost(0.0, "none", "one rank", math.inf)
    if wiring.gloo:
        return _gloo(size, 1.0, wiring.ranks - 1, wiring, parameters)
    return _way("ring", size, 1.0, 1.0, wiring, wiring.per_node - 1, wiring.nodes - 1, parameters)


def all_to_all(size: float, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """Every rank sends another part of its ``size`` bytes to each rank."""
    n, p = wiring.ranks, wiring.per_node
    if n < 2:
        return Cost(0.0, "none", "one rank", math.inf)
    inside = wiring.intra_gb_per_s * n / (p - 1) if p > 1 else math.inf
    outside = wiring.inter_gb_per_s * n / (p * (n - p)) if n > p else math.inf
    rate, what = min((inside, wiring.intra_what), (outside, wiring.inter_what))
    return _cost("direct", size, rate, what, wiring, 1, 1 if n > p else 0, parameters)


COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
}


def _way(
    name: str,
    size: float,
    of_bus: float,
    out: float,
    wiring: Wiring,
    inner: int,
    outer: int,
    parameters: ModelParameters,
) -> Cost:
    """A ring: inside and between nodes alike, each link carries size / of_bus."""
    rate, what = min(
        (wiring.intra_gb_per_s * of_bus, wiring.intra_what), (wiring.inter_gb_per_s * of_bus * out, wiring.inter_what)
    )
    return _cost(name, size, rate, what, wiring, inner, outer, parameters)


def _limited(
    name: str,
    size: float,
    inside: float,
    out: float,
    wiring: Wiring,
    inner: int,
    outer: int,
    parameters: ModelParameters,
) -> Cost:
    """A tree: ``inside`` is size over time in a node, ``out`` the share of a node's network that one size may use."""
    rate, what = min((inside, wiring.intra_what), (wiring.inter_gb_per_s * out, wiring.inter_what))
    return _cost(name, size, rate, what, wiring, inner, outer, parameters)


def _cost(
    name: str, size: float, rate: float, what: str, wiring: Wiring, inner: int, outer: int, parameters: ModelParameters
) -> Cost:
    if wiring.gloo:
        return _gloo(size, rate / min(wiring.intra_gb_per_s, wiring.inter_gb_per_s), inner + outer, wiring, parameters)
    inside, outside = inner * parameters.hop_in_node_us, outer * parameters.hop_between_us[wiring.network]
    chunks = inside * parameters.chunk_in_node + outside * parameters.chunk_between[wiring.network]
    return _summed(parameters.base_us + inside + outside, chunks, size, rate, name, what)


def _gloo(size: float, of_bus: float, steps: int, wiring: Wiring, parameters: ModelParameters) -> Cost:
    """Gloo's ring: all ranks take each step together, so the slowest link decides on every one of them."""
    cpu = parameters.cpu
    rate, what = min((wiring.intra_gb_per_s, wiring.intra_what), (wiring.inter_gb_per_s, wiring.inter_what))
    hops = steps * (cpu.hop_between_us if wiring.nodes > 1 else cpu.hop_in_node_us)
    return _summed(cpu.base_us + hops, hops * cpu.chunk_share, size, rate * of_bus, "ring", what)


def _summed(latency_us: float, chunks_us: float, size: float, rate: float, name: str, what: str) -> Cost:
    wire_us = size / rate / 1e3
    return Cost((latency_us + wire_us + 2 * math.sqrt(chunks_us * wire_us)) / 1e6, name, what, rate)
