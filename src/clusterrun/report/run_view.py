"""What a run came to, in the terminal and for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterrun.report.facts import RunFacts, busbw, code_text, predicted
from clusterrun.report.follow import clock
from clusterrun.report.nccl_used import last_nccl_lines
from clusterrun.report.side_by_side import COLUMNS, could_be_faster, side_by_side
from clusterrun.report.wide import print_wide


def as_json(f: RunFacts) -> dict[str, Any]:
    """Seconds, shares from 0 to 1, bytes per second."""
    bandwidth = busbw(f.run, f.config)
    return {
        "run": f.run.id,
        "directory": str(f.run.root),
        "state": f.state,
        "code": code_text(f.run),
        "step": f.steps[-1]["step"] if f.steps else None,
        "total_steps": f.start.get("total_steps"),
        "world_size": f.start.get("world_size", f.config.world_size),
        "nodes": list(f.nodes),
        "loss": f.result.get("loss"),
        "metric": f.result.get("metric"),
        "value": f.result.get("value"),
        "samples_per_s": f.samples_per_s,
        "step_s": f.step_s,
        "communication": f.communication,
        "prediction": f.plan.get("prediction"),
        "data_wait": f.data_wait,
        "busbw": bandwidth,
        "waiting": f.waiting,
        "side_by_side": [dataclasses.asdict(line) for line in side_by_side(f)],
        "nccl": last_nccl_lines(f.run),
        "faster": could_be_faster(f),
        "goodput_percent": f.account.goodput_percent,
        "seconds_by_cause": f.account.by_cause(),
        "attempts": [
            {
                "number": a.number,
                "reason": a.reason,
                "job": a.job_id,
                "nodes": list(a.nodes),
                "started": a.started,
                "ended": a.ended,
                "ending": None if a.is_open else a.ending.value,
                "saved_before": a.saved_before,
                "saved_after": a.saved_after,
                "message": a.message,
                "notices": [dataclasses.asdict(n) for n in a.notices],
                "seconds_by_cause": f.account.attempts[a.number].by_cause(),
            }
            for a in f.attempts
        ],
    }


def show(f: RunFacts, console: Console) -> None:
    """A few lines and where the time went."""
    value = as_json(f)
    lines = [("run", f.run.id), ("state", f.state), ("directory", str(f.run.root))]
    if code := code_text(f.run):
        lines.append(("code", code))
    if f.attempts and f.attempts[-1].message:
        lines.append(("why", f.attempts[-1].message))
    if value["step"] is not None:
        lines.append(("step", f"{value['step']:,} of {value['total_steps']:,}"))
    if value["value"] is not None:
        lines.append(("result", f"{value['metric']} {value['value']:.4f}, loss {value['loss']:.4f}"))
    if f.samples_per_s and f.step_s:
        lines.append(("throughput", f"{f.samples_per_s:,.0f} samples/s, {f.step_s * 1e3:.3g} ms per step"))
    if f.communication is not None:
        data = f", getting batches {f.data_wait:.0%}" if f.data_wait is not None else ""
        lines.append(("of a step", f"communication {f.communication:.0%}{data}"))
    if forecast := predicted(f):
        lines.append(("predicted", forecast))
    if value["busbw"]:
        lines.append(("busbw", f"{value['busbw'] / 1e9:.3g} GB/s"))
    if f.account.goodput_percent is not None:
        lines.append(("goodput", f"{f.account.goodput_percent:.0f} % of {clock(f.account.total_s)}"))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        console.print(Text(name.ljust(width), style="bold"), Text(text), soft_wrap=True)
    four = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        four.add_column(name)
    for line in value["side_by_side"]:
        four.add_row(*map(Text, line.values()))
    if four.row_count:
        print_wide(console, four)
    for said in [*value["nccl"], *value["faster"]]:
        console.print(said, markup=False, soft_wrap=True)
    if not f.attempts:
        return
    causes = [cause for cause, seconds in f.account.by_cause().items() if seconds > 0]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("attempt")
    for cause in causes:
        table.add_column(cause, justify="right")
    table.add_column("ended")
    for a in f.attempts:
        spent = f.account.attempts[a.number].by_cause()
        ended = "" if a.is_open else a.ending.value
        table.add_row(str(a.number), *(clock(spent[cause]) for cause in causes), ended)
    print_wide(console, table)
