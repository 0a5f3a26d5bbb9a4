"""Predicted steps: by hand where that is possible, and what must hold in general."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.schema import (
    Accelerator,
    ClusterConfig,
    Executor,
    GradCompression,
    InterconnectConfig,
    InterNode,
    IntraNode,
    Optimizer,
    Precision,
    RunConfig,
    TrainConfig,
)
from clusterrun.cost.advice import Advice, Job, advice
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.collectives import all_reduce
from clusterrun.cost.degraded import allowed_algorithms, named_nics
from clusterrun.cost.prediction import predict
from clusterrun.cost.step import EFFICIENCY, Exchange, Workload, buckets, ddp_step, variants, workload
from clusterrun.cost.wiring import Unknown, Wiring
from conftest import Ended

CATALOG = Catalog()
PARAMETERS = CATALOG.parameters()
A100 = CATALOG.gpu("a100_sxm_80gb")
ONE, NODE = Wiring(1, 1, float("inf"), ""), Wiring(1, 8, 233, "NVLink")
SLOW = Wiring(2, 8, 233, "NVLink", None, 1.0, "10 Gbit/s", "ethernet")


def test_compute_by_hand() -> None:
    """7e9 parameters, 2,048 tokens: 6 x 7e9 x 2048 FLOPs at 40 % of 312 TFLOPS. One rank never waits."""
    work = Workload(7e9, 6 * 7e9 * 2048)
    step = ddp_step(work, 1, 1, A100, Precision.bf16, ONE, PARAMETERS)
    assert step.compute_s == pytest.approx(6 * 7e9 * 2048 / (312e12 * EFFICIENCY))
    assert step.exposed_s == 0
    assert step.efficiency == 1


def test_overlap_by_hand() -> None:
    """One bucket: it is ready when the backward pass ends, so all of its time is seen."""
    work = Workload(1000, 6e9)
    step = ddp_step(work, 1, 1, A100, Precision.bf16, NODE, PARAMETERS)
    assert step.exposed_s == pytest.approx(all_reduce(4000, NODE, PARAMETERS).seconds)


@given(st.floats(1, 1e12), st.none() | st.floats(0.01, 1e4))
def test_buckets_are_all_of_the_gradients(size: float, mb: float | None) -> None:
    found = buckets(size, mb)
    assert sum(one * count for one, count in found) == pytest.approx(size)
    assert found[0][0] <= (1 if mb is None else mb) * 2**20
    assert max(one for one, _ in found) <= (25 if mb is None else mb) * 2**20


@given(st.floats(1e3, 1e10), st.integers(1, 64), st.none() | st.floats(0.1, 1000))
def test_many_buckets_at_once_are_as_one_after_another(parameters: float, samples: int, mb: float | None) -> None:
    """Against a loop over every bucket: it is sent when it is ready and the one before has gone."""
    work = Workload(parameters, 6 * parameters)
    step = ddp_step(work, samples, 1, A100, Precision.bf16, SLOW, PARAMETERS, Exchange(bucket_mb=mb))
    backward, ready, free = step.compute_s * 2 / 3, 0.0, 0.0
    for size, count in buckets(4 * parameters, mb):
        for _ in range(min(count, 5000)):
            ready += backward * size / (4 * parameters)
            free = max(free, ready) + all_reduce(size, SLOW, PARAMETERS).seconds
        if count > 5000:
            return
    assert step.exposed_s == pytest.approx(max(0.0, free - backward), rel=1e-6, abs=1e-9)


@given(st.floats(1e3, 1e10), st.integers(1, 64))
def test_compressed_gradients_take_half_the_bytes(parameters: float, samples: int) -> None:
    """Communication is between a half and what it was, but for casting, 12 bytes per parameter through memory."""
    work = Workload(parameters, 6 * parameters)
    plain, packed = (
        ddp_step(work, samples, 1, A100, Precision.bf16, SLOW, PARAMETERS, Exchange(kind))
        for kind in (GradCompression.none, GradCompression.bf16)
    )
    casting = 12 * parameters / 2039e9
    assert plain.communication_s / 2 <= packed.communication_s <= plain.communication_s + casting
    assert packed.compute_s == plain.compute_s


@given(st.floats(1e3, 1e11), st.integers(1, 64), st.sampled_from([1, 2, 4]))
def test_a_step_is_between_its_parts_and_their_sum(parameters: float, samples: int, accumulate: int) -> None:
    step = ddp_step(
        Workload(parameters, 6 * parameters), samples * accumulate, accumulate, A100, Precision.bf16, SLOW, PARAMETERS
    )
    assert step.compute_s <= step.step_s <= step.compute_s + step.communication_s + 1e-12
    assert 0 <= step.share <= 1


@pytest.mark.parametrize(
    ("train", "parameters"),
    [
        (TrainConfig(task="linear"), 7850),
        (TrainConfig(task="mlp"), 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10),
        (TrainConfig(task="own:Task", parameters=7e9), 7e9),
    ],
)
def test_parameters(train: TrainConfig, parameters: float) -> None:
    work = workload(train)
    assert isinstance(work, Workload)
    assert work.parameters == parameters


def test_parameters_of_the_gpt_are_those_of_the_model() -> None:
    from clusterrun.train.tasks import Transformer

    work = workload(TrainConfig(task="gpt"))
    assert isinstance(work, Workload)
    assert work.parameters == sum(p.numel() for p in Transformer(256, 2, 4, 128, 128, 0.0).parameters())


def test_an_unknown_model_is_not_guessed() -> None:
    assert isinstance(workload(TrainConfig(task="own:Task")), Unknown)


def test_memory_by_hand() -> None:
    """Adam in fp32: 16 bytes per parameter; 7e9 do not fit into 80 GB, sharded over 16 they do as far as known."""
    found = {
        v.name: v
        for v in variants(Workload(7e9, 4.2e10), 1, Optimizer.adamw, False, A100, Precision.bf16, SLOW, PARAMETERS)
    }
    assert set(found) == {"DDP", "FSDP", "HSDP"}
    assert (found["DDP"].state_bytes, found["DDP"].fits) == (112e9, False)
    assert (found["FSDP"].state_bytes, found["FSDP"].fits) == (7e9, None)
    assert found["HSDP"].state_bytes == 14e9


def job(parameters: float, flops: float, wiring: Wiring, **train: object) -> Job:
    config = RunConfig(
        cluster=ClusterConfig(
            accelerator=Accelerator.cuda,
            nodes=wiring.nodes,
            nproc_per_node=wiring.per_node,
            interconnect=InterconnectConfig(IntraNode.nvswitch, 12, InterNode.infiniband, 8, 200.0),
        ),
        train=TrainConfig(precision=Precision.bf16, **train),  # type: ignore[arg-type]
    )
    return Job(config, Workload(parameters, flops), 8, A100, wiring, PARAMETERS)


def names(found: list[Advice]) -> list[str]:
    return [a.change.split("=")[0] for a in found]


def test_advice_is_computed() -> None:
    """Over a slow network one node is faster than two, and fewer bytes help; with much compute nothing does."""
    slow = advice(job(1e9, 6e9, SLOW), {})
    assert names(slow)[0] == "cluster.nodes"
    assert {"train.accumulate", "train.grad_compression", "HSDP"} <= set(names(slow))
    by_name = {a.change.split("=")[0]: a for a in slow}
    assert slow[0].speedup > 2
    assert 1.9 < by_name["train.grad_compression"].speedup <= 2
    assert advice(job(1e9, 6e13, NODE), {}) == []


@pytest.mark.parametrize(("parameters", "flops"), [(1e8, 6e8), (1e9, 6e12), (3e9, 6e13)])
def test_each_advice_is_what_the_model_says_of_it(parameters: float, flops: float) -> None:
    """Done as told, the throughput is the one that was promised; and every one helps."""
    mine = job(parameters, flops, SLOW)
    now = mine.rate(SLOW)
    for a in advice(mine, {}):
        assert a.speedup >= 1.03
        key, _, value = a.change.partition("=")
        exchange = {
            "train.grad_compression": lambda v: Exchange(GradCompression(v)),
            "train.bucket_mb": lambda v: Exchange(bucket_mb=float(v)),
        }.get(key)
        if exchange is not None:
            assert mine.rate(SLOW, exchange=exchange(value)) / now == pytest.approx(a.speedup)


def test_what_does_not_fit_is_told_how_it_would() -> None:
    """7e9 parameters with Adam: 112 GB each with DDP; sharded over the 8 of a node 14."""
    found = advice(job(7e9, 4.2e13, SLOW, optimizer=Optimizer.adamw), {})
    assert found[0].to_fit
    assert found[0].change in ("FSDP", "HSDP")
    assert "for your own script" in found[0].note
    assert "DDP has 112 of 80" in found[0].note
    huge = advice(job(1e12, 4.2e13, SLOW, optimizer=Optimizer.adamw), {})
    assert (huge[0].change, huge[0].to_fit) == ("more GPUs", True)


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("NCCL_P2P_DISABLE=1", "host memory"),
        ("NCCL_IB_DISABLE=1", "TCP sockets"),
        ("NCCL_IB_HCA=mlx5_0", "1 of 8 NICs"),
        ("NCCL_ALGO=ring", "between ring and tree"),
    ],
)
def test_variables_that_hold_nccl_back(variable: str, says: str) -> None:
    """Each is in the prediction, and to unset it is advised with what that brings."""
    name, _, value = variable.partition("=")
    wide = Wiring(8, 8, 233, "NVLink", None, 190, "8 NICs", "infiniband")
    mine = job(1e9, 6e10, wide)
    held = mine.held_back({name: value})
    assert mine.rate(held) < mine.rate(wide)
    (found,) = (a for a in advice(mine, {name: value}) if a.change == f"unset {variable}")
    assert found.speedup == pytest.approx(mine.rate(wide) / mine.rate(held))
    assert says in found.note
    assert not [a for a in advice(mine, {"NCCL_DEBUG": "INFO"}) if a.change.startswith("unset")]


def test_values_of_nccl_algo_and_nccl_ib_hca() -> None:
    assert allowed_algorithms("Ring") == ("ring",)
    assert allowed_algorithms("^tree") == ("ring", "nvls", "nvls_tree")
    assert allowed_algorithms("broadcast:ring;allreduce:tree,nvls") == ("tree", "nvls")
    assert allowed_algorithms("collnet") is None
    assert [named_nics(v) for v in ("=mlx5_0,mlx5_1", "mlx5_3:1", "mlx5", "^mlx5_0")] == [2, 1, None, None]


def test_gloo_on_cpus_is_predicted() -> None:
    """A ring over TCP: 2(n-1)/n of the gradients over the declared link, which is no faster than the loopback."""
    wires = InterconnectConfig(inter_node=InterNode.ethernet, nic_gbit_per_s=0.1)
    cluster = ClusterConfig(executor=Executor.slurm, nodes=2, interconnect=wires)
    train = TrainConfig(task="mlp", task_args={"hidden": 512, "depth": 2}, batch_per_rank=16)
    one = predict(RunConfig(cluster=cluster, train=train), CATALOG)
    work = workload(train)
    assert isinstance(work, Workload)
    assert (one.why_not, one.rough, one.fits, one.bottleneck) == (None, True, None, "0.1 Gbit/s over TCP")
    assert one.exposed_s == pytest.approx(4 * work.parameters / (0.94 * 0.1e9 / 8), rel=0.1)
    cluster.interconnect.nic_gbit_per_s = 1000
    fast = predict(RunConfig(cluster=cluster, train=train), CATALOG)
    assert fast.exposed_s > 4 * work.parameters / 2e9
    packed = dataclasses.replace(train, grad_compression=GradCompression.fp16)
    cluster.interconnect.nic_gbit_per_s = 0.1
    half = predict(RunConfig(cluster=cluster, train=packed), CATALOG)
    assert half.exposed_s == pytest.approx(one.exposed_s / 2, rel=0.05)


def test_plan_and_estimate_say_it(clusterrun_here: Callable[..., Ended]) -> None:
    plan = clusterrun_here("plan", "cluster=h100_nvswitch_ib", "cluster.shared_dir=/nfs/x", "train=gpt", "--json")
    prediction = json.loads(plan.stdout)["prediction"]
    assert prediction["why_not"] is None
    assert 0 < prediction["share"] < 1
    assert prediction["bottleneck"] == "18 NVLinks per GPU"
    wide = clusterrun_here("estimate", "params=7e9", "total=1e12", "cluster=h100_nvswitch_ib")
    assert wide.code == 0, wide
    assert all(word in wide.stdout for word in ("DDP", "FSDP", "HSDP", "days", "MWh", "112.0 GB"))
    for wrong, words in (
        (("estimate",), "params=7e9"),
        (("estimate", "params=many"), "params=many: must be a number"),
        (("estimate", "params=7e9"), "takes a cluster with GPUs"),
    ):
        ended = clusterrun_here(*wrong)
        assert ended.code == 2
        assert words in ended.stderr


def test_clusters_side_by_side(clusterrun_here: Callable[..., Ended]) -> None:
    model = ("train.parameters=1e9", "train.tokens_per_sample=1024", "train.precision=bf16")
    ended = clusterrun_here("plan", "--compare", "cluster=a100_nvswitch,l40s_pcie,laptop", *model)
    header, nvlink, pcie, laptop = ended.stdout.splitlines()
    assert header.split()[:3] == ["cluster", "ranks", "step"]
    assert nvlink.startswith("a100_nvswitch")
    assert "PCIe 4.0 x16" in pcie
    assert laptop.split()[1] == "4"
    assert laptop.endswith("loopback of one machine, ring")
    shares = json.loads(
        clusterrun_here("plan", "--compare", "cluster=a100_nvswitch,l40s_pcie", "--json", *model).stdout
    )
    assert shares["l40s_pcie"]["share"] > 0
    assert clusterrun_here("plan", "--compare").code == 2
