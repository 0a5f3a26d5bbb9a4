"""Steps on this machine: one process per simulated node, the devices divided among them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from clusterrun import process
from clusterrun.config.schema import Accelerator, ClusterConfig
from clusterrun.launch.steps import Step, StepSpec

_KILL_PATIENCE_S = 5.0


class LocalSteps:
    """StepRunner for simulated nodes node0, node1, ... of this machine."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    def nodes(self) -> list[str]:
        return [f"node{i}" for i in range(self._cluster.nodes + self._cluster.spare_nodes)]

    def switches(self) -> dict[str, str]:
        return {}

    def head_address(self) -> str:
        return "127.0.0.1"

    def start(self, spec: StepSpec) -> Step:
        step_id = f"{spec.name}-{os.getpid()}-{time.monotonic_ns()}"
        tasks = []
        with spec.stdout.open("ab") as out, spec.stderr.open("ab") as err:
            for index, node in enumerate(spec.nodes):
                env = {
                    **os.environ,
                    **spec.env,
                    "CLUSTERRUN_NODE": node,
                    "CLUSTERRUN_NODE_INDEX": str(index),
                    "CLUSTERRUN_LOCAL_STEP": step_id,
                    **self._devices(node),
                }
                tasks.append(process.start(spec.argv, env=env, stdout=out, stderr=err))
        return LocalStep(tasks, step_id)

    def _devices(self, node: str) -> dict[str, str]:
        """Each simulated node sees its own GPUs only, as a real one would."""
        if self._cluster.accelerator is not Accelerator.cuda:
            return {}
        visible = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        per_node = self._cluster.nproc_per_node
        first = self.nodes().index(node) * per_node
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + per_node])}


class LocalStep:
    """The tasks of one step."""

    def __init__(self, tasks: Sequence[subprocess.Popen[bytes]], step_id: str) -> None:
        self._tasks = tasks
        self._step_id = step_id

    def poll(self) -> int | None:
        codes = [task.poll() for task in self._tasks]
        if any(code is None for code in codes):
            return None
        # As srun reports it: a task that died of a signal counts as 128 + its number.
        return max(128 - code if code < 0 else code for code in codes if code is not None)

    def ask_to_stop(self) -> None:
        for task in self._tasks:
            if task.poll() is None:
                task.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Workers live in sessions of their own, so the step is found by the mark in its processes' environment."""
        end = time.monotonic() + _KILL_PATIENCE_S
        while time.monotonic() < end:
            found = processes_with("CLUSTERRUN_LOCAL_STEP", self._step_id)
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                break
            time.sleep(0.05)
        for task in self._tasks:
            task.wait(timeout=_KILL_PATIENCE_S)


def processes_with(variable: str, value: str) -> list[int]:
    """Ids of this user's living processes that were started with ``variable=value`` in their environment."""
    return processes_by(variable).get(value, [])


def processes_by(variable: str) -> dict[str, list[int]]:
    """The same for every value that ``variable`` has in some process."""
    mark = f"{variable}=".encode()
    found: dict[str, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes()
            if mark not in environment:
                continue
            values = [item[len(mark) :] for item in environment.split(b"\0") if item.startswith(mark)]
            if values and _is_running(directory):
                found.setdefault(os.fsdecode(values[0]), []).append(int(directory.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _is_running(directory: Path) -> bool:
    return (directory / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
