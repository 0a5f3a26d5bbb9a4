"""Predicted cost of a training step: compute, gradient communication as DDP overlaps it, memory of sharded variants.

Compute is 6 FLOPs per parameter and token (2 forward, 4 backward; Kaplan et al. 2020) at ``EFFICIENCY`` of the GPU's
dense peak. What the formula leaves out (Python, kernel starts, input) makes small models slower than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterrun.config.schema import Optimizer, Precision, RunConfig, TrainConfig
from clusterrun.cost.catalog import GpuFigures, ModelParameters
from clusterrun.cost.collectives import all_gather, all_reduce, reduce_scatter
from clusterrun.cost.wiring import Unknown, Wiring
from clusterrun.train.builtin import CLASSES, FEATURES, check_task_args

EFFICIENCY = 0.4  # of dense peak: what well-kept training loops report; 0.3 to 0.5 is usual
_MIB = 2**20
_FIRST_BUCKET, _BUCKET = 1 * _MIB, 25 * _MIB  # DistributedDataParallel's defaults
_FP32, _HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Workload:
    """What one optimizer step computes on each rank.

    Attributes:
        parameters: numbers that have a gradient.
        flops_per_sample: forward and backward.
        activation_bytes_per_sample: roughly, what the backward pass keeps; None where not known.
    """

    parameters: float
    flops_per_sample: float
    activation_bytes_per_sample: float | None = None


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


def buckets(gradient_bytes: float) -> list[float]:
    """Sizes in the order in which they become ready: DDP's first bucket is small, so that it starts early."""
    sizes = [min(_FIRST_BUCKET, gradient_bytes)]
    left = gradient_bytes - sizes[0]
    while left > 0:
        sizes.append(min(_BUCKET, left))
        left -= sizes[-1]
    return sizes


def ddp_step(
    work: Workload,
    samples_per_rank: int,
    accumulate: int,
    gpu: GpuFigures,
    precision: Precision,
    wiring: Wiring,
    parameters: ModelParameters,
) -> StepCost:
    """A step of DistributedDataParallel: buckets are reduced one after another while the last backward pass goes on."""
    whole = compute_s(work, samples_per_rank, gpu, precision)
    backward = whole / accumulate * 2 / 3  # of the last micro-batch, the only one that communicates
    gradient_bytes = work.parameters * _FP32  # gradients have the weights' format, whatever autocast computes in
    ready, free, total = 0.0, 0.0, 0.0
    for size in buckets(gradient_bytes):
        ready += backward * size / gradient_bytes
        cost = all_reduce(size, wiring, parameters)
        free = max(free, ready) + cost.seconds
        total += cost.seconds
    exposed = max(0.0, free - backward)
    largest = all_reduce(max(buckets(gradient_bytes)), wiring, parameters)
    return StepCost(whole + exposed, whole, total, exposed, largest.bottleneck, largest.algorithm)


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
) -> list[Variant]:
    """DDP, FSDP (shards over all ranks) and, over several nodes, HSDP (shards in a node, copies between nodes).

    State per parameter: fp32 weight and gradient, and 8 bytes of Adam's, 4 of momentum's. Sharded variants gather
    weights for forward and backward and scatter gradients, in the format of computing; a layer's communication
    overlaps with another's compute, so what is longer decides.
    """
    moments = 8 if optimizer is Optimizer.adamw else 4 if momentum else 0
    state = work.parameters * (2 * _FP32 + moments)
    wire = work.parameters * (_FP32 if precision is Precision.fp32 else _HALF)
    activations = (
        None if work.activation_bytes_per_sample is None else work.activation_bytes_per_sample * samples_per_rank
    )
    compute = compute_s(work, samples_per_rank, gpu, precision)

    def sharded(name: str, group: Wiring, between: float, what: str) -> Variant:
        gathered = all_gather(wire, group, parameters)
        talk = 2 * gathered.seconds + reduce_scatter(wire, group, parameters).seconds + between
        step = StepCost(
            max(compute, talk), compute, talk, max(0.0, talk - compute), what or gathered.bottleneck, "ring"
        )
        return _variant(name, step, state / group.ranks, activations, gpu)

    found = [
        _variant(
            "DDP", ddp_step(work, samples_per_rank, 1, gpu, precision, wiring, parameters), state, activations, gpu
        )
    ]
    if wiring.ranks > 1:
        found.append(sharded("FSDP", wiring, 0.0, ""))
    if wiring.nodes > 1 and wiring.per_node > 1:
        node = Wiring(1, wiring.per_node, wiring.intra_gb_per_s, wiring.intra_what, wiring.nvls_gb_per_s)
        rails = Wiring(
            wiring.nodes, 1, float("inf"), "", None, wiring.inter_gb_per_s, wiring.inter_what, wiring.network
        )  # the shards of a node together use all of its NICs
        found.append(sharded("HSDP", node, all_reduce(wire, rails, parameters).seconds, wiring.inter_what))
    return found


def _variant(name: str, step: StepCost, state: float, activations: float | None, gpu: GpuFigures) -> Variant:
    room = gpu.memory_gb * 1e9 * 0.92  # the rest: CUDA context, NCCL's buffers, fragments
    fits: bool | None = None
    if state > room:
        fits = False
    elif activations is not None:
        fits = state + activations <= room
    return Variant(name, step, state, activations, fits)


@dataclass(frozen=True)
class Advice:
    """A change that helps: what to type, and samples per second against now (1.2: a fifth more)."""

    change: str
    speedup: float
    note: str = ""


def advice(
    config: RunConfig,
    work: Workload,
    samples_per_rank: int,
    gpu: GpuFigures,
    wiring: Wiring,
    parameters: ModelParameters,
) -> list[Advice]:
    """Changes whose predicted throughput is at least 3 % higher, the best first. Nothing when nothing helps."""
    train = config.train

    def rate(samples: int, accumulate: int, precision: Precision, over: Wiring) -> float:
        return samples * over.ranks / ddp_step(work, samples, accumulate, gpu, precision, over, parameters).step_s

    now = rate(samples_per_rank, train.accumulate, train.precision, wiring)
    tried: list[Advice] = []
    if train.precision is Precision.fp32 and gpu.peak_tflops.bf16:
        speed = rate(samples_per_rank, train.accumulate, Precision.bf16, wiring)
        tried.append(Advice("train.precision=bf16", speed / now))
    more = rate(samples_per_rank * 4, train.accumulate * 4, train.precision, wiring)
    change = f"train.accumulate={train.accumulate * 4} with 4 times the batch"
    tried.append(Advice(change, more / now, "gradients travel a quarter as often; the learning rate may need care"))
    if wiring.nodes > 1:
        one = Wiring(1, wiring.per_node, wiring.intra_gb_per_s, wiring.intra_what, wiring.nvls_gb_per_s)
        alone = rate(samples_per_rank, train.accumulate, train.precision, one)
        tried.append(Advice("cluster.nodes=1", alone / now, f"{wiring.nodes} nodes are slower than one here"))
    return sorted((a for a in tried if a.speedup >= 1.03), key=lambda a: -a.speedup)
