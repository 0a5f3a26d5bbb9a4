"""``clusterrun clusters``: the cluster configurations there are."""

from __future__ import annotations

import json

from clusterrun.cli.common import verb_parser


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "clusters",
        "List the cluster configurations, a line each; yours shadow the packaged ones of the same name.",
        "clusterrun clusters; clusterrun plan +cluster=a100_nvswitch",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(argv)
    from rich.console import Console

    from clusterrun.config.clusters import known_clusters
    from clusterrun.report.clusters_view import show

    found = known_clusters()
    if options.json:
        print(json.dumps([entry.as_json() for entry in found], indent=1))
    else:
        show([entry.as_json() for entry in found], Console(highlight=False))
    return 0
