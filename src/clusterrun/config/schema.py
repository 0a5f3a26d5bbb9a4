"""The structured configuration. Units are in the field names or in the comment beside them.

These dataclasses are mutable because Hydra merges overrides into them; what is frozen is the Plan made from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Executor(Enum):
    """Who runs the job."""

    slurm = "slurm"
    local = "local"


class Accelerator(Enum):
    """What the workers compute on. cuda means NCCL, cpu means Gloo."""

    cuda = "cuda"
    cpu = "cpu"


class IntraNode(Enum):
    """Wiring between the GPUs of one node."""

    nvswitch = "nvswitch"
    nvlink_mesh = "nvlink_mesh"
    nvlink_hybrid = "nvlink_hybrid"  # 8 GPUs as a hybrid cube mesh (DGX-1, p3.16xlarge): NVLink for some pairs only
    nvlink_pairs = "nvlink_pairs"
    pcie = "pcie"
    none = "none"


class InterNode(Enum):
    """Wiring between nodes."""

    infiniband = "infiniband"
    roce = "roce"
    efa = "efa"
    ethernet = "ethernet"
    none = "none"


class GpuRequest(Enum):
    """How GPUs are asked of Slurm: --gpus-per-node=[type:]n, --gres=gpu:[type:]n, or not at all."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    none = "none"


class NumaBinding(Enum):
    """How torchrun binds workers to CPUs (its --numa-binding); auto: near their GPUs where the node can."""

    auto = "auto"
    node = "node"
    socket = "socket"
    exclusive = "exclusive"
    none = "none"


class OnShortage(Enum):
    """What to do when preflight leaves too few nodes."""

    stop = "stop"
    requeue = "requeue"


class Action(Enum):
    """What a job does: the whole run, its preflight alone, or preflight and then measuring instead of training."""

    train = "train"
    preflight = "preflight"
    bench = "bench"


class DataKind(Enum):
    """Where samples come from."""

    synthetic = "synthetic"
    mnist5k = "mnist5k"
    idx = "idx"
    text = "text"


