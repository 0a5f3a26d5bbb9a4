"""Estimates for a model that is only a number of parameters yet."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.batch import batch_sizes
from clusterrun.config.schema import RunConfig
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.step import variants, workload
from clusterrun.cost.wiring import Unknown, declared
from clusterrun.errors import ConfigError


@dataclass(frozen=True)
class Estimate:
    """One way to spread the state.

    Attributes:
        share: of the step that waits for communication.
        state_gb: weights, gradients and optimizer per GPU, decimal.
        fits: None when only the activations, which are not known, decide.
        days, mwh: for all tokens, from board power; None when their number is not given.
    """

    variant: str
    step_s: float
    share: float
    tokens_per_s: float
    state_gb: float
    fits: bool | None
    bottleneck: str
    days: float | None
    mwh: float | None


def estimate(config: RunConfig, catalog: Catalog, total_tokens: float | None) -> list[Estimate]:
    """DDP, FSDP and HSDP on the declared cluster. Raises ConfigError when nothing can be predicted."""
    wiring = declared(config.cluster, catalog)
    work = workload(config.train)
    for answer in (wiring, work):
        if isinstance(answer, Unknown):
            raise ConfigError(f"estimate: nothing can be predicted, since {answer.why}; e.g. cluster=h100_nvswitch_ib")
    assert not isinstance(wiring, Unknown)
    assert not isinstance(work, Unknown)
    if config.cluster.gpu_model is None:
        raise ConfigError("estimate: takes a cluster with GPUs; e.g. cluster=h100_nvswitch_ib")
    found = catalog.find_gpu(config.cluster.gpu_model)
    assert found is not None
    gpu, train = found[1], config.train
    samples = batch_sizes(train, config.world_size).per_rank
    estimates = []
    for v in variants(
        work, samples, train.optimizer, train.momentum > 0, gpu, train.precision, wiring, catalog.parameters()
    ):
        rate = samples * train.tokens_per_sample * wiring.ranks / v.step.step_s
        seconds = None if total_tokens is None else total_tokens / rate
        estimates.append(
            Estimate(
                variant=v.name,
                step_s=v.step.step_s,
                share=v.step.share,
                tokens_per_s=rate,
                state_gb=v.state_bytes / 1e9,
                fits=v.fits,
                bottleneck=v.step.bottleneck,
                days=None if seconds is None else seconds / 86400,
                mwh=None if seconds is None else seconds / 3600 * gpu.board_power_w * wiring.ranks / 1e6,
            )
        )
    return estimates
