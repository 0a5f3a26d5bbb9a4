"""``clusterrun resume``: go on with a run that stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from clusterrun.cli.common import verb_parser
from clusterrun.cli.following import announce


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "resume",
        "Go on with a run that stopped, from its newest checkpoint.",
        "clusterrun resume ddp_linear-laptop-1a2b3c4d",
    )
    parser.add_argument("run", metavar="RUN", help="run directory, run id, or the beginning of an id")
    parser.add_argument(
        "--shared-dir", type=Path, help="where runs are (default: CLUSTERRUN_SHARED_DIR or ~/clusterrun)"
    )
    parser.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, help="follow the run (default on this machine)"
    )
    options = parser.parse_args(argv)
    from clusterrun.operate import api
    from clusterrun.rundir import default_shared_dir

    shared = options.shared_dir.expanduser() if options.shared_dir else default_shared_dir()
    run = api.Run.find(options.run, shared).resume()
    return announce(api.submitted(run), options.wait)
