"""``clusterrun cancel``: end runs; they save first."""

from __future__ import annotations

from clusterrun.cli.common import add_quiet, add_shared_dir, shared_dir, verb_parser


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "cancel",
        "End runs that wait or train. Those that train save first, and resume goes on with them.",
        "clusterrun cancel last; clusterrun cancel my-sweep ddp_linear-lab-1a2b3c4d",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP", help="id, the beginning of one, a path, or last")
    add_shared_dir(parser)
    add_quiet(parser)
    options = parser.parse_args(argv)
    from clusterrun.errors import RunError
    from clusterrun.operate.control import cancel
    from clusterrun.operate.find import find_runs

    asked, ended = cancel(find_runs(options.runs, shared_dir(options)))
    if not asked and len(ended) == 1:
        raise RunError(f"{ended[0].name}: {ended[0].state.value} already, nothing to cancel")
    if not options.quiet:
        for row in asked:
            waits = row.state.value in ("pending", "requeued")
            print(f"{row.name}: cancelled while it waited" if waits else f"{row.name}: told to save and end")
        if ended:
            print(f"{len(ended)} others had ended already")
    return 0
