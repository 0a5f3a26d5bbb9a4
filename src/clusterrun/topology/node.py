"""This machine: GPUs through NVML in a process that can be killed, NICs and NUMA nodes from sysfs, joined by bus id."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clusterrun.process import start
from clusterrun.topology import snapshot, sysfs
from clusterrun.topology.model import Gpu, Topology
from clusterrun.topology.nvml_ask import NvmlUnavailable

NVML_TIMEOUT_S = 20.0  # 16 GPUs take under 2 s; without persistence mode the driver may load first (about 10 s)
_ABSENT, _SICK = 3, 4  # exit codes of the worker: no driver or GPU; NVML does not start


def read_node(
    *, timeout_s: float = NVML_TIMEOUT_S, root: Path = sysfs.SYS, env: Mapping[str, str] | None = None
) -> Topology:
    """What is wired on this machine. Without GPUs the result has none, and notes or missing say why."""
    try:
        found = read_gpus(timeout_s=timeout_s, env=env)
    except NvmlUnavailable as error:
        found = without_gpus(error, root)
    return with_host(found, root)


def without_gpus(error: NvmlUnavailable, root: Path = sysfs.SYS) -> Topology:
    """A machine whose GPUs could not be read, with the reason in its notes (there is none) or as missing."""
    idle = sysfs.nvidia_functions(root)
    said = [str(error)]
    if idle:
        said.append(f"{len(idle)} NVIDIA GPU(s) on PCI without an answering driver: {', '.join(idle)}")
    # "No GPU" is a complete answer only when nothing hints at one; a GPU that can't be asked is a missing fact.
    sure = error.absent and not idle
    return Topology(
        gpus=(), links=(), source="sysfs", notes=tuple(said) if sure else (), missing=() if sure else tuple(said)
    )


def with_host(found: Topology, root: Path = sysfs.SYS) -> Topology:
    """What NVML found, joined with the NICs and NUMA nodes that the kernel shows."""
    nodes = sysfs.host_numa(root)
    places = [sysfs.place(gpu.bus_id, root) if gpu.bus_id else None for gpu in found.gpus]
    return replace(
        found,
        gpus=tuple(_near(gpu, where, root) for gpu, where in zip(found.gpus, places, strict=True)),
        nics=sysfs.with_paths(sysfs.read_nics(root), places, nodes),
        host_numa=nodes,
    )


def read_gpus(*, timeout_s: float = NVML_TIMEOUT_S, env: Mapping[str, str] | None = None) -> Topology:
    """GPUs through NVML, asked in a process of its own: a sick driver can hang in a call that no signal interrupts.

    Raises:
        NvmlUnavailable: no binding, driver or GPU; or no answer within ``timeout_s``; or the process died.
    """
    return snapshot.loads(ask_worker("clusterrun.topology.nvml", timeout_s=timeout_s, env=env))[0]


def ask_worker(module: str, *, timeout_s: float, env: Mapping[str, str] | None = None) -> str:
    """What a worker that asks NVML printed; see ``nvml.main`` for its exit codes.

    Raises:
        NvmlUnavailable: as ``read_gpus``.
    """
    argv = [sys.executable, "-m", module]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        worker = start(argv, stdout=out, stderr=err, env=env)
        try:
            code = worker.wait(timeout_s)
        except subprocess.TimeoutExpired:
            worker.kill()
            # A process stuck inside the driver can't even be killed; leave it rather than wait with it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(1.0)
            raise NvmlUnavailable(f"NVML did not answer within {timeout_s:g} s: the driver hangs") from None
        out.seek(0)
        err.seek(0)
        said = err.read().decode(errors="replace").strip()
        if code in (_ABSENT, _SICK):
            raise NvmlUnavailable(said or "NVML is not available", absent=code == _ABSENT)
        if code != 0:
            last = said.splitlines()[-1] if said else "it printed nothing"
            raise NvmlUnavailable(f"the process that asks NVML ended with {code}: {last}")
        return out.read().decode(errors="replace")


def _near(gpu: Gpu, where: sysfs.PciPlace | None, root: Path) -> Gpu:
    """The kernel's own answer where NVML gave none; both name the NUMA node of the GPU's PCI slot."""
    if where is None or gpu.bus_id is None:
        return gpu
    numa = gpu.numa or (() if where.numa is None else (where.numa,))
    return replace(gpu, numa=numa, cpu_affinity=gpu.cpu_affinity or sysfs.local_cpus(gpu.bus_id, root))
