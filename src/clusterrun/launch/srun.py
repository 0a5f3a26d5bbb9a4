"""The srun command of a step. Planned, printed and run in the same words."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NO_STEP = re.compile(r"srun: error: (Unable to create step for job .*)")

# How long the tasks of a step may go on after the first has ended, seconds; then srun ends them.
LINGER_S = 60


def why_no_step(said: str) -> str | None:
    """Why Slurm would not start a step at all, from what srun wrote to standard error; None when it started one."""
    found = _NO_STEP.search(said)
    return found.group(1).strip() if found else None


def srun_argv(
    nodes: Sequence[str], argv: Sequence[str], cpus_per_task: int, *, overlap: bool = False, beside: bool = False
) -> list[str]:
    """The srun command for one task on each of ``nodes``.

    --cpus-per-task is repeated because srun since 22.05 does not inherit it. --no-kill and --kill-on-bad-exit=0 keep
    the other tasks running when a node is lost; --wait ends them if they then hang. ``overlap`` starts the step beside
    one that Slurm takes for alive because it can't reach one of its nodes; ``beside`` is for helpers, without GPUs.
    """
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={cpus_per_task}",
        "--no-kill",
        "--kill-on-bad-exit=0",
        f"--wait={LINGER_S}",
        "--input=none",
        "--mpi=none",
        *(["--overlap"] if overlap or beside else []),
        *(["--gres=none"] if beside else []),
        "--export=ALL",
        *argv,
    ]
