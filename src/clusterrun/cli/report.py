"""``clusterrun report``: what a run or a sweep came to, in the terminal or as one HTML file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.cli.common import add_shared_dir, shared_dir, verb_parser

if TYPE_CHECKING:
    from clusterrun.report.facts import RunFacts
    from clusterrun.report.scaling import ScalingPoint
    from clusterrun.rundir import RunDir, SweepDir


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "report",
        "What a run or a sweep came to. Of a sweep also speed-up, efficiency and the share of communication per point.",
        "clusterrun report ddp_linear-lab-1a2b3c4d --html report.html --open",
    )
    parser.add_argument("what", metavar="RUN|SWEEP", help="id, the beginning of one, a path, or last")
    add_shared_dir(parser)
    parser.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help="write one self-contained page (default: report.html in the directory)",
    )
    parser.add_argument("--open", action="store_true", help="and show it in the browser")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="for machines")
    shape.add_argument("--csv", action="store_true", help="a sweep's table, for spreadsheets")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a sweep's scaling curves as .svg or .png")
    options = parser.parse_args(argv)
    from clusterrun.launch.submit import LAST
    from clusterrun.launch.sweep import find_sweep
    from clusterrun.operate.find import find_one, find_runs

    shared = shared_dir(options)
    sweep = None if options.what == LAST else find_sweep(options.what, shared)
    if sweep is not None and {one.run.root.parent for one in find_runs([options.what], shared)} <= {sweep.root}:
        return _sweep(sweep, options)
    return _run(find_one(options.what, shared).run, options)


def _run(run: RunDir, options: argparse.Namespace) -> int:
    from clusterrun.errors import ConfigError
    from clusterrun.report import run_view
    from clusterrun.report.facts import read_facts
    from clusterrun.report.html_run import run_page

    if options.csv or options.plot:
        raise ConfigError(f"report {run.id}: --csv and --plot are for sweeps, this is a run; use --json or --html")
    facts = read_facts(run)
    if options.json:
        print(json.dumps(run_view.as_json(facts), indent=1))
    elif options.html is None and not options.open:
        from rich.console import Console

        run_view.show(facts, Console(highlight=False))
    if options.html is not None or options.open:
        _write_page(run_page(facts), run.report, options)
    return 0


def _sweep(sweep: SweepDir, options: argparse.Namespace) -> int:
    from clusterrun.launch.sweep import read_sweep
    from clusterrun.report import scaling
    from clusterrun.report.html_sweep import sweep_page

    points = sweep_points(sweep)
    if options.json:
        print(json.dumps(scaling.as_json(points, sweep.id), indent=1))
    elif options.csv:
        print(scaling.as_csv(points), end="")
    elif options.html is None and not options.open and not options.plot:
        from rich.console import Console

        scaling.show(points, Console(highlight=False))
    if options.plot is not None:
        from clusterrun.report.scaling_plot import write_plot

        write_plot(points, options.plot)
        print(f"wrote {options.plot}")
    if options.html is not None or options.open:
        command = read_sweep(sweep).get("command") or []
        _write_page(sweep_page(sweep.id, points, command, str(sweep.root)), sweep.report, options)
    return 0


def sweep_points(sweep: SweepDir) -> list[ScalingPoint]:
    """Every point of a sweep that has a run directory."""
    from clusterrun.launch.sweep import read_sweep
    from clusterrun.launch.sweep_plan import point_names
    from clusterrun.report.facts import read_facts
    from clusterrun.report.scaling import scaling

    known = [p for p in read_sweep(sweep)["points"] if sweep.run(p["run"]).config.is_file()]
    names = point_names([p["overrides"] for p in known])
    read: list[RunFacts] = [read_facts(sweep.run(p["run"])) for p in known]
    return scaling([(n, tuple(p["overrides"]), f) for n, p, f in zip(names, known, read, strict=True)])


def _write_page(text: str, default: Path, options: argparse.Namespace) -> None:
    from clusterrun.errors import ConfigError
    from clusterrun.rundir import write_durably

    path = options.html if options.html and str(options.html) != "." else default
    try:
        write_durably(path, text)
    except OSError as error:
        raise ConfigError(f"--html {path}: can't be written ({error.strerror or error})") from None
    print(f"wrote {path}")
    if options.open:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            print(f"no browser here; open {path.absolute().as_uri()}")