class Precision(Enum):
    """fp32, or autocast to bf16 or fp16 (fp16 with a gradient scaler)."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class GradCompression(Enum):
    """What gradients are cast to while they travel (torch's DDP hooks); bf16 needs NCCL."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


class Optimizer(Enum):
    sgd = "sgd"
    adamw = "adamw"


class Schedule(Enum):
    """Learning rate over steps, after an optional linear warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class OnOvertake(Enum):
    """What to do when a save is due while an asynchronous one is still being written."""

    wait = "wait"
    skip = "skip"


class BestBy(Enum):
    """Which validation result makes a checkpoint one of the best: the lowest loss, or the task's metric."""

    loss = "loss"
    metric_max = "metric_max"
    metric_min = "metric_min"


@dataclass
class InterconnectConfig:
    """The declared wiring. Preflight holds it against what it detects."""

    intra_node: IntraNode = IntraNode.none
    nvlinks_per_pair: int | None = None  # NV12 on an A100 NVSwitch box, NV18 on an H100
    inter_node: InterNode = InterNode.ethernet
    nics_per_node: int | None = None
    nic_gbit_per_s: float | None = None  # wire rate of one port, Gbit/s
    interface: str | None = None  # network interface for rendezvous and sockets, e.g. ib0; found by itself when null


@dataclass
class SlurmConfig:
    """What a site may ask for. Everything null is left out of the sbatch script."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None  # host list, e.g. n[3,7-9]
    nodelist: str | None = None
    mem: str | None = None  # per node, e.g. 200G; "0" is all of it
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    gpu_type: str | None = None  # a100 gives --gpus-per-node=a100:8
    exclusive: bool = False
    dependency: str | None = None
    licenses: str | None = None
    comment: str | None = None
    wckey: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    setup: list[str] = field(default_factory=list)  # shell lines before the job, e.g. "module load cuda"
    extra: dict[str, Any] = field(default_factory=dict)  # any other sbatch option, e.g. {switches: "1@00:10:00"}


@dataclass
class ClusterConfig:
    """The declared hardware and scheduler."""

    name: str = ""  # in run ids and the list of refused nodes; empty: the name of the file
    description: str = ""
    executor: Executor = Executor.local
    nodes: int = 1  # nodes that train
    min_nodes: int | None = None  # go on with so few when others failed and there is no spare; null: with `nodes` only
    spare_nodes: int = 0  # allocated beyond `nodes`, used when another fails
    gpus_per_node: int = 0  # what a node has
    nproc_per_node: int = 1  # workers per node; one GPU each with accelerator=cuda
    cpus_per_proc: int = 1  # CPU cores per worker
    gpu_model: str | None = None  # as NVML names it, e.g. NVIDIA A100-SXM4-80GB
    accelerator: Accelerator = Accelerator.cpu
    numa_binding: NumaBinding = NumaBinding.auto
    interconnect: InterconnectConfig = field(default_factory=InterconnectConfig)
    shared_dir: str = ""  # on a file system that all nodes see; empty: $CLUSTERRUN_SHARED_DIR, else ~/clusterrun
    local_paths_shared: bool = False  # true where all "hosts" are one machine, so that /tmp is shared
    time_limit: str | None = None  # "D-HH:MM:SS", "HH:MM:SS", or with a unit: 90m, 24h, 2d; null is the site's default
    signal_lead_s: int = 120  # how long before the time limit the run is told to save, seconds
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    env: dict[str, str] = field(default_factory=dict)  # extra environment for the training step


@dataclass
class TrainConfig:
    """The training job: one of our tasks, or your own torchrun script."""

    name: str = "ddp_linear"
    task: str | None = None  # linear, mlp, gpt, or your own "package.module:Class"
    task_args: dict[str, Any] = field(default_factory=dict)
    script: str | None = None  # path of a script that torchrun runs unchanged
    args: list[str] = field(default_factory=list)  # its arguments
    epochs: int = 1
    max_steps: int | None = None  # stop after this many optimizer steps
    batch_per_rank: int | None = None  # samples per rank and optimizer step; or give global_batch
    global_batch: int | None = None  # samples per optimizer step over all ranks
    accumulate: int = 1  # micro-batches per optimizer step (DDP synchronises on the last only)
    optimizer: Optimizer = Optimizer.sgd
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    precision: Precision = Precision.fp32
    clip_grad_norm: float | None = None
    grad_compression: GradCompression = GradCompression.none  # half the bytes between ranks, and fewer digits
    bucket_mb: float | None = None  # of DDP's gradient buckets, MiB; null: torch's own, 1 for the first, then 25
    validate_every_steps: int | None = None  # null: at the end of each epoch
    log_every_steps: int = 10
    parameters: float | None = None  # of your own model, for the plan's prediction, e.g. 7e9
    tokens_per_sample: int = 1  # the same: how many tokens of a sample pass through all parameters
    max_restarts: int = 0  # torchrun's own restarts of dead workers inside an attempt
    rendezvous_timeout_s: int = 600  # how long agents wait for each other, seconds
    tensorboard: bool = False  # needs the extra "tensorboard"


@dataclass
class DataConfig:
    kind: DataKind = DataKind.synthetic
    path: str | None = None  # idx: directory; text: file
    samples: int = 4096  # synthetic: training samples
    holdout: float = 0.2  # share kept for validation


@dataclass
class CheckpointConfig:
    """A run that is told to stop, and one that ends, saves in any case."""

    every_steps: int | None = 100  # null: not by steps
    every_minutes: float | None = None  # of wall-clock time since the last save; null: not by time
    auto: bool = False  # by time, as far apart as the measured stall and the time between failures suggest
    mtbf_h: float | None = None  # mean time between failures of the whole run, hours; null: estimated (auto only)
    async_save: bool = False  # training waits only while the state is copied to host memory
    on_overtake: OnOvertake = OnOvertake.wait
    keep: int = 3  # newest checkpoints kept, at least 2
    keep_every_steps: int | None = None  # the first at or after each multiple of so many steps is kept for good
    keep_best: int = 0  # so many with the best validation results are kept; one that becomes best is saved
    best_by: BestBy = BestBy.loss
    max_failed_saves: int | None = None  # in a row, then the run stops; null: it warns and trains on
    timeout_s: float = 600.0  # for the ranks to agree that all have written; for tries to save the last step; seconds


@dataclass
class PreflightConfig:
    timeout_s: float = 120.0  # for all nodes to answer, seconds
    max_clock_skew_s: float = 5.0
    strict: bool = False  # UNKNOWN counts as FAIL
    visible_within_s: float = 5.0  # for a file of one node to be seen by the others, seconds
    policy: dict[str, str] = field(default_factory=dict)  # check -> fatal, warn or off, e.g. {clock: fatal}
    min_driver: str | None = None  # oldest NVIDIA driver allowed, e.g. "535.104"
    power_limit_w: float | None = None  # what each GPU may draw at least, watts; null: as its peers and the factory set
    on_shortage: OnShortage = OnShortage.stop  # too few healthy nodes: exit 4, or queue again without the bad ones
    exclude: bool = True  # remember refused nodes and leave them out of later submissions
    exclude_for_h: float = 24.0  # how long, hours
    full: bool = False  # also the slow checks: matrix products, copies, all-reduce in and between nodes
    slow_timeout_s: float = 60.0  # for each part of a slow check, seconds; then its process is killed
    slow_below: float | None = None  # a rate below this share of its peers' is slow; null: 0.75, on CPUs 0.25


@dataclass
class RecoveryConfig:
    requeue: bool = True  # after preemption, the time limit, or a lost node that no spare can replace
    max_stalled_attempts: int = 3  # attempts in a row without a newer checkpoint before the run stops with exit 93
    restart_on_error: bool = False  # also after an ordinary exception of the task, which is mostly a bug and stays one
    hang_factor: float = 30.0  # no step for so many times the median step: hung, ended, started again; 0: never
    hang_floor_s: float = 300.0  # but not before so many seconds without a step
    hang_warmup_steps: int = 10  # until so many steps are done, and for the start, hang_start_s holds instead
    hang_start_s: float = 3600.0  # seconds from a worker's start to its first step, or for each of the first steps
    straggler_factor: float = 1.5  # a rank slower than the median of its peers by so much is named; 0: never
    straggler_for_s: float = 60.0  # when it lasts so long, seconds
    heartbeat_s: float = 15.0  # how often each node tells the conductor how fast it is, seconds


class ProfileTool(Enum):
    """torch.profiler writes a trace for chrome://tracing or Perfetto; nsys is NVIDIA Nsight Systems."""

    torch = "torch"
    nsys = "nsys"


@dataclass
class ProfileConfig:
    """Profiles of a few steps, in the run's directory."""

    steps: list[int] = field(default_factory=list)  # [first, last], counted from 1; empty: no profile
    ranks: list[int] = field(default_factory=lambda: [0])
    tool: ProfileTool = ProfileTool.torch
    memory: bool = False  # torch: also memory
    nsys_options: list[str] = field(default_factory=list)  # added to nsys profile, e.g. ['--gpu-metrics-devices=all']


class Objective(Enum):
    """What a sweeper that chooses points by results (Optuna and the like) gets back from each."""

    loss = "loss"  # the last validation loss
    metric = "metric"  # the last validation metric, e.g. accuracy
    samples_per_s = "samples_per_s"  # throughput, median over the logged steps


@dataclass
class SweepConfig:
    """How the points of a sweep (-m) run; no part of any point's id."""

    array_parallelism: int | None = None  # points at the same time, of each array; null: no limit, on this machine 1
    objective: Objective = Objective.loss


@dataclass
class BenchConfig:
    """What `clusterrun bench` measures."""

    tool: str = "torch"  # torch (torch.distributed), or nccl-tests when <collective>_perf is on the nodes
    collective: str = "all_reduce"  # all_gather, reduce_scatter, broadcast, all_to_all; or all
    sizes: list[str] = field(default_factory=list)  # bytes: 64K, 1M-1G (doubling), 1M-1G*4; empty: by accelerator
    groups: list[str] = field(default_factory=lambda: ["all", "in_node", "between_nodes"])  # also: pairs
    iterations: int = 20  # per size, of which the median counts; fewer when they take long
    warmup: int = 5  # iterations before
    seconds_per_size: float = 2.0  # about how long the iterations of one size may take, seconds
    check: bool = True  # that every result is right
    timeout_s: float = 300.0  # for one collective, seconds


@dataclass
class NotifyConfig:
    """Tell a web hook when a run ends, fails, or is queued again. Slurm's mails: cluster.slurm.mail_type, mail_user."""

    webhook_env: str | None = None  # name of the environment variable that holds its URL, which is a secret
    timeout_s: float = 10.0  # seconds; a hook that does not answer never holds a run up longer


@dataclass
class RunConfig:
    """Everything about one run."""

    name: str | None = None  # label in the run id; default <train>-<cluster>
    run_id: str | None = None  # default: name and a hash of this configuration; with -m the id of the sweep
    wait: bool | None = None  # follow the run; default true on this machine, false on Slurm
    seed: int = 0
    action: Action = Action.train  # the verbs preflight and bench set theirs
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    after: str | None = None  # a run that must have ended well before this one starts: id, beginning of one, path, last
    snapshot: bool = False  # train from a copy of the git tree in the run directory: later edits change nothing
    snapshot_limit_mb: int = 200  # refuse to copy a larger tree, MiB

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.nproc_per_node
