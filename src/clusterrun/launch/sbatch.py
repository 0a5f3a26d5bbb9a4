"""The sbatch script, by submitit's own renderer. The same text is planned, printed and submitted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from clusterrun.config.grace import signal_lead_s
from clusterrun.config.schema import GpuRequest, RunConfig
from clusterrun.config.units import time_limit_minutes
from clusterrun.launch.resources import requested_gpus
from clusterrun.rundir import RunDir


class PlanningExecutor(SlurmExecutor):
    """submitit's executor, also where there is no Slurm: a plan only renders."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def text(self, tasks: int = 1) -> str:
        """The script for one job, or for an array of several, as submitit will submit it."""
        if tasks == 1:
            return str(self._make_submission_file_text(self._submitit_command_str, uid=""))
        array = PlanningExecutor(folder=self.folder)
        array.update_parameters(**self.parameters)
        array.parameters["map_count"] = tasks  # as submitit does it
        return str(array._make_submission_file_text(self._submitit_command_str, uid=""))


def executor_for(config: RunConfig, run: RunDir, excluded: Sequence[str] = ()) -> PlanningExecutor:
    """A submitit executor set up for one run."""
    return executor_with(parameters_for(config, run.id, excluded), run.submitit)


def executor_with(parameters: dict[str, Any], folder: Path) -> PlanningExecutor:
    """A submitit executor whose pickles and logs are in ``folder``.

    ``use_srun=False`` and ``exec``: one Python on the batch host takes the place of the batch shell, because
    ``--signal=B:`` reaches only that shell and a bash that waits for a child dies of it. Steps are started from there.
    """
    executor = PlanningExecutor(folder=folder, python="exec " + shlex.quote(sys.executable))
    executor.update_parameters(**parameters)
    return executor


def sbatch_text(config: RunConfig, run: RunDir, excluded: Sequence[str] = ()) -> str:
    """What will be submitted, to the letter."""
    return executor_for(config, run, excluded).text()


def parameters_for(config: RunConfig, job_name: str, excluded: Sequence[str]) -> dict[str, Any]:
    """What submitit is told of a job: equal for two points of a sweep when one script serves both."""
    cluster, slurm = config.cluster, config.cluster.slurm
    extra: dict[str, Any] = {
        "signal": f"B:USR2@{signal_lead_s(config)}",
        "no_kill": True,
        ("requeue" if config.recovery.requeue else "no_requeue"): True,
    }
    gpus = requested_gpus(config)
    if gpus:
        amount = f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else str(gpus)
        if slurm.gpu_request is GpuRequest.gpus_per_node:
            extra["gpus_per_node"] = amount
        else:
            extra["gres"] = f"gpu:{amount}"
    for name in ("mem", "mem_per_cpu", "mem_per_gpu", "reservation", "licenses"):
        value = getattr(slurm, name)
        if value is not None:
            extra[name] = value
    extra.update(
        {str(k).lstrip("-").replace("-", "_"): v for k, v in slurm.extra.items() if v is not None and v is not False}
    )
    parameters: dict[str, Any] = {
        "job_name": job_name,
        "nodes": cluster.nodes + cluster.spare_nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cluster.nproc_per_node * cluster.cpus_per_proc,
        # None leaves --time out, so that the site's default holds (submitit's own default is 5 minutes).
        "time": time_limit_minutes(cluster.time_limit) if cluster.time_limit else None,
        "wckey": slurm.wckey,
        "setup": slurm.setup or None,
        "exclusive": slurm.exclusive or None,
        "use_srun": False,
        "additional_parameters": extra,
    }
    for name in (
        "partition",
        "account",
        "qos",
        "constraint",
        "exclude",
        "nodelist",
        "dependency",
        "comment",
        "mail_type",
        "mail_user",
    ):
        parameters[name] = getattr(slurm, name)
    if excluded:
        parameters["exclude"] = ",".join([*([slurm.exclude] if slurm.exclude else []), *excluded])
    return parameters
