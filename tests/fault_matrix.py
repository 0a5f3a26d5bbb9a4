"""Runs on the Slurm lab that something happens to, each held against an undisturbed run, bit for bit.

``scripts/fault_matrix`` runs all cases and prints the table; tests/slurm/test_faults runs the quickest few.

A case says which run to start and what happens to it: ``fail_at(step, what)``. The run has 3 ranks or more on 2 hosts
or more. At its end model, optimizer and random generators must equal the undisturbed run's, and so must the loss of
every step in every attempt, on every rank: a sample left out, repeated or in another place would show there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterrun.ledger import Attempt, Ending
from clusterrun.report.events import EventTail
from support import TESTS, assert_same_bits, attempts, clusterrun, final_state, run_dir

LAB = TESTS.parent / "scripts" / "slurm_lab"
STEPS = 60
# Three hosts with one worker each, a checkpoint every 20 steps, a fault around step 30. A step takes 0.1 s.
TASK = [
    "train=ddp_linear",
    "train.task=fault_task:FaultTask",
    "train.log_every_steps=1",
    "train.momentum=0.9",
    "train.optimizer=sgd",
    "train.batch_per_rank=16",
    f"train.max_steps={STEPS}",
    "train.epochs=100",
    "checkpoint.every_steps=20",
    # Seconds instead of minutes: a step takes 0.1 s here.
    "recovery.hang_floor_s=5",
    "recovery.hang_warmup_steps=3",
]
DELAY = "train.task_args.delay_s=0.1"
SHAPES = {
    3: ["cluster.nodes=3", "cluster.nproc_per_node=1"],
    4: ["cluster.nodes=2", "cluster.nproc_per_node=2"],
}


class Failed(Exception):
    """A case did not end as it must; the message says how."""


What = Callable[["Live"], None]


@dataclass
class Live:
    """A run on the lab while it lives, and what can be done to it."""

    shared: Path
    id: str

    @property
    def job(self) -> str:
        return str(json.loads(run_dir(self.shared, self.id).job.read_text())["job_id"])

    @property
    def story(self) -> list[Attempt]:
        return attempts(self.shared, self.id)

    def step(self) -> int:
        tail = EventTail(run_dir(self.shared, self.id))
        return max((e["step"] for e in tail.new() if e["kind"] == "step"), default=0)

    def fail_at(self, step: int, what: What) -> None:
        """Do something to the run as soon as a step is logged."""
        _until(lambda: self.step() >= step, 90, f"step {step}")
        what(self)

    def worker(self, rank: int) -> int:
        return self._process("clusterrun.train.worker", f"RANK={rank}")

    def agent(self, node: str) -> int:
        return self._process("clusterrun.launch.agent", f"SLURMD_NODENAME={node}", "SLURM_STEP_ID")

    def srun(self) -> int:
        return self._process("clusterrun.launch.agent", program="srun")

    def signal_job(self, name: str) -> None:
        """To the conductor, as Slurm does before a time limit."""
        slurm("scancel", f"--signal={name}", "--batch", self.job)

    def node(self, rank: int) -> str:
        """The node of a rank in the newest attempt (one worker per node)."""
        newest = run_dir(self.shared, self.id).all_attempts()[-1]
        return newest.event_files(rank)[0].name.split(".")[0]

    def _process(self, module: str, *marks: str, program: str = "python") -> int:
        """The process of this run that runs a module and has all marks (NAME or NAME=value) in its environment."""
        run = f"--run-dir={run_dir(self.shared, self.id).root}"
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if module not in argv or run not in argv or program not in Path(argv[0]).name:
                    continue
                if all(any(e == mark or e.startswith(f"{mark}=") for e in environ) for mark in marks):
                    return int(entry.name)
        raise Failed(f"no process of {module} with {', '.join(marks) or program}")


@dataclass(frozen=True)
class Case:
    """What happens, and what must follow.

    Attributes:
        what: done once, when the step ``at`` is logged.
        endings: of the attempts, in order; a set where more than one way is right. The last must be done.
        same: whether the end must equal the undisturbed run's. Not so when the number of ranks changes.
    """

    name: str
    what: What
    endings: Sequence[Ending | set[Ending]]
    at: int = 30
    ranks: int = 3
    overrides: Sequence[str] = ()
    same: bool = True
    timeout_s: float = 180.0
    around: Callable[[], contextlib.AbstractContextManager[Path | None]] = contextlib.nullcontext
    afterwards: Callable[[Live], None] | None = None  # raises Failed when something more is not as it must be


@dataclass
class Done:
    """How a case went: one line of the table."""

    name: str
    endings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    identical: bool | None = None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


def slurm(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def lab(*args: str) -> None:
    done = subprocess.run([sys.executable, str(LAB), *args], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise Failed(f"slurm_lab {' '.join(args)}: {done.stdout}{done.stderr}")


def kill(find: Callable[[Live], int], number: signal.Signals = signal.SIGKILL) -> What:
    return lambda live: os.kill(find(live), number)


def cut(rank: int) -> What:
    """Pull the cable of the node that a rank is on."""
    return lambda live: lab("fault", "cable-pull", live.node(rank))


def preempt(live: Live) -> None:
    wrap = ["--partition=high", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap", "sleep 2"]
    slurm("sbatch", *wrap)


def requeue(live: Live) -> None:
    slurm("scontrol", "requeue", live.job)


def after(pause_s: float, what: What) -> What:
    def wait_and_do(live: Live) -> None:
        time.sleep(pause_s)
        what(live)

    return wait_and_do


def kill_slurmd(live: Live) -> None:
    lab("fault", "kill-slurmd", live.node(2))


def during(pattern: str, what: What, timeout_s: float = 30.0) -> What:
    """Do it as soon as a name like this is in the directory of checkpoints: somebody is writing one."""

    def wait_and_do(live: Live) -> None:
        directory = run_dir(live.shared, live.id).checkpoints
        end = time.monotonic() + timeout_s
        while not any(directory.glob(pattern)):
            if time.monotonic() > end:
                raise Failed(f"no {pattern} in {directory}")
            time.sleep(0.001)
        what(live)

    return wait_and_do


def twice(what: What, pause_s: float) -> What:
    def both(live: Live) -> None:
        what(live)
        time.sleep(pause_s)
        what(live)

    return both


def requeue_without_controller(live: Live) -> None:
    """The conductor is told to stop; while the workers save, slurmctld goes away for 30 s."""
    live.signal_job("USR2")
    lab("fault", "stop-slurmctld")
    time.sleep(30)
    lab("fault", "start-slurmctld")


def leave_zombies(live: Live) -> None:
    """Slurm loses sight of both nodes, which go on training."""
    for node in live.story[-1].nodes:
        lab("fault", "kill-slurmd", node)


def zombies_were_fenced(live: Live) -> None:
    run = run_dir(live.shared, live.id)
    first = run.attempt(1)
    said = "".join(path.read_text(errors="replace") for path in first.logs.glob("*.err"))
    if "may no longer write" not in said:
        raise Failed("the zombie of attempt 1 was not turned away")
    published = [json.loads((path / "MANIFEST.json").read_text()) for path in run.checkpoints.glob("step-*")]
    second = live.story[1].started
    late = [m["step"] for m in published if m["attempt"] == 1 and m["created"] > second + 1]
    if late:
        raise Failed(f"the zombie of attempt 1 published steps {late}")


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system of its own that all hosts see. They have mount namespaces, so their slurmd must start after it."""
    place = Path("/run/clusterrun-lab-small")
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "none", str(place)], check=True)
    try:
        _restart_slurmds()
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        _restart_slurmds()
        place.rmdir()


