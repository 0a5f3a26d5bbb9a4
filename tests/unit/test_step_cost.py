"""Predicted steps: by hand where that is possible, and what must hold in general."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config.schema import Optimizer, Precision, RunConfig, TrainConfig
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.collectives import all_reduce
from clusterrun.cost.step import EFFICIENCY, Workload, advice, buckets, ddp_step, variants, workload
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


@given(st.floats(1, 1e12))
def test_buckets_are_all_of_the_gradients(size: float) -> None:
    found = buckets(size)
    assert sum(found) == pytest.approx(size)
    assert found[0] <= 2**20
    assert max(found) <= 25 * 2**20


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


def test_advice_is_computed() -> None:
    """Over a slow network one node is faster than two; over NVLink with much compute nothing of that is said."""
    config = RunConfig(train=TrainConfig(precision=Precision.bf16))
    slow = advice(config, Workload(1e9, 6e9), 8, A100, SLOW, PARAMETERS)
    assert [a.change.split("=")[0] for a in slow] == ["cluster.nodes", "train.accumulate"]
    assert slow[0].speedup > 2
    assert advice(config, Workload(1e9, 6e13), 8, A100, NODE, PARAMETERS) == []


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
        (("estimate", "params=7e9"), "the catalogue has no CPUs"),
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
    assert "no CPUs" in laptop
    shares = json.loads(
        clusterrun_here("plan", "--compare", "cluster=a100_nvswitch,l40s_pcie", "--json", *model).stdout
    )
    assert shares["l40s_pcie"]["share"] > 0
    assert clusterrun_here("plan", "--compare").code == 2
