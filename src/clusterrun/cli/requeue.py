"""``clusterrun requeue``: a running run saves, gives its nodes back and waits in the queue again."""

from __future__ import annotations

from clusterrun.cli.common import add_quiet, add_shared_dir, shared_dir, verb_parser


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "requeue",
        "Have a running run save, give its nodes back and queue again, as before a time limit.",
        "clusterrun requeue last",
    )
    parser.add_argument("run", metavar="RUN", help="id, the beginning of one, a path, or last")
    add_shared_dir(parser)
    add_quiet(parser)
    options = parser.parse_args(argv)
    from clusterrun.operate.control import requeue
    from clusterrun.operate.find import find_one

    row = requeue(find_one(options.run, shared_dir(options)))
    if not options.quiet:
        print(f"{row.name}: told to save and to queue again; see: clusterrun status {row.name}")
    return 0
