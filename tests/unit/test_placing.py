"""Which GPUs and NICs to use, by real topologies: what is advised is best, and its effect is the model's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import sample_runs
from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    InterconnectConfig,
    InterNode,
    IntraNode,
    Precision,
    RunConfig,
    TrainConfig,
)
from clusterrun.cost.advice import Advice
from clusterrun.cost.catalog import Catalog
from clusterrun.nccl.placing import placing
from clusterrun.report.facts import read_facts
from clusterrun.report.side_by_side import could_be_faster
from clusterrun.topology.model import Link, LinkKind, Nic
from clusterrun.topology.text import parse_topologies
from conftest import Ended

TOPO = Path(__file__).parents[1] / "corpus" / "topo"
TRAIN = TrainConfig(task="own:Task", parameters=1e9, tokens_per_sample=1024, batch_per_rank=1, precision=Precision.bf16)


def advised(file: str, gpu: str, workers: int, environ: dict[str, str], nodes: int = 1) -> list[Advice]:
    (found, *_) = parse_topologies((TOPO / file).read_bytes())
    wires = InterconnectConfig(IntraNode.nvlink_pairs, None, InterNode.infiniband, 2, 200.0)
    cluster = ClusterConfig(
        accelerator=Accelerator.cuda, gpu_model=gpu, nodes=nodes, nproc_per_node=workers, interconnect=wires
    )
    return placing(found, RunConfig(cluster=cluster, train=TRAIN), Catalog(), environ)


def test_two_gpus_that_a_bridge_joins() -> None:
    """Bridged pairs are 0-1 and 2-3 there: told to use 0 and 2, the advice is a pair, and several times faster."""
    file = "003-4xA100-pcie80-nv12-pairs.txt"
    (found, *_) = parse_topologies((TOPO / file).read_bytes())
    pairs = [{i, j} for i, j, link in found.pairs() if link and link.is_nvlink]
    assert len(pairs) == 2
    apart = next(f"{i},{j}" for i, j, link in found.pairs() if link and not link.is_nvlink)
    (one,) = advised(file, "NVIDIA A100 80GB PCIe", 2, {"CUDA_VISIBLE_DEVICES": apart})
    assert {int(gpu) for gpu in one.change.partition("=")[2].split(",")} in pairs
    assert one.speedup > 3
    assert "carries 234 GB/s" in one.note
    joined = ",".join(map(str, sorted(pairs[0])))
    assert advised(file, "NVIDIA A100 80GB PCIe", 2, {"CUDA_VISIBLE_DEVICES": joined}) == []
    assert advised(file, "NVIDIA A100 80GB PCIe", 4, {}) == [], "all GPUs: NCCL finds the best ring by itself"


def test_all_gpus_of_a_switch_are_alike() -> None:
    assert advised("005-dgx-a100-8gpu-12mlx-nps4.txt", "NVIDIA A100-SXM4-40GB", 4, {}) == []


def test_the_plan_takes_a_topology(clusterrun_here: Callable[..., Ended], tmp_path: Path) -> None:
    model = ["train.parameters=1e9", "train.tokens_per_sample=1024", "train.precision=bf16", "train.batch_per_rank=1"]
    cluster = ["cluster=a100_pcie", "cluster.nproc_per_node=2", "cluster.interconnect.intra_node=nvlink_pairs"]
    file = str(TOPO / "003-4xA100-pcie80-nv12-pairs.txt")
    options = [*cluster, *model, "cluster.shared_dir=/nfs/x", "cluster.env.CUDA_VISIBLE_DEVICES='0,2'"]
    ended = clusterrun_here("plan", "--json", "--topology", file, *options)
    assert ended.code == 0, ended.stderr
    changes = [a["change"].partition("=")[0] for a in json.loads(ended.stdout)["prediction"]["advice"]]
    (found, *_) = parse_topologies(Path(file).read_bytes())
    bridged = any(link and link.is_nvlink and (i, j) == (0, 2) for i, j, link in found.pairs())
    assert ("CUDA_VISIBLE_DEVICES" in changes) != bridged
    assert "faster" in clusterrun_here("plan", "--topology", file, *options).stdout
    wrong = tmp_path / "x"
    wrong.write_text("nothing")
    assert clusterrun_here("plan", "--topology", str(wrong), *options).code == 2


@pytest.mark.parametrize(("bound", "advises"), [("mlx5_0", True), ("mlx5_0,mlx5_1", False)])
def test_nics_that_a_variable_binds(bound: str, advises: bool) -> None:
    """Two ports of 200 Gbit/s are there and active; to bind one of them halves what leaves the node."""
    (found, *_) = parse_topologies((TOPO / "003-4xA100-pcie80-nv12-pairs.txt").read_bytes())
    near = tuple(Link(LinkKind.PXB) for _ in found.gpus)
    nics = tuple(Nic(f"NIC{i}", f"mlx5_{i}", near, (), 200.0, "InfiniBand", "ACTIVE", "LinkUp") for i in range(2))
    wires = InterconnectConfig(IntraNode.nvlink_pairs, None, InterNode.infiniband, 2, 200.0)
    cluster = ClusterConfig(
        accelerator=Accelerator.cuda, gpu_model="NVIDIA A100 80GB PCIe", nodes=2, nproc_per_node=1, interconnect=wires
    )
    with_nics = dataclasses.replace(found, nics=nics)
    got = placing(with_nics, RunConfig(cluster=cluster, train=TRAIN), Catalog(), {"NCCL_IB_HCA": bound})
    assert bool(got) == advises
    if advises:
        assert got[0].change == "NCCL_IB_HCA==mlx5_0,mlx5_1"
        assert 1.2 < got[0].speedup <= 2


def test_the_report_of_a_run_says_it_of_its_nodes(tmp_path: Path) -> None:
    """Workers on GPU4 and GPU5 of a node where GPU5 has lost its NVLinks; the whole nodes are as they should be."""
    facts = read_facts(sample_runs.hopper(tmp_path))
    assert could_be_faster(facts) == [], "a job that takes all GPUs of a node has no choice"
    facts.config.cluster.nproc_per_node = 2
    facts.config.cluster.env = {"CUDA_VISIBLE_DEVICES": "4,5"}
    (said,) = could_be_faster(facts)
    assert said.startswith("faster on n2: CUDA_VISIBLE_DEVICES=0,1")
