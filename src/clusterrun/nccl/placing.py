"""Which GPUs of a node and which NICs to use, by the topology that was detected: advice with its predicted effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from clusterrun.config.schema import Accelerator, RunConfig
from clusterrun.cost.advice import LEAST, Advice
from clusterrun.cost.catalog import PCIE_X16_GB_PER_S, Catalog, GpuFigures, ModelParameters
from clusterrun.cost.prediction import compare
from clusterrun.cost.rings import MOST, best_ring
from clusterrun.cost.wiring import Unknown, Wiring, declared
from clusterrun.nccl.harm import selected
from clusterrun.nccl.on_node import chosen_nics
from clusterrun.nccl.settings import LAYERS
from clusterrun.topology.model import Link, LinkKind, Nic, Topology


def link_rate(link: Link | None, gpu: GpuFigures, parameters: ModelParameters) -> float:
    """GB/s each way that an all-reduce gets out of a link between two GPUs; 0 for one that is not known."""
    if link is None:
        return 0.0
    if link.is_nvlink and gpu.link is not None:
        return link.nvlinks * gpu.link.gb_per_s * parameters.link_share
    pcie = PCIE_X16_GB_PER_S.get(gpu.pcie_generation or 0, 0.0) * parameters.pcie_share
    return pcie / 2 if link.kind is LinkKind.SYS else pcie  # between sockets about half (wiring reference, section 3)


def placing(found: Topology, config: RunConfig, catalog: Catalog, environ: Mapping[str, str]) -> list[Advice]:
    """What would be faster on such a node. Nothing where the topology or the job is not known well enough."""
    cluster = config.cluster
    wiring = declared(cluster, catalog)
    known = catalog.find_gpu(cluster.gpu_model or "") if cluster.accelerator is Accelerator.cuda else None
    if isinstance(wiring, Unknown) or known is None:
        return []
    both = [*_gpus(found, config, catalog, known[1], wiring, environ), *_nics(found, config, catalog, wiring, environ)]
    return [one for one in both if one.speedup >= LEAST]


def _gpus(
    found: Topology,
    config: RunConfig,
    catalog: Catalog,
    gpu: GpuFigures,
    wiring: Wiring,
    environ: Mapping[str, str],
) -> Iterator[Advice]:
    """Another choice of GPUs, where a job takes some of a node's."""
    count, per_node = len(found.gpus), config.cluster.nproc_per_node
    if not 1 < per_node < count <= MOST:
        return
    parameters = catalog.parameters()

    def ring(some: Sequence[int]) -> float:
        return best_ring([[link_rate(found.links[i][j], gpu, parameters) for j in some] for i in some]) or 0.0

    listed = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    given = [int(one) for one in listed if one.strip().isdigit() and int(one) < count]
    now = given[:per_node] if len(given) >= per_node else list(range(per_node))
    best = max(combinations(range(count), per_node), key=ring)
    if not ring(now) or ring(best) <= ring(now):
        return
    before, after = (
        replace(wiring, intra_gb_per_s=ring(some), intra_what="", nvls_gb_per_s=None) for some in (now, best)
    )
    effect = compare(config, catalog, before, after)
    note = (
        f"a ring of {_names(best)} carries {ring(best):.3g} GB/s, of {_names(now)} {ring(now):.3g}; "
        f"as it is, {effect.what} takes {effect.before_s * 1e3:.3g} ms; needs all GPUs of the node to choose from"
    )
    yield Advice(f"CUDA_VISIBLE_DEVICES={','.join(map(str, best))}", effect.before_s / effect.after_s, note)


def _nics(
    found: Topology, config: RunConfig, catalog: Catalog, wiring: Wiring, environ: Mapping[str, str]
) -> Iterator[Advice]:
    """Other NICs than those that NCCL_IB_HCA binds. Where nothing binds them clusterrun does it on each node."""
    wires = config.cluster.interconnect
    layer, bound = LAYERS.get(wires.inter_node), environ.get("NCCL_IB_HCA")
    if layer is None or bound is None or wiring.nodes == 1:
        return
    fit = chosen_nics(found, layer, wires.nic_gbit_per_s, wires.nics_per_node)
    allowed = set(selected(bound, [nic.device or nic.name for nic in found.nics]))
    now = [nic for nic in found.nics if (nic.device or nic.name) in allowed]
    whole, part = _rate(fit), _rate(now)
    if not part or whole <= part:
        return
    before = replace(wiring, inter_gb_per_s=wiring.inter_gb_per_s * min(1.0, part / whole), inter_what="")
    effect = compare(config, catalog, before, wiring)
    note = f"{part:g} Gbit/s per node are bound, {whole:g} are there and fit"
    value = ",".join(nic.device or nic.name for nic in fit)
    yield Advice(f"NCCL_IB_HCA=={value}", effect.before_s / effect.after_s, note)


def _rate(nics: Sequence[Nic]) -> float:
    """Gbit/s together; across sockets from every GPU a NIC is worth half (as PCIe between GPUs)."""
    far = [nic for nic in nics if nic.links and all(k is not None and k.kind is LinkKind.SYS for k in nic.links)]
    return sum((nic.rate_gbit_s or 0.0) * (0.5 if nic in far else 1.0) for nic in nics)


def _names(gpus: Sequence[int]) -> str:
    return ", ".join(f"GPU{gpu}" for gpu in gpus)
