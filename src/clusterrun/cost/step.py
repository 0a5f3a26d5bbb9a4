"""Predicted cost of a training step: compute, gradient communication as DDP overlaps it, memory of sharded variants.

Compute is 6 FLOPs per parameter and token (2 forward, 4 backward; Kaplan et al. 2020) at ``EFFICIENCY`` of the GPU's
dense peak. What the formula leaves out (Python, kernel starts, input) makes small models slower than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.schema import GradCompression, Optimizer, Precision, TrainConfig
from clusterrun.cost.catalog import CpuParameters, GpuFigures, ModelParameters, PeakFigures
from clusterrun.cost.collectives import all_gather, all_reduce, reduce_scatter
from clusterrun.cost.wiring import Unknown, Wiring
from clusterrun.train.builtin import CLASSES, FEATURES, check_task_args

EFFICIENCY = 0.4  # of dense peak: what well-kept training loops report; 0.3 to 0.5 is usual
_MIB = 2**20
_FIRST_BUCKET, _BUCKET = 1 * _MIB, 25 * _MIB  # DistributedDataParallel's defaults
_BLOCKS = 32  # that a sharded model is gathered in, one after another: the layers of a transformer of some size
_FP32, _HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Workload:
    """What one optimizer step computes on each rank.

    Attributes:
        parameters: numbers that have a gradient.
        flops_per_sample: forward and backward.
        activation_bytes_per_sample: roughly, what the backward pass keeps; None where not known.
        fixed_s: what each step takes beside; 0 where that is not known.
    """

    parameters: float
    flops_per_sample: float
    activation_bytes_per_sample: float | None = None
    fixed_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """How DDP exchanges gradients: what they are cast to on the way, and MiB of a bucket (None: torch's own)."""

    compression: GradCompression = GradCompression.none
    bucket_mb: float | None = None

    @classmethod
    def of(cls, train: TrainConfig) -> Exchange:
        return cls(train.grad_compression, train.bucket_mb)


@dataclass(frozen=True)
class StepCost:
    """One optimizer step.

    Attributes:
        step_s, compute_s: the whole, and its part that computes.
        communication_s: of all gradients; ``exposed_s`` is what the backward pass does not hide.
        share: exposed communication over the step.
        bottleneck, algorithm: of the all-reduce.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    bottleneck: str
    algorithm: str

    @property
    def share(self) -> float:
        return self.exposed_s / self.step_s if self.step_s else 0.0

    @property
    def efficiency(self) -> float:
        """Against ranks that need not talk (weak scaling)."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def workload(train: TrainConfig) -> Workload | Unknown:
    """Of a built-in task, or of ``train.parameters``."""
    if train.parameters is not None:
        tokens = train.tokens_per_sample
        return Workload(train.parameters, 6 * train.parameters * tokens)
    if train.task == "linear":
        parameters = float((FEATURES + 1) * CLASSES)
        return Workload(parameters, 6 * parameters, FEATURES * _FP32)
    if train.task == "mlp":
        args = check_task_args("mlp", train.task_args)
        hidden, depth = int(args["hidden"]), int(args["depth"])
        parameters = (FEATURES + 1) * hidden + (depth - 1) * (hidden + 1) * hidden + (hidden + 1) * CLASSES
        return Workload(float(parameters), 6.0 * parameters, (FEATURES + 2 * depth * hidden) * _FP32)
    if train.task == "gpt":
        args = check_task_args("gpt", train.task_args)
        width, layers, context = int(args["width"]), int(args["layers"]), int(args["context"])
        parameters = 256 * width + context * width + layers * (12 * width**2 + 13 * width) + 2 * width
        attention = 12 * layers * width * context  # per token, both passes
        kept = layers * context * width * 34  # Korthikanti et al. 2022, without what fused attention need not keep
        return Workload(float(parameters), context * (6.0 * parameters + attention), float(kept))
    return Unknown("the size of this model is not known; give train.parameters (and train.tokens_per_sample)")


def compute_s(work: Workload, samples: float, gpu: GpuFigures, precision: Precision) -> float:
    """Seconds of forward and backward over so many samples on one GPU."""
    peak = {
        Precision.fp32: gpu.peak_tflops.fp32,
        Precision.bf16: gpu.peak_tflops.bf16,
        Precision.fp16: gpu.peak_tflops.fp16,
    }
    return work.flops_per_sample * samples / ((peak[precision] or gpu.peak_tflops.fp32) * 1e12 * EFFICIENCY)


def cpu_figures(cores: int, cpu: CpuParameters) -> GpuFigures:
    """CPU cores as something that computes. Their memory and power are not known: infinite, and 0."""
    fp32 = cores * cpu.core_gflops / 1e3 / EFFICIENCY
    return GpuFigures(
        names=[],
        link=None,
        pcie_generation=None,
        memory_gb=float("inf"),
        memory_gb_per_s=cpu.memory_gb_per_s,
        peak_tflops=PeakFigures(fp32, None, None, None),
        achieved_bf16_tflops=None,
        board_power_w=0.0,
        nvls=False,
        p2p_over_pcie=False,
        all_reduce=[],
        notes=[],
        source="conf/hardware/collectives.yaml",
    )


def buckets(gradient_bytes: float, bucket_mb: float | None = None) -> list[tuple[float, int]]:
    """(bytes, how many such) in the order in which they become ready. torch's own first bucket is small, so that it
    starts early; with a size that was asked for all are alike (BucketCapacityConfig of torch 2.13)."""
    size = _BUCKET if bucket_mb is None else bucket_mb * _MIB
    found: list[tuple[float, int]] = []
    if bucket_mb is None:
        found.append((min(_FIRST_BUCKET, gradient_bytes), 1))
        gradient_bytes -= found[0][0]
    whole = int(gradient_bytes // size)
    found.append((size, whole))
    found.append((gradient_bytes - whole * size, 1))
    return [(one, count) for one, count in found if one > 0 and count]


def ddp_step(
    work: Workload,
    samples_per_rank: int,
    accumulate: int,
    gpu: GpuFigures,
    precision: Precision,
    wiring: Wiring,
    parameters: ModelParameters,
    exchange: Exchange = Exchange(),
) -> StepCost:
    """A step of DistributedDataParallel: buckets are reduced one after another while the last backward pass goes on."""
    whole = compute_s(work, samples_per_rank, gpu, precision)
    backward = whole / accumulate * 2 / 3  # of the last micro-batch, the only one that communicates
    whole += work.fixed_s
    gradient_bytes = work.parameters * _FP32  # gradients have the weights' format, whatever autocast computes in
    packed = exchange.compression is not GradCompression.none
    packing = 3 / (gpu.memory_gb_per_s * 1e9) if packed and wiring.ranks > 1 else 0.0  # read 4, write 2, and back
    ready, free, total = 0.0, 0.0, 0.0
    largest, decides = 0.0, None
    for size, count in buckets(gradient_bytes, exchange.bucket_mb):
        cost = all_reduce(size / 2 if packed else size, wiring, parameters)
        one, every = cost.seconds + packing * size, backward * size / gradient_bytes
        # all of a size are ready at equal distances: either the network is never idle, or the last one decides
        free = max(free + count * one, ready + every + count * one, ready + count * every + one)
        ready += count * every
        total += count * one
        if size > largest:
            largest, decides = size, cost
    exposed = max(0.0, free - backward)
    assert decides is not None
    return StepCost(whole + exposed, whole, total, exposed, decides.bottleneck, decides.algorithm)


@dataclass(frozen=True)
class Variant:
    """A way to spread the state over ranks. Bytes are per GPU; ``fits`` is None when activations are not known."""

    name: str
    step: StepCost
    state_bytes: float
    activation_bytes: float | None
    fits: bool | None


def variants(
    work: Workload,
    samples_per_rank: int,
    optimizer: Optimizer,
    momentum: bool,
    gpu: GpuFigures,
    precision: Precision,
    wiring: Wiring,
    parameters: ModelParameters,
    exchange: Exchange = Exchange(),
) -> list[Variant]:
    """DDP, FSDP (shards over all ranks) and, over several nodes, HSDP (shards in a node, copies between nodes).

    State per parameter: fp32 weight and gradient, and 8 bytes of Adam's, 4 of momentum's. Sharded variants gather
    weights for forward and backward and scatter gradients, block by block, in the format of computing; one block's
    communication overlaps with another's compute, so what is longer decides.
    """
    moments = 8 if optimizer is Optimizer.adamw else 4 if momentum else 0
    state = work.parameters * (2 * _FP32 + moments)
    wire = work.parameters * (_FP32 if precision is Precision.fp32 else _HALF)
    activations = (
        None if work.activation_bytes_per_sample is None else work.activation_bytes_per_sample * samples_per_rank
    )
    compute = compute_s(work, samples_per_rank, gpu, precision)

    def sharded(name: str, group: Wiring, between: float, what: str) -> Variant:
        gathered = all_gather(wire / _BLOCKS, group, parameters)
        scattered = reduce_scatter(wire / _BLOCKS, group, parameters)
        talk = _BLOCKS * (2 * gathered.seconds + scattered.seconds + between)
        step = StepCost(
            max(compute, talk), compute, talk, max(0.0, talk - compute), what or gathered.bottleneck, "ring"
        )
        return _variant(name, step, state / group.ranks, activations, gpu)

    ddp = ddp_step(work, samples_per_rank, 1, gpu, precision, wiring, parameters, exchange)
    found = [_variant("DDP", ddp, state, activations, gpu)]
    if wiring.ranks > 1:
        found.append(sharded("FSDP", wiring, 0.0, ""))
    if wiring.nodes > 1 and wiring.per_node > 1:
        node = Wiring(1, wiring.per_node, wiring.intra_gb_per_s, wiring.intra_what, wiring.nvls_gb_per_s)
        rails = Wiring(
            wiring.nodes, 1, float("inf"), "", None, wiring.inter_gb_per_s, wiring.inter_what, wiring.network
        )  # the shards of a node together use all of its NICs
        between = all_reduce(wire / _BLOCKS, rails, parameters)
        found.append(sharded("HSDP", node, between.seconds, wiring.inter_what))
    return found


def _variant(name: str, step: StepCost, state: float, activations: float | None, gpu: GpuFigures) -> Variant:
    room = gpu.memory_gb * 1e9 * 0.92  # the rest: CUDA context, NCCL's buffers, fragments
    fits: bool | None = None
    if state > room:
        fits = False
    elif activations is not None:
        fits = state + activations <= room
    return Variant(name, step, state, activations, fits)