def _restart_slurmds() -> None:
    for number in range(1, 5):
        lab("fault", "kill-slurmd", f"c{number}")
    lab("up", "--nodes", "4", "--gpus", "8")


def fill_the_disk(live: Live) -> None:
    """Too full for step 40 to be saved, but not for lines of text; then there is room again and a worker dies."""
    ballast = live.shared / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))
    os.truncate(ballast, ballast.stat().st_size - 2**20)
    _until(lambda: live.step() >= 45, 60, "step 45 with a full disk")
    if list(run_dir(live.shared, live.id).checkpoints.glob("step-*40")):
        raise Failed("the checkpoint of step 40 was published on a full disk")
    ballast.unlink()
    os.kill(live.worker(1), signal.SIGKILL)


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


SPARE = ["cluster.spare_nodes=1"]
BIG = ["train.task_args.ballast_mb=48"]
STOPPED = [Ending.stopped, Ending.done]
USR2: What = lambda live: live.signal_job("USR2")  # noqa: E731

# A conductor that outlives its job may still write how its attempt ended.
OUTLIVED = {Ending.killed, Ending.crashed, Ending.hung, Ending.node_lost}

CASES = [
    Case("SIGKILL of a worker", kill(lambda live: live.worker(1)), [Ending.crashed, Ending.done]),
    Case(
        "SIGKILL of a worker, torchrun restarts it",
        kill(lambda live: live.worker(1)),
        [Ending.done],
        overrides=["train.max_restarts=3"],
    ),
    Case("SIGKILL of an agent", kill(lambda live: live.agent(live.node(1))), [Ending.node_lost, Ending.done]),
    Case("SIGKILL of srun", kill(Live.srun), [Ending.crashed, Ending.done]),
    Case(
        "SIGKILL of slurmd, with a spare",
        kill_slurmd,
        [Ending.node_lost, Ending.done],
        at=10,
        overrides=[*SPARE, "train.task_args.delay_s=1.0", "checkpoint.every_steps=5"],
    ),
    Case("SIGSTOP of a rank", kill(lambda live: live.worker(2), signal.SIGSTOP), [Ending.hung, Ending.done]),
    Case("cable pulled, with a spare", cut(2), [{Ending.node_lost, Ending.hung}, Ending.done], overrides=SPARE),
    Case(
        "cable pulled, no spare",
        cut(2),
        [{Ending.node_lost, Ending.hung}, Ending.not_enough_nodes, Ending.done],
        timeout_s=300,
    ),
    Case(
        "cable pulled, no spare, min_nodes=2",
        cut(2),
        [{Ending.node_lost, Ending.hung}, Ending.done],
        overrides=["cluster.min_nodes=2"],
        same=False,
    ),
    Case("cable pulled on the head node", cut(0), [OUTLIVED, Ending.done], timeout_s=300),
    Case("preemption", preempt, [Ending.preempted, Ending.done]),
    Case(
        "time limit of 2 minutes",
        lambda live: None,
        [Ending.time_limit, Ending.done],
        overrides=["cluster.time_limit=2m", "train.task_args.delay_s=1.6"],
        timeout_s=400,
    ),
    Case("scontrol requeue", requeue, [Ending.requeued, Ending.done]),
    Case("signal during a save", during(".tmp-step-40-*", USR2), STOPPED, at=38, overrides=BIG),
    Case(
        "SIGKILL of a worker during a save",
        during(".tmp-step-40-*", kill(lambda live: live.worker(1))),
        [Ending.crashed, Ending.done],
        at=38,
        overrides=BIG,
    ),
    Case(
        "signal during validation",
        after(1.0, USR2),
        STOPPED,
        at=30,
        overrides=["train.validate_every_steps=30", "train.task_args.validate_s=0.4"],
    ),
    Case("signal twice in a row", twice(USR2, 0.3), STOPPED),
    Case("slurmctld down for 30 s at the requeue", requeue_without_controller, STOPPED),
    Case(
        "full disk",
        fill_the_disk,
        [Ending.crashed, Ending.done],
        at=25,
        # The disk is too small for preflight's liking from the start.
        overrides=["train.task_args.ballast_mb=4", "preflight.policy={storage_space:warn}"],
        around=lambda: small_disk(48),
    ),
    Case(
        "a zombie attempt",
        leave_zombies,
        [OUTLIVED, Ending.done],
        ranks=4,
        overrides=["train.task_args.delay_s=0.8", "checkpoint.every_steps=10"],
        at=12,
        timeout_s=300,
        afterwards=zombies_were_fenced,
    ),
]  # fmt: skip


