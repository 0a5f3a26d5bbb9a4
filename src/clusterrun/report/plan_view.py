"""The plan as a person reads it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show_plan(plan: Mapping[str, Any], console: Console) -> None:
    """A table of what will happen, then the commands and the script word for word."""
    r, batch = plan["resources"], plan["batch"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("run", plan["run_id"])
    table.add_row("directory", plan["run_dir"])
    table.add_row("cluster", f"{plan['cluster']} ({plan['executor']})")
    table.add_row("job", plan["job"])
    spares = f" + {r['spare_nodes']} spare" if r["spare_nodes"] else ""
    table.add_row("nodes", f"{r['nodes']}{spares}, {r['nproc_per_node']} workers each: world size {r['world_size']}")
    table.add_row("per node", f"{r['gpus_per_node']} GPUs, {r['cpus_per_node']} CPU cores")
    limit = r["time_limit_min"]
    table.add_row("time limit", f"{limit // 60} h {limit % 60:02} min" if limit else "none given (the site's default on Slurm)")
    if batch:
        table.add_row("batch", f"{batch['global_']} samples per step ({batch['per_rank']} per rank, micro-batch {batch['micro']})")
    table.add_row("preflight", ", ".join(plan["checks"]))
    table.add_row("when told to stop", f"{plan['after_signal']} (told {r['signal_lead_s']} s before the time limit)")
    table.add_row("environment", " ".join(f"{k}={v}" for k, v in plan["environment"].items()))
    console.print(table)
    _text(console, "preflight on every node", shlex.join(plan["preflight_argv"]))
    _text(console, "training on the chosen nodes", shlex.join(plan["training_argv"]))
    if plan["sbatch"]:
        _text(console, "sbatch script", plan["sbatch"])


def _text(console: Console, title: str, text: str) -> None:
    """Unwrapped and without markup, so that it can be copied."""
    console.print()
    console.print(f"{title}:", style="bold", markup=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
