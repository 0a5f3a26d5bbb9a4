"""``clusterrun checkpoints``: those of a run, and whether they are whole."""

from __future__ import annotations

import json
from pathlib import Path

from clusterrun.cli.common import verb_parser


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "checkpoints",
        "List the checkpoints of a run. Exit code 1 when one is damaged.",
        "clusterrun checkpoints ddp_linear-laptop-1a2b3c4d --verify",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, run id, or the beginning of an id")
    parser.add_argument("--verify", action="store_true", help="read every file and hold it against its digest")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--shared-dir", type=Path, help="where runs are (default: CLUSTERRUN_SHARED_DIR or ~/clusterrun)"
    )
    options = parser.parse_args(argv)
    from dataclasses import asdict

    from rich.console import Console

    from clusterrun.checkpoint.store import Store
    from clusterrun.launch.submit import find_run
    from clusterrun.report import checkpoints_view
    from clusterrun.rundir import default_shared_dir

    shared = options.shared_dir.expanduser() if options.shared_dir else default_shared_dir()
    run = find_run(options.run, [shared])
    lines = checkpoints_view.examine(Store(run.checkpoints), verify=options.verify)
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        checkpoints_view.show(lines, run.checkpoints, Console(highlight=False))
    return int(any(line.verdict == checkpoints_view.DAMAGED for line in lines))
