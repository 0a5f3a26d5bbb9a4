"""``clusterrun preflight``: check every node of a cluster, and train nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clusterrun.cli.common import over_configs, verb_parser
from clusterrun.cli.following import wait_quietly

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "preflight",
        "Check every node of a cluster, and train nothing. Exit 3 when a check is fatal on any node.\n"
        "With preflight=full also matrix products, copies and all-reduce in and between nodes (minutes).",
        "clusterrun preflight +cluster=a100_nvswitch cluster.nodes=4",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, overrides = parser.parse_known_args(argv)

    def check(config: RunConfig) -> int:
        from rich.console import Console

        from clusterrun.launch.submit import submit
        from clusterrun.report import preflight_view

        submitted = submit(config)
        code = wait_quietly(submitted)
        results = preflight_view.read_results(submitted.run.all_attempts()[-1])
        if options.json:
            print(json.dumps(preflight_view.as_json(results), indent=1))
        else:
            preflight_view.show(results, Console(highlight=False))
        return code

    return over_configs([*overrides, "action=preflight"], check)
