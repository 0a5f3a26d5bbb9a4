"""The report of one run as a page: what came of it, curves, where the time went, wiring, preflight, how to repeat."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from clusterrun.config import frozen
from clusterrun.config.overrides import as_overrides, gives_again
from clusterrun.config.schema import Executor
from clusterrun.ledger import Ending
from clusterrun.report import svg
from clusterrun.report.facts import RunFacts, code_text, predicted
from clusterrun.report.follow import clock
from clusterrun.report.html_page import badge, block, facts, folded, page, section, table, tiles
from clusterrun.report.html_wiring import wiring_html
from clusterrun.report.nccl_used import FELL_BACK, last_nccl_lines
from clusterrun.report.preflight_view import NodeResult
from clusterrun.report.side_by_side import COLUMNS, could_be_faster, side_by_side
from clusterrun.report.svg import Bar, Mark, Part, Series, bar_chart, both, line_chart, thinned

# Cause -> (colour of the palette, words).
CAUSES = {
    "queue": (7, "waiting in the queue"),
    "preflight": (5, "preflight"),
    "rendezvous": (3, "starting the workers"),
    "training": (2, "training"),
    "checkpoint": (0, "standing still for a save"),
    "rework": (1, "steps lost and repeated"),
    "ending": (4, "ending"),
}
_MOST_ATTEMPTS = 40
_MOST_NODES = 64


def run_page(f: RunFacts) -> str:
    """The whole document."""
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    c = f.config
    what = c.train.script or str(c.train.task)
    subtitle = f"{state_badge(f.state)} {escape(what)} on {escape(c.cluster.name)}, " + escape(
        f"{c.cluster.nodes} node{'s' if c.cluster.nodes > 1 else ''} x {c.cluster.nproc_per_node} workers"
    )
    body = [
        tiles(_tiles(f)),
        _problems(f),
        _curves(f),
        _breakdown(f),
        _time(f),
        _side_by_side(f),
        section("Wiring", wiring_html(c.cluster, f.topologies)),
        _preflight(f.preflight),
        _about(f),
        _repeat(f),
    ]
    return page(f.run.id, subtitle, body, written)


def state_badge(state: str) -> str:
    good, bad = ("done",), ("failed", "crashed", "lost", "refused", "error", "no end", "hung", "not enough")
    kind = "good" if state in good else "bad" if any(word in state for word in bad) else "sub"
    return badge(state, kind)


def _tiles(f: RunFacts) -> Iterable[tuple[str, str]]:
    steps, start = f.steps, f.start
    if f.result.get("metric") and f.result.get("value") is not None:
        yield f.result["metric"], f"{f.result['value']:.4f}"
    if steps:
        yield "loss", f"{steps[-1]['loss']:.4f}"
    if f.samples_per_s:
        yield "samples per second", svg.number(f.samples_per_s)
    if steps and start.get("total_steps"):
        yield "steps", f"{steps[-1]['step']:,} / {start['total_steps']:,}"
    if f.account.total_s:
        yield "in all", clock(f.account.total_s)
    if f.account.goodput_percent is not None:
        yield "goodput", f"{f.account.goodput_percent:.0f} %"
    if f.communication is not None:
        yield "communication", f"{f.communication:.0%}"
    if len(f.attempts) > 1:
        yield "attempts", str(len(f.attempts))


def _problems(f: RunFacts) -> str:
    """Why it failed, and what else a person should know."""
    last = f.attempts[-1] if f.attempts else None
    items = []
    if last is not None and last.ending not in (Ending.done, Ending.killed) and last.message:
        items.append(f"<p>{badge('attempt ' + str(last.number), 'bad')} {escape(last.message)}</p>")
    notices = [(a.number, n) for a in f.attempts for n in a.notices][-10:]
    items += [f"<p>{badge(n.kind, 'warn')} attempt {number}: {escape(n.message)}</p>" for number, n in notices]
    fell = [line.removeprefix(FELL_BACK).strip() for line in last_nccl_lines(f.run) if line.startswith(FELL_BACK)]
    items += [f"<p>{badge('NCCL fell back', 'warn')} {escape(text)}</p>" for text in fell]
    warned = Counter(e["message"] for e in f.of_kind("warning"))
    items += [f"<p>{badge('warning', 'warn')} {escape(text)}</p>" for text in list(warned)[-5:]]
    return section("To know", *items)


def _marks(f: RunFacts) -> list[Mark]:
    """Where later attempts went on from."""
    return [
        Mark(float(e["step"]), f"attempt {e['attempt']} goes on from step {e['step']}")
        for e in f.of_kind("start")
        if e["attempt"] > 1
    ]


def _curves(f: RunFacts) -> str:
    if not f.steps:
        return ""
    marks = _marks(f)
    xs = [float(e["step"]) for e in f.steps]
    lx, ly = thinned(xs, [e["loss"] for e in f.steps])
    evals = {e["step"]: e for e in f.of_kind("eval") if e.get("loss") is not None}
    loss = [Series("training loss", lx, ly, 0)]
    if evals:
        loss.append(Series("validation loss", list(map(float, evals)), [e["loss"] for e in evals.values()], 1, "both"))
    sx, sy = thinned(xs, [e["samples_per_s"] for e in f.steps])
    speed = [Series("samples/s", sx, sy, 2)]
    pair = [
        section(
            "Loss",
            svg.legend([(s.colour, s.name) for s in loss]),
            both(
                lambda width, label: line_chart(width, label, loss, "step", "loss", marks=marks), "loss over steps", 480
            ),
        ),
        section(
            "Throughput",
            svg.legend([(2, "all ranks together")]),
            both(
                lambda width, label: line_chart(width, label, speed, "step", "samples/s", marks=marks, from_zero=True),
                "samples per second over steps",
                480,
            ),
        ),
    ]
    hint = '<p class="hint">Dashed lines: a later attempt went on there.</p>' if marks else ""
    return f'<div class="two">{"".join(pair)}</div>{hint}'


def _breakdown(f: RunFacts) -> str:
    """What a step is made of, for each fifth of the run and as a whole."""
    timed = [e for e in f.steady if e.get("comm_time_s") is not None]
    if not timed:
        return ""
    size = max(1, -(-len(timed) // 5))
    parts = [timed[i : i + size] for i in range(0, len(timed), size)]
    bars = [_step_bar("all", timed)]
    if len(parts) > 1:
        bars += [_step_bar(f"{p[0]['step']} to {p[-1]['step']}" if len(p) > 1 else f"{p[0]['step']}", p) for p in parts]
    names = [(3, "getting the batch"), (1, "gradients travel (partly behind computing)"), (0, "computing and the rest")]
    return section(
        "What a step is made of",
        svg.legend(names),
        both(lambda width, label: bar_chart(width, label, bars, " ms"), "milliseconds of a step by what they went to"),
        hint="Means per optimizer step of rank 0, in milliseconds. Communication as DDP times it: waiting for slower "
        "ranks counts." + (f" Predicted: {forecast}." if (forecast := predicted(f)) else ""),
    )


def _step_bar(name: str, events: Sequence[Mapping[str, Any]]) -> Bar:
    count = len(events)
    step = sum(e["step_time_s"] for e in events) / count * 1e3
    data = min(step, sum(e["data_time_s"] or 0.0 for e in events) / count * 1e3)
    comm = min(step - data, sum(e["comm_time_s"] for e in events) / count * 1e3)
    parts = [
        Part(data, 3, f"getting the batch: {data:.3g} ms"),
        Part(comm, 1, f"gradients travel: {comm:.3g} ms"),
        Part(step - data - comm, 0, f"computing and the rest: {step - data - comm:.3g} ms"),
    ]
    return Bar(name, parts, note=f"{step:.3g} ms")


def _time(f: RunFacts) -> str:
    """Attempts on a time line, and the lost time by cause."""
    account = f.account
    if not account.total_s:
        return ""
    hours = account.total_s > 3 * 3600
    unit, per = (" h", 3600.0) if hours else (" min", 60.0) if account.total_s > 300 else (" s", 1.0)
    bars, at = [], 0.0
    shown = f.attempts[-_MOST_ATTEMPTS:]
    for attempt in f.attempts:
        spent = account.attempts[attempt.number].by_cause()
        parts = [
            Part(seconds / per, CAUSES[cause][0], f"{CAUSES[cause][1]}: {clock(seconds)}")
            for cause, seconds in spent.items()
        ]
        if attempt in shown:
            word = "" if attempt.is_open else attempt.ending.value.replace("_", " ")
            bars.append(Bar(f"attempt {attempt.number}", parts, at, word))
        at += sum(p.value for p in parts)
    used = [(CAUSES[cause][0], CAUSES[cause][1]) for cause, seconds in account.by_cause().items() if seconds > 0]
    lost = [
        (f'<span class="key b{CAUSES[cause][0]}"></span>{escape(CAUSES[cause][1])}', clock(seconds), f"{share:.1f} %")
        for (cause, seconds), share in zip(account.by_cause().items(), account.percent().values(), strict=True)
        if seconds > 0
    ]
    rows = [
        (
            str(a.number),
            escape(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(a.started))),
            escape(a.reason),
            escape(", ".join(a.nodes)),
            "-" if a.saved_before is None else f"{a.saved_before:,}",
            "-" if a.saved_after is None else f"{a.saved_after:,}",
            escape("" if a.is_open else a.ending.value.replace("_", " ")),
        )
        for a in shown
    ]
    columns = ("attempt", "started", "why", "nodes", "saved before", "saved after", "ended")
    return section(
        "Where the time went",
        svg.legend(used),
        both(lambda width, label: bar_chart(width, label, bars, unit, total=at), "attempts on a time line"),
        table(("cause", "time", "share"), lost, numbers=(1, 2), label="time by cause"),
        folded("Attempts one by one", table(columns, rows, numbers=(0, 4, 5), label="attempts")),
        hint="Goodput is the share that trained and counted. Time from an end to a person's resume is left out.",
    )


def _side_by_side(f: RunFacts) -> str:
    rows = [tuple(escape(cell) for cell in line.cells()) for line in side_by_side(f)]
    if not rows:
        return ""
    used = [f"<p>{escape(line)}</p>" for line in last_nccl_lines(f.run) if not line.startswith(FELL_BACK)]
    used += [f"<p>{escape(line)}</p>" for line in could_be_faster(f)]
    return section(
        "Declared, detected, predicted, measured",
        table(COLUMNS, rows, label="declared, detected, predicted, measured"),
        *used,
        hint="Bandwidth is bus bandwidth of an all-reduce of the size in brackets; measured by clusterrun bench on the "
        "same cluster, nodes and workers, newest first.",
    )


def _preflight(results: Sequence[NodeResult]) -> str:
    if not results:
        return ""
    rows = []
    for result in results[:_MOST_NODES]:
        counts = Counter(finding["verdict"] for finding in result.findings)
        kinds = {"PASS": "good", "WARN": "warn", "UNKNOWN": "unknown", "FAIL": "bad"}
        checks = " ".join(f'<span class="{kinds[v]}">{counts[v]} {v}</span>' for v in kinds if counts[v])
        notes = "<br>".join(
            f'<span class="{kinds[x["verdict"]]}">{x["verdict"]}</span> {escape(x["check"])}: {escape(x["finding"])}'
            + (f' <span class="sub">({escape(x["advice"])})</span>' if x["advice"] else "")
            for x in result.findings
            if x["verdict"] != "PASS"
        )
        word = badge("refused", "bad") if result.refused else badge("trains" if result.chosen else "spare", "good")
        rows.append((escape(result.node), word, checks, notes or '<span class="sub">everything passed</span>'))
    more = f"<p>{len(results) - _MOST_NODES} more nodes are not shown.</p>" if len(results) > _MOST_NODES else ""
    return section(
        "Preflight", table(("node", "", "checks", "what did not pass"), rows, label="preflight by node"), more
    )


def _about(f: RunFacts) -> str:
    c, start = f.config, f.start
    precision = c.train.precision.value
    parameters = f"{start['parameters']:,}" if start.get("parameters") else ""
    batch = (
        f"{start['global_batch']:,} samples per step, {start['batch_per_rank']:,} per rank"
        if start.get("global_batch")
        else ""
    )
    items = [
        ("directory", str(f.run.root)),
        ("code", code_text(f.run)),
        ("nodes", ", ".join(f.nodes)),
        ("world size", str(start.get("world_size", c.world_size))),
        ("batch", batch),
        ("parameters", parameters),
        ("device", f"{start.get('device', '')} {start.get('backend', '')}".strip()),
        ("precision", precision),
        ("torch", str(start.get("torch", ""))),
        ("profiles", ", ".join(str(p.relative_to(f.run.root)) for p in sorted(f.run.profiles.glob("*/*")))),
        ("jobs", ", ".join(dict.fromkeys(a.job_id for a in f.attempts))),
    ]
    config = folded("Whole configuration", block(frozen.to_yaml(c), label="configuration"))
    return section("About this run", facts(items), config)


def _repeat(f: RunFacts) -> str:
    """The exact commands: as one would submit it again, and what was run."""
    again = as_overrides(f.config)
    parts = ["<h3>Submit the same again</h3>", block(shlex.join(["clusterrun", *again]), wrap=True)]
    if not gives_again(f.config, again):
        parts.append(
            '<p class="hint">Composed here and now this gives something else; the configuration above is whole.</p>'
        )
    if f.config.cluster.executor is Executor.slurm:
        parts.append(f'<p class="hint">Or go on with this one: <code>clusterrun resume {escape(f.run.id)}</code></p>')
    argv = f.plan.get("training_argv")
    if argv:
        parts.append(folded("The training step as it was started", block(shlex.join(argv), wrap=True)))
    text = f.plan.get("sbatch")
    if f.run.submission.exists():
        text = f.run.submission.read_text()
    if text:
        parts.append(folded("The script that sbatch got", block(text, label="sbatch script")))
    return section("Repeat it", *parts)
