"""What would make a job faster, each change with its predicted effect, from the job's own figures; only what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from clusterrun.config.schema import GradCompression, Precision, RunConfig
from clusterrun.cost.catalog import GpuFigures, ModelParameters
from clusterrun.cost.degraded import by_environment
from clusterrun.cost.step import Exchange, Workload, ddp_step, variants
from clusterrun.cost.wiring import Wiring

LEAST = 1.03  # less is below what the model can tell
_BUCKETS_MB = (1, 5, 50, 100, 200, 400)


@dataclass(frozen=True)
class Advice:
    """A change that helps: what to type, and samples per second against now (1.2: a fifth more).

    ``to_fit``: it is needed, because the job does not fit into memory as it is.
    """

    change: str
    speedup: float
    note: str = ""
    to_fit: bool = False


@dataclass(frozen=True)
class Job:
    """A job and what it runs on. ``wiring`` is as declared; ``environ`` may make it slower."""

    config: RunConfig
    work: Workload
    samples_per_rank: int
    gpu: GpuFigures
    wiring: Wiring
    parameters: ModelParameters

    def held_back(self, environ: Mapping[str, str], without: str = "") -> Wiring:
        """The wiring that is left with these variables, but for one of them."""
        wiring = self.wiring
        for name, change in by_environment(environ, self.config.cluster):
            if name != without:
                wiring = change(wiring, self.parameters)
        return wiring

    def rate(
        self,
        wiring: Wiring,
        times: int = 1,
        precision: Precision | None = None,
        exchange: Exchange | None = None,
    ) -> float:
        """Samples per second over all ranks, with so many times the micro-batches."""
        train = self.config.train
        samples = self.samples_per_rank * times
        step = ddp_step(
            self.work,
            samples,
            train.accumulate * times,
            self.gpu,
            precision or train.precision,
            wiring,
            self.parameters,
            exchange or Exchange.of(train),
        )
        return samples * wiring.ranks / step.step_s


def advice(job: Job, environ: Mapping[str, str]) -> list[Advice]:
    """Changes whose predicted throughput is at least 3 % higher, the best first; before them what is needed to fit."""
    wiring = job.held_back(environ)
    if wiring.ranks == 1:
        found = list(_computing(job, wiring))
    else:
        found = [
            *_computing(job, wiring),
            *_exchange(job, wiring),
            *_environment(job, wiring, environ),
            *_fewer_nodes(job, wiring),
        ]
    found += _sharding(job, wiring)
    return sorted((a for a in found if a.to_fit or a.speedup >= LEAST), key=lambda a: (not a.to_fit, -a.speedup))


def _computing(job: Job, wiring: Wiring) -> Iterator[Advice]:
    if job.config.train.precision is Precision.fp32 and job.gpu.peak_tflops.bf16:
        yield Advice("train.precision=bf16", job.rate(wiring, precision=Precision.bf16) / job.rate(wiring))


def _exchange(job: Job, wiring: Wiring) -> Iterator[Advice]:
    """How gradients travel: less often, smaller, in other parts. In a script of one's own the option is torch's."""
    train, now = job.config.train, job.rate(wiring)
    own = train.script is not None
    note = "gradients travel a quarter as often; the learning rate may need care"
    more = job.rate(wiring, times=4) / now
    yield Advice(f"train.accumulate={train.accumulate * 4} with 4 times the batch", more, note)
    usual = Exchange.of(train)
    if train.grad_compression is GradCompression.none:
        kind = GradCompression.bf16 if job.gpu.peak_tflops.bf16 else GradCompression.fp16
        speed = job.rate(wiring, exchange=replace(usual, compression=kind)) / now
        change = (
            f"{kind.value}_compress_hook of torch in your script" if own else f"train.grad_compression={kind.value}"
        )
        yield Advice(change, speed, "half the bytes between ranks; sums of gradients have fewer digits")
    speeds = {mb: job.rate(wiring, exchange=replace(usual, bucket_mb=mb)) / now for mb in _BUCKETS_MB}
    best = max(speeds, key=lambda mb: speeds[mb])
    change = f"bucket_cap_mb={best} in your script" if own else f"train.bucket_mb={best}"
    yield Advice(change, speeds[best], "fewer, larger messages" if best > 25 else "the exchange begins earlier")


def _environment(job: Job, wiring: Wiring, environ: Mapping[str, str]) -> Iterator[Advice]:
    """Variables that hold NCCL back: its algorithm, its NICs, its links."""
    now = job.rate(wiring)
    for name, _ in by_environment(environ, job.config.cluster):
        free = job.held_back(environ, without=name)
        if name.startswith("NCCL_IB_HCA"):
            note = f"{wiring.inter_what} are bound, {free.inter_what} are declared"
        elif name.startswith("NCCL_ALGO"):
            note = "NCCL chooses between ring and tree by size"
        else:
            note = f"with it: {wiring.inter_what or wiring.intra_what}"
            if wiring.intra_what != free.intra_what:
                note = f"with it: {wiring.intra_what} in a node, not {free.intra_what}"
        yield Advice(f"unset {name}", job.rate(free) / now, note)


def _fewer_nodes(job: Job, wiring: Wiring) -> Iterator[Advice]:
    """The best of half the nodes, a quarter, ... one: a slow network can cost more than nodes bring."""
    now, nodes = job.rate(wiring), wiring.nodes // 2
    speeds = {}
    while nodes >= 1:
        some = replace(wiring, nodes=nodes)
        if nodes == 1:
            some = replace(some, inter_gb_per_s=float("inf"), inter_what="")
        speeds[nodes] = job.rate(some) / now
        nodes //= 2
    if speeds:
        best = max(speeds, key=lambda count: speeds[count])
        few = "one" if best == 1 else f"{best}"
        yield Advice(f"cluster.nodes={best}", speeds[best], f"{wiring.nodes} nodes are slower than {few} here")


def _sharding(job: Job, wiring: Wiring) -> Iterator[Advice]:
    """FSDP or HSDP, which clusterrun's trainer does not do: where the state does not fit, or where it is faster."""
    train = job.config.train
    if wiring.gloo or wiring.ranks == 1:
        return
    micro = job.samples_per_rank // train.accumulate
    ddp, *sharded = variants(
        job.work,
        micro,
        train.optimizer,
        train.momentum > 0,
        job.gpu,
        train.precision,
        wiring,
        job.parameters,
        Exchange.of(train),
    )
    now, needed = job.rate(wiring), ddp.fits is False
    able = [v for v in sharded if v.fits is not False]
    if not able:
        if needed and sharded:
            least = min(v.state_bytes for v in sharded) / 1e9
            yield Advice("more GPUs", 1.0, f"even FSDP needs {least:,.3g} GB per GPU for its state", to_fit=True)
        return
    best = min(able, key=lambda v: v.step.step_s)
    note = (
        f"for your own script: {best.state_bytes / 1e9:,.3g} GB of state per GPU, DDP has {ddp.state_bytes / 1e9:,.3g}"
        + (f" of {job.gpu.memory_gb:g}; {best.step.step_s:.3g} s per micro-batch" if needed else "")
    )
    yield Advice(f"{best.name}", micro * wiring.ranks / best.step.step_s / now, note, to_fit=needed)
