"""What a plan says of its cost: one frozen value, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from clusterrun.config.batch import batch_sizes
from clusterrun.config.schema import Accelerator, RunConfig
from clusterrun.cost.advice import Advice, Job, advice
from clusterrun.cost.catalog import Catalog
from clusterrun.cost.collectives import all_reduce
from clusterrun.cost.step import Exchange, cpu_figures, ddp_step, variants, workload
from clusterrun.cost.wiring import Unknown, Wiring, declared


@dataclass(frozen=True)
class Prediction:
    """Predicted for the declared wiring. ``why_not`` alone is set when nothing can be predicted.

    Attributes:
        step_s, compute_s, exposed_s: one optimizer step, its compute, and communication that is not hidden.
        share: exposed_s over step_s; ``efficiency`` the rest.
        samples_per_s: over all ranks.
        bottleneck, algorithm: of the gradients' all-reduce.
        memory_gb, fits: per GPU, weights, gradients, optimizer and activations; None where not known.
        watts: board power of all GPUs; 0 where not known.
        rough: CPUs, which differ more than the model knows.
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
    rough: bool = False
    advice: tuple[Advice, ...] = ()


def job_of(config: RunConfig, catalog: Catalog) -> Job | str:
    """A run's training step and what it runs on as declared; or why it is not known."""
    wiring = declared(config.cluster, catalog)
    if isinstance(wiring, Unknown):
        return wiring.why
    work = workload(config.train)
    if isinstance(work, Unknown):
        return work.why
    train, parameters = config.train, catalog.parameters()
    if train.batch_per_rank is None and train.global_batch is None:
        return "the batch is not known; give train.batch_per_rank"
    if config.cluster.accelerator is Accelerator.cuda:
        found = catalog.find_gpu(str(config.cluster.gpu_model))
        assert found is not None
        gpu = found[1]
    else:
        gpu = cpu_figures(config.cluster.cpus_per_proc, parameters.cpu)
        work = replace(work, fixed_s=parameters.cpu.step_us / 1e6)
    return Job(config, work, batch_sizes(train, config.world_size).per_rank, gpu, wiring, parameters)


@dataclass(frozen=True)
class Effect:
    """What another wiring does to a job: seconds of ``what``, a step where the job is known, else an all-reduce."""

    what: str
    before_s: float
    after_s: float


def compare(config: RunConfig, catalog: Catalog, before: Wiring, after: Wiring) -> Effect:
    job = job_of(config, catalog)
    if isinstance(job, str):
        parameters = catalog.parameters()
        one, other = (all_reduce(1 << 26, wiring, parameters).seconds for wiring in (before, after))
        return Effect("an all-reduce of 64 MiB", one, other)
    samples = job.samples_per_rank
    return Effect("a step", *(samples * wiring.ranks / job.rate(wiring) for wiring in (before, after)))


def predict(config: RunConfig, catalog: Catalog, environ: Mapping[str, str] | None = None) -> Prediction:
    """Of a run's training step. ``environ``: what NCCL will find in it."""
    job = job_of(config, catalog)
    if isinstance(job, str):
        return Prediction(job)
    environ, train, cpu = environ or {}, config.train, job.wiring.gloo
    wiring, exchange, samples = job.held_back(environ), Exchange.of(train), job.samples_per_rank
    rest = (train.precision, wiring, job.parameters, exchange)
    step = ddp_step(job.work, samples, train.accumulate, job.gpu, *rest)
    micro = samples // train.accumulate
    ddp = variants(job.work, micro, train.optimizer, train.momentum > 0, job.gpu, *rest)[0]
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
        memory_gb=None if cpu else memory,
        fits=None if cpu else ddp.fits,
        watts=job.gpu.board_power_w * wiring.ranks,
        rough=cpu,
        advice=tuple(advice(job, environ)),
    )
