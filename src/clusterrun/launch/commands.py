"""The commands that run on the nodes, and what is added to their environment. The conductor needs these at each start,
so nothing is imported here that only a plan needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from clusterrun.config.schema import Accelerator, Action, ProfileTool, RunConfig
from clusterrun.nccl import settings
from clusterrun.rundir import RunDir

if TYPE_CHECKING:
    from clusterrun.measure.results import Work


def preflight_argv(config: RunConfig, run: RunDir, attempt: int, head: str, token: str) -> list[str]:
    """The command each node runs to report what it sees. ``token`` is what the attempt's token file holds."""
    argv = [
        sys.executable,
        "-m",
        "clusterrun.preflight.probe",
        f"--run-dir={run.root}",
        f"--attempt={attempt}",
        f"--head={head}",
        f"--token={token}",
        f"--visible-within={config.preflight.visible_within_s:g}",
    ]
    if config.cluster.interconnect.interface:
        argv.append(f"--interface={config.cluster.interconnect.interface}")
    if config.cluster.accelerator is Accelerator.cuda:
        argv.append("--gpus")
    return argv


def slow_argv(config: RunConfig, head: str, work: Work) -> list[str]:
    """The command each node runs to measure its part of the slow checks."""
    argv = [sys.executable, "-m", "clusterrun.measure.node", f"--head={head}"]
    if config.cluster.interconnect.interface:
        argv.append(f"--interface={config.cluster.interconnect.interface}")
    return [*argv, f"--work={work.to_argument()}"]


def training_argv(
    config: RunConfig, run: RunDir, attempt: int, endpoint: str, rendezvous_id: str, nodes: int | None = None
) -> list[str]:
    """The command each chosen node runs: our agent, then torchrun's own arguments after ``--``.

    ``nodes`` is how many there are, when not as many as configured.
    ``rendezvous_id`` is a secret of the attempt: torch's store has no passwords, so only who knows the id can join.
    """
    cluster, train = config.cluster, config.train
    argv = [sys.executable, "-m", "clusterrun.launch.agent", f"--run-dir={run.root}", f"--attempt={attempt}"]
    if cluster.interconnect.interface:
        argv.append(f"--interface={cluster.interconnect.interface}")
    timeout = train.rendezvous_timeout_s
    argv += [
        "--",
        f"--nnodes={nodes or cluster.nodes}",
        f"--nproc-per-node={workers_per_node(config)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={rendezvous_id}",
        f"--rdzv-conf=join_timeout={timeout},timeout={timeout},read_timeout={timeout}",
        f"--max-restarts={train.max_restarts}",
    ]
    if config.action is Action.bench:
        worker = "worker" if config.bench.tool == "torch" else "perf"
        return [*argv, "-m", f"clusterrun.measure.{worker}", f"--run-dir={run.root}", f"--attempt={attempt}"]
    argv += nsys_prefix(config, run, attempt)
    if train.script is not None:
        return [*argv, train.script, *train.args]
    return [*argv, "-m", "clusterrun.train.worker", f"--run-dir={run.root}", f"--attempt={attempt}"]


def nsys_prefix(config: RunConfig, run: RunDir, attempt: int) -> list[str]:
    """What stands before the worker where profile.tool=nsys: chosen ranks run under nsys."""
    profile = config.profile
    if profile.tool is not ProfileTool.nsys:
        return []
    ranks = ",".join(map(str, profile.ranks))
    argv = ["-m", "clusterrun.train.nsys", f"--ranks={ranks}", f"--output={run.attempt(attempt).profiles}"]
    if profile.steps:
        argv.append("--marked")
    return [*argv, *(f"--option={option}" for option in profile.nsys_options), "--"]


def workers_per_node(config: RunConfig) -> int:
    """Processes that torchrun starts on a node: nccl-tests drives all GPUs of a node from one."""
    alone = config.action is Action.bench and config.bench.tool != "torch"
    return 1 if alone else config.cluster.nproc_per_node


def step_environment(config: RunConfig) -> dict[str, str]:
    """Environment added for every step: cluster.env, and what is derived unless this process has it set already."""
    return settings.step_environment(config, os.environ)
