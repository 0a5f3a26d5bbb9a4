"""Runs on every node as a step: looks around, prints one report. Quick (no torch), and it judges nothing.

python -m clusterrun.preflight.probe --run-dir DIR --attempt N --head ADDRESS [--interface IF] [--gpus]
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from clusterrun import frames, network
from clusterrun.preflight.gpu_facts import GpuFacts, library_loads, read_gpu_facts
from clusterrun.preflight.host_facts import HostFacts, StorageFacts, read_host, read_storage, within
from clusterrun.preflight.report import FRAME, NodeReport
from clusterrun.rundir import RunDir

STORAGE_PATIENCE_S = 10.0
HOST_PATIENCE_S = 15.0  # beyond those of its own parts (look-up, leftovers)
PACKAGES = ("clusterrun", "torch", "numpy", "hydra-core", "omegaconf", "submitit", "nvidia-ml-py")


def node_name() -> str:
    """The name the conductor knows this node by."""
    return os.environ.get("CLUSTERRUN_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--head", required=True, help="an address of the conductor's host")
    parser.add_argument("--interface")
    parser.add_argument("--token", default="", help="what the conductor wrote into this attempt's token file")
    parser.add_argument("--visible-within", type=float, default=5.0, help="for that file to be seen here, seconds")
    parser.add_argument("--gpus", action="store_true", help="ask the driver for GPUs")
    args = parser.parse_args()
    node = node_name()
    sys.stdout.write(frames.encode(FRAME, node, asdict(look(node, args))))
    sys.stdout.flush()
    return 0


def look(node: str, args: argparse.Namespace) -> NodeReport:
    address, address_problem, port = None, "", None
    try:
        address = network.own_address(args.head, args.interface)
        port = network.free_port(address, f"{args.run_dir.name}/{args.attempt}")
    except OSError as error:
        address_problem = str(error)
    # A cluster without declared GPUs is asked too where a driver is installed: the rehearsal of one plays GPUs.
    facts = read_gpu_facts() if args.gpus or library_loads() else None
    gpus, nvml_problem = count_gpus(facts) if args.gpus else (None, "not asked")
    # Names and leftovers are waited for beside the storage, not after it.
    host: list[HostFacts] = []
    reading = threading.Thread(
        target=lambda: host.append(read_host(args.head, address, args.run_dir, args.attempt)), daemon=True
    )
    reading.start()
    run = RunDir(args.run_dir)
    attempt = run.attempt(args.attempt)
    # A hanging file system must not keep this node from saying so.
    patience_s = args.visible_within + STORAGE_PATIENCE_S
    silent = f"no answer from the file system of {run.root} within {patience_s:g} s"
    written = within(patience_s, lambda: try_writing(run, args.attempt, node))
    storage = None
    if written is not None:
        look_at = attempt.preflight, attempt.token(args.token), args.token, args.visible_within
        storage = within(patience_s, lambda: read_storage(*look_at))
    reading.join(HOST_PATIENCE_S)
    return NodeReport(
        node=node,
        host=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        packages=package_versions(),
        visible_gpus=visible_gpus(),
        nvml_gpus=gpus,
        nvml_problem=nvml_problem,
        cpus=len(os.sched_getaffinity(0)),
        address=address,
        address_problem=address_problem,
        port=port,
        run_dir_problem=silent if written is None else written,
        time=time.time(),
        gpus=facts,
        host_facts=host[0] if host else None,
        storage=StorageFacts(problem=silent) if storage is None else storage,
    )


def package_versions() -> dict[str, str]:
    """Installed versions, read from metadata so that nothing heavy is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def visible_gpus() -> int | None:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    # CUDA stops at the first that is none; Slurm writes NoDevFiles when it gave no GPU.
    return len(list(itertools.takewhile(lambda d: d.strip() not in ("", "-1", "NoDevFiles"), value.split(","))))


def count_gpus(facts: GpuFacts | None) -> tuple[int | None, str]:
    """GPUs the driver shows, or None and why it could not be asked."""
    return (None, "not asked") if facts is None else (facts.counted, facts.problem)


def try_writing(run: RunDir, attempt: int, node: str) -> str:
    """Read the run's configuration and write, sync, read back and remove a file; what went wrong, or ''."""
    if not run.config.is_file():
        return f"{run.config}: not visible on this node"
    token = secrets.token_hex(8)
    path = run.attempt(attempt).preflight / f".write-test-{node}-{token}"
    try:
        with path.open("x") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        read = path.read_text()
        path.unlink()
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return "" if read == token else f"{path}: reads back wrong"


if __name__ == "__main__":
    code = main()
    os._exit(code)  # a thread that waits for a hanging file system or name server must not hold the node
