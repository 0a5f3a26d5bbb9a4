"""``clusterrun nodes``: the nodes that preflight refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clusterrun.cli.common import over_configs, verb_parser
from clusterrun.errors import ConfigError

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "nodes",
        "List the nodes that preflight refused, or take one off the list: nodes forgive NAME.",
        "clusterrun nodes +cluster=a100_nvswitch; clusterrun nodes forgive c3 +cluster=a100_nvswitch",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, rest = parser.parse_known_args(argv)
    forgiven = rest[1] if rest[:1] == ["forgive"] and len(rest) > 1 else None
    if rest[:1] == ["forgive"] and forgiven is None:
        raise ConfigError("nodes forgive: the name of a node must follow, e.g. clusterrun nodes forgive c3")

    def show(config: RunConfig) -> int:
        from dataclasses import asdict

        from rich.console import Console

        from clusterrun.config.validate import validated
        from clusterrun.launch import exclusions
        from clusterrun.report import preflight_view

        listed = exclusions.of(validated(config))
        if forgiven is not None:
            if not listed.forgive(forgiven):
                raise ConfigError(f"nodes forgive {forgiven}: not on the list of cluster {listed.cluster}")
            print(f"{forgiven} is off the list of cluster {listed.cluster}")
        elif options.json:
            print(json.dumps([asdict(entry) for entry in listed.all()], indent=1))
        else:
            preflight_view.show_exclusions(listed.all(), listed.cluster, Console(highlight=False))
        return 0

    return over_configs(rest[2:] if forgiven is not None else rest, show)