def undisturbed(shared: Path, case: Case) -> str:
    """The id of the run to compare with, on this machine without Slurm: made once for each shape and model."""
    ballast = [o for o in case.overrides if "ballast" in o or "validate_every" in o or "every_steps" in o]
    name = f"undisturbed-{case.ranks}" + "".join(f"-{o.partition('=')[2]}" for o in ballast)
    if not (shared / "runs" / name).exists():
        code, said = clusterrun(shared, *TASK, *SHAPES[case.ranks], *ballast, f"run_id={name}")
        if code:
            raise Failed(f"the undisturbed run failed: {said}")
    return name


def losses_of_all(shared: Path, run_id: str) -> dict[tuple[int, int], set[float]]:
    """(rank, step) -> the losses logged for it, over all attempts."""
    found: dict[tuple[int, int], set[float]] = {}
    for attempt in run_dir(shared, run_id).all_attempts():
        for path in attempt.event_files():
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["kind"] == "step":
                    found.setdefault((event["rank"], event["step"]), set()).add(event["loss"])
    return found


def compare(reference: Path, name: str, shared: Path, run_id: str) -> None:
    """Raises Failed when anything differs."""
    try:
        assert_same_bits(final_state(reference, name), final_state(shared, run_id))
    except AssertionError as error:
        raise Failed(str(error)) from None
    expected, got = losses_of_all(reference, name), losses_of_all(shared, run_id)
    wrong = sorted(key for key, values in got.items() if values != expected[key])
    if wrong:
        raise Failed(f"other losses than the undisturbed run's, first at (rank, step) {wrong[0]}")
    if got.keys() != expected.keys():
        raise Failed(f"steps never logged: {sorted(expected.keys() - got.keys())[:5]}")


