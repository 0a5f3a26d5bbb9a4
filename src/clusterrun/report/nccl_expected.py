"""What the hardware of somebody's nccl-tests table should give: the cost model's bus bandwidth at the table's peak."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clusterrun.config.schema import Accelerator, ClusterConfig, InterconnectConfig, InterNode, IntraNode
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.collectives import COLLECTIVES
from clusterrun.cost.wiring import Unknown, declared
from clusterrun.measure.collectives import FACTORS
from clusterrun.measure.nccl_tests import Status, Table

_NAMES = {"alltoall": "all_to_all"}
_LOW = 0.75  # of what is expected: the model's error on published tables is 7 % in the median, 16 % at most in a table


@dataclass(frozen=True)
class Expectation:
    """``busbw`` in GB/s at the table's peak size, or why there is none."""

    busbw: float | None
    words: str
    share: float | None = None  # of it that the table reached


def expectation(table: Table, cluster: ClusterConfig | None, catalog: Catalog) -> Expectation:
    """For the declared cluster, else for what the table itself says of its GPUs, which is enough inside one node."""
    peak, ranks = table.peak, table.ranks
    name = _NAMES.get(table.collective or "", table.collective or "")
    if table.status is not Status.OK or peak is None:
        return Expectation(None, "")
    if ranks is None or ranks < 2 or name not in COLLECTIVES:
        return Expectation(None, "not compared: ranks or collective not known")
    nodes = table.nodes or (cluster.nodes if cluster else None)
    if nodes is None or ranks % nodes:
        return Expectation(None, "not compared: how many nodes is not known; give cluster=NAME")
    if cluster is None and nodes > 1:
        return Expectation(None, "not compared: the network between the nodes is not known; give cluster=NAME")
    part = _with(cluster, table, catalog)
    wiring = (
        part
        if isinstance(part, Unknown)
        else declared(replace(part, nodes=nodes, nproc_per_node=ranks // nodes), catalog)
    )
    if isinstance(wiring, Unknown):
        return Expectation(None, f"not compared: {wiring.why}")
    cost = COLLECTIVES[name](peak.size, wiring, catalog.parameters())
    busbw = peak.size / cost.seconds * FACTORS[name](ranks) / 1e9
    share = peak.out_of_place.busbw / busbw
    judged = "as expected" if share >= _LOW else "LOW"
    words = f"{judged}: {100 * share:.0f}% of {busbw:.3g} GB/s predicted ({cost.bottleneck}, {cost.algorithm})"
    return Expectation(busbw, words, share)


def _with(cluster: ClusterConfig | None, table: Table, catalog: Catalog) -> ClusterConfig | Unknown:
    if cluster is not None:
        return cluster
    if table.gpu is None:
        return Unknown("the table does not name its GPUs; give cluster=NAME")
    found = catalog.find_gpu(table.gpu)
    if found is None:
        return Unknown(f"{table.gpu} is not in the catalogue")
    link = found[1].link
    same = [one.wiring for one in found[1].all_reduce if one.gpus == table.ranks]  # of a box like it
    intra = IntraNode((same or (link.joined_by if link else []) or ["pcie"])[0])
    wires = InterconnectConfig(intra_node=intra, inter_node=InterNode.none)
    return ClusterConfig(accelerator=Accelerator.cuda, gpu_model=table.gpu, interconnect=wires)
