"""Steps in a Slurm allocation: srun over the chosen nodes, so that Slurm's own tree fans out and brings output back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from clusterrun import network, process
from clusterrun.config.schema import ClusterConfig
from clusterrun.errors import CommandError
from clusterrun.launch.srun import srun_argv
from clusterrun.launch.steps import Step, StepSpec

SLURM_TIMEOUT_S = 60.0
_CONTROLLER_PATIENCE_S = 600.0


class SlurmSteps:
    """StepRunner inside a Slurm job."""

    def __init__(self, cluster: ClusterConfig, job_id: str) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._killed = False  # a step was killed: Slurm may go on to count one whose node it can't reach

    def nodes(self) -> list[str]:
        try:
            shown = process.run(["scontrol", "show", "job", self._job_id, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
            match = re.search(r" NodeList=(\S+)", shown)
            node_list = match.group(1) if match else os.environ["SLURM_JOB_NODELIST"]
        except CommandError:  # slurmctld away, or no scontrol on compute nodes: what the job started with
            node_list = os.environ["SLURM_JOB_NODELIST"]
        return expand_host_list(node_list)

    def switches(self) -> dict[str, str]:
        try:
            shown = process.run(["scontrol", "show", "topology", "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
        except CommandError:  # no topology plugin on this cluster
            return {}
        return leaf_switches(shown)

    def head_address(self) -> str:
        own = os.environ.get("SLURMD_NODENAME")
        interface = self._cluster.interconnect.interface
        known = network.interfaces()
        if interface in known:
            return known[interface]
        return network.head_address(_node_address(own) if own else None)

    def start(self, spec: StepSpec) -> Step:
        ask_controller(["scontrol", "ping"])  # srun would give up at once while it is restarted
        cpus = 1 if spec.beside else self._cluster.nproc_per_node * self._cluster.cpus_per_proc
        argv = srun_argv(spec.nodes, spec.argv, cpus, overlap=self._killed, beside=spec.beside)
        env = {**os.environ, **spec.env, "SRUN_CPUS_PER_TASK": str(cpus)}
        if spec.beside:  # the job's request for GPUs would be this step's too
            env = {name: value for name, value in env.items() if not name.startswith("SLURM_GPUS")}
        with spec.stdout.open("ab") as out, spec.stderr.open("ab") as err:
            return SlurmStep(process.start(argv, env=env, stdout=out, stderr=err), self._on_kill)

    def _on_kill(self) -> None:
        self._killed = True


class SlurmStep:
    """One srun."""

    def __init__(self, srun: subprocess.Popen[bytes], on_kill: Callable[[], None]) -> None:
        self._srun, self._on_kill = srun, on_kill

    def poll(self) -> int | None:
        code = self._srun.poll()
        return 128 - code if code is not None and code < 0 else code

    def ask_to_stop(self) -> None:
        # srun ends the step on SIGTERM, but passes SIGUSR2 on to the tasks.
        if self._srun.poll() is None:
            self._srun.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        # SIGTERM makes srun signal and then kill the step; a second one makes it give up waiting.
        for sig, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            if self._srun.poll() is not None:
                return
            self._on_kill()
            self._srun.send_signal(sig)
            end = time.monotonic() + patience_s
            while self._srun.poll() is None and time.monotonic() < end:
                time.sleep(0.1)


def ask_controller(argv: Sequence[str], patience_s: float = _CONTROLLER_PATIENCE_S) -> str:
    """Run a command that slurmctld must answer, again and again while it is away (it may be restarted).

    Raises:
        CommandError: it refused, or did not come back in time (ten minutes).
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return process.run(argv, timeout_s=SLURM_TIMEOUT_S)
        except CommandError as error:
            if not is_away(error) or time.monotonic() > end:
                raise
        time.sleep(1.0)


def is_away(error: CommandError) -> bool:
    """Whether it is the controller that did not answer, in the words of Slurm's slurm_errno.c and of scontrol ping."""
    words = (
        "Unable to contact slurm controller",
        "Connection refused",
        "Socket timed out",
        "is DOWN",
        "no answer in",
        # What scontrol requeue says then: the library reads the answer without looking whether one came (22.05).
        "Unexpected message received",
    )
    return any(word in str(error) or word in error.output for word in words)


def job_field(job: str, name: str) -> str:
    """A value from ``scontrol show job --oneliner``; "" when it is not there."""
    match = re.search(rf"(?:^|\s){name}=(\S+)", job)
    return match.group(1) if match else ""


def job_restarts(job: str) -> int:
    """How often the job was requeued, from the same line."""
    return int(job_field(job, "Restarts") or 0)


def expand_host_list(node_list: str) -> list[str]:
    """``n[01-03,7]`` -> n01 n02 n03 n7, by Slurm itself; by submitit's reader where scontrol is not at hand."""
    try:
        return process.run(["scontrol", "show", "hostnames", node_list], timeout_s=SLURM_TIMEOUT_S).split()
    except CommandError:
        from submitit.slurm.slurm import _parse_node_list  # seldom needed, and slow to import for the head watch

        return [name.strip() for name in _parse_node_list(node_list)]


def leaf_switches(shown: str) -> dict[str, str]:
    """Node -> leaf switch, from ``scontrol show topology`` (lines like ``SwitchName=s0 Level=0 ... Nodes=c[1-4]``)."""
    found: dict[str, str] = {}
    for line in shown.splitlines():
        match = re.search(r"SwitchName=(\S+) Level=0 .*?Nodes=(\S+)", line)
        if match:
            found.update(dict.fromkeys(expand_host_list(match.group(2)), match.group(1)))
    return found


def _node_address(node: str) -> str | None:
    try:
        shown = process.run(["scontrol", "show", "node", node, "--oneliner"], timeout_s=SLURM_TIMEOUT_S)
    except CommandError:
        return None
    match = re.search(r" NodeAddr=(\d+\.\d+\.\d+\.\d+)(?:\s|$)", shown)
    return match.group(1) if match else None