def run_case(case: Case, shared: Path, number: int = 0) -> Done:
    """Run one case to its end. The lab must be up with 4 healthy nodes; it is so again afterwards."""
    begin = time.monotonic()
    done = Done(case.name)
    name = undisturbed(shared, case)
    with case.around() as other:
        place = other or shared
        live = Live(place, f"case{number}")
        try:
            arguments = ["+cluster=lab", *TASK, DELAY, *SHAPES[case.ranks], *case.overrides, f"run_id={live.id}"]
            begin = time.monotonic()
            code, said = clusterrun(place, *arguments, timeout_s=60)
            if code:
                raise Failed(said)
            live.fail_at(case.at, case.what)
            _until(lambda: live.story[-1].exit_code is not None, case.timeout_s, "the end of the run")
            _check_endings(case, live)
            if case.same:
                compare(shared, name, place, live.id)
                done.identical = True
            if case.afterwards is not None:
                case.afterwards(live)
        except (Failed, AssertionError, OSError, subprocess.SubprocessError) as error:
            done.problem = f"{type(error).__name__}: {error}" if not isinstance(error, Failed) else str(error)
            done.identical = False if case.same else None
        finally:
            done.seconds = time.monotonic() - begin
            with contextlib.suppress(OSError, ValueError, KeyError):
                done.endings = [attempt.ending.value for attempt in live.story]
                subprocess.run(["scancel", live.job], capture_output=True, timeout=60)
            lab("up", "--nodes", "4", "--gpus", "8")
    return done


def _check_endings(case: Case, live: Live) -> None:
    got: list[Any] = [attempt.ending for attempt in live.story]
    # Slurm 22.05 may lose the GPUs of a job that is queued again; it is then queued once more (docs/faults.md).
    short = Ending.not_enough_nodes
    got = [ending for before, ending in zip([None, *got], got, strict=False) if not before is ending is short]
    wanted = [e if isinstance(e, set) else {e} for e in case.endings]
    if len(got) != len(wanted) or any(g not in w for g, w in zip(got, wanted, strict=True)):
        told = "; ".join(f"{a.ending.value}: {a.message}" for a in live.story)
        raise Failed(f"ended otherwise: {told}")
