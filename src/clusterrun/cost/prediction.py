"""What a plan says of its cost: one frozen value, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.batch import batch_sizes
from clusterrun.config.schema import RunConfig
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.step import Advice, advice, ddp_step, variants, workload
from clusterrun.cost.wiring import Unknown, declared


@dataclass(frozen=True)
class Prediction:
    """Predicted for the declared wiring. ``why_not`` alone is set when nothing can be predicted.

    Attributes:
        step_s, compute_s, exposed_s: one optimizer step, its compute, and communication that is not hidden.
        share: exposed_s over step_s; ``efficiency`` the rest.
        samples_per_s: over all ranks.
        bottleneck, algorithm: of the gradients' all-reduce.
        memory_gb, fits: per GPU, weights, gradients, optimizer and activations; None where not known.
        watts: board power of all GPUs.
    """

    why_not: str | None = None
    step_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    share: float = 0.0
    efficiency: float = 0.0
    samples_per_s: float = 0.0
    bottleneck: str = ""
    algorithm: str = ""
    memory_gb: float | None = None
    fits: bool | None = None
    watts: float = 0.0
    advice: tuple[Advice, ...] = ()


def predict(config: RunConfig, catalog: Catalog) -> Prediction:
    """Of a run's training step."""
    wiring = declared(config.cluster, catalog)
    if isinstance(wiring, Unknown):
        return Prediction(wiring.why)
    work = workload(config.train)
    if isinstance(work, Unknown):
        return Prediction(work.why)
    if config.train.batch_per_rank is None and config.train.global_batch is None:
        return Prediction("the batch is not known; give train.batch_per_rank")
    assert config.cluster.gpu_model is not None
    found = catalog.find_gpu(config.cluster.gpu_model)
    assert found is not None
    gpu, parameters, train = found[1], catalog.parameters(), config.train
    samples = batch_sizes(train, config.world_size).per_rank
    step = ddp_step(work, samples, train.accumulate, gpu, train.precision, wiring, parameters)
    ddp = variants(
        work, samples // train.accumulate, train.optimizer, train.momentum > 0, gpu, train.precision, wiring, parameters
    )[0]
    memory = None if ddp.activation_bytes is None else (ddp.state_bytes + ddp.activation_bytes) / 1e9
    return Prediction(
        step_s=step.step_s,
        compute_s=step.compute_s,
        exposed_s=step.exposed_s,
        share=step.share,
        efficiency=step.efficiency,
        samples_per_s=samples * wiring.ranks / step.step_s,
        bottleneck=step.bottleneck,
        algorithm=step.algorithm,
        memory_gb=memory,
        fits=ddp.fits,
        watts=gpu.board_power_w * wiring.ranks,
        advice=tuple(advice(config, work, samples, gpu, wiring, parameters)),
    )
