"""The plan as a person reads it. Plain text without rich: a plan should be there at once."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from clusterrun.report.units import duration_text


def plan_text(plan: Mapping[str, Any], *, bold: bool) -> str:
    """A table of what will happen, then the commands and the script word for word, to be copied."""
    r, batch = plan["resources"], plan["batch"]
    spares = f" + {r['spare_nodes']} spare" if r["spare_nodes"] else ""
    limit = r["time_limit_min"]
    told = f", told {r['signal_lead_s']} s before the time limit" if limit else ""
    rows = [
        ("run", plan["run_id"]),
        ("directory", plan["run_dir"]),
        ("cluster", f"{plan['cluster']} ({plan['executor']})"),
        ("job", plan["job"]),
        ("nodes", f"{r['nodes']}{spares}, {r['nproc_per_node']} workers each: world size {r['world_size']}"),
        ("per node", f"{r['gpus_per_node']} GPUs, {r['cpus_per_node']} CPU cores"),
        ("time limit", f"{limit // 60} h {limit % 60:02} min" if limit else "none given"),
    ]
    if batch:
        per_rank = f"{batch['per_rank']} per rank, micro-batch {batch['micro']}"
        rows.append(("batch", f"{batch['global_']} samples per step ({per_rank})"))
    if plan["excluded"]:
        rows.append(("excluded", f"{', '.join(plan['excluded'])} (see clusterrun nodes)"))
    rows += [
        ("preflight", ", ".join(plan["checks"])),
        *([("then, slow", ", ".join(plan["slow_checks"]))] if plan["slow_checks"] else []),
        ("when told to stop", plan["after_signal"] + told),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{_bold(name.ljust(width), bold)}  {value}" for name, value in rows]
    lines += _prediction(plan["prediction"], bold)
    lines += ["", _bold("environment, and why:", bold), *_settings(plan["settings"])]
    lines += [f"warning: {one}" for one in plan["warnings"]]
    for title, text in (
        ("preflight on every node", shlex.join(plan["preflight_argv"])),
        ("training on the chosen nodes", shlex.join(plan["training_argv"])),
        ("sbatch script", plan["sbatch"]),
    ):
        if text:
            lines += ["", _bold(f"{title}:", bold), text.rstrip()]
    return "\n".join(lines)


def _prediction(prediction: Mapping[str, Any] | None, bold: bool) -> list[str]:
    """What a step will cost on the declared wiring, and what would make it faster; or why that is not known."""
    if prediction is None:
        return []
    p = prediction
    step, busy, wait = (duration_text(p[key]) for key in ("step_s", "compute_s", "exposed_s"))
    power = f" at {p['watts'] / 1000:g} kW of board power" if p["watts"] else ""
    if p["why_not"]:
        return ["", f"{_bold('predicted:', bold)} nothing, since {p['why_not']}"]
    rows = [
        ("step", f"{step}: {busy} computing, {wait} waiting for gradients"),
        ("communication", f"{100 * p['share']:.0f} % of the step (efficiency {100 * p['efficiency']:.0f} %)"),
        ("bottleneck", f"{p['bottleneck']}, {p['algorithm']}"),
        ("throughput", _rate(p["samples_per_s"]) + power),
    ]
    if p["memory_gb"] is not None or p["fits"] is False:
        gb = p["memory_gb"]
        size = "" if gb is None else f"{gb:.2g} GB per GPU: " if gb >= 0.01 else "under 0.01 GB per GPU: "
        rows.append(("memory", size + ("fits" if p["fits"] else "does not fit")))
    rows += [
        ("to fit" if a["to_fit"] else "faster", f"{a['change']}: {a['speedup']:,.3g}x; {a['note']}".rstrip("; "))
        for a in p["advice"]
    ]
    width = max(len(name) for name, _ in rows)
    title = "predicted, roughly, as CPUs differ:" if p["rough"] else "predicted, Python and kernel starts not counted:"
    return ["", _bold(title, bold)] + [f"  {name.ljust(width)}  {value}" for name, value in rows]


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def compare_text(found: Mapping[str, tuple[int, Mapping[str, Any]]]) -> str:
    """Predictions of several clusters, a line each; by name: world size and prediction."""
    rows = [("cluster", "ranks", "step", "communication", "samples/s", "bottleneck")]
    for name, (ranks, p) in found.items():
        if p["why_not"]:
            rows.append((name, str(ranks), "-", "-", "-", p["why_not"]))
            continue
        share, rate = f"{100 * p['share']:.0f}% of it", f"{p['samples_per_s']:,.0f}"
        rows.append((name, str(ranks), duration_text(p["step_s"]), share, rate, f"{p['bottleneck']}, {p['algorithm']}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:5], widths[1:], strict=True)), row[5]])
        for row in rows
    )


def _settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per variable: what is set, what each node settles (?), what is left alone (-)."""
    rows = []
    for one in settings:
        unset = "?" if one["source"] == "each node" else "-"
        text = one["name"] if one["value"] is None else f"{one['name']}={shlex.quote(one['value'])}"
        reason = one["reason"] if one["source"] in ("derived", "each node") else f"{one['source']}: {one['reason']}"
        on_node = "on each node: " if one["source"] == "each node" else ""
        rows.append((" " if one["value"] is not None else unset, text, on_node + reason))
    width = min(max((len(text) for _, text, _ in rows), default=0), 40)
    return [f"{mark} {text.ljust(width)}  {reason}" for mark, text, reason in rows]


def _bold(text: str, on: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if on else text
