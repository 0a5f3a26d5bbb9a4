"""``clusterrun plan``: what would be submitted, and nothing is."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from clusterrun.cli.common import over_configs, verb_parser

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "plan",
        "Show what would be submitted, and submit nothing.",
        "clusterrun plan +cluster=a100_nvswitch train=ddp_linear",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, overrides = parser.parse_known_args(argv)
    from clusterrun.cli.sweeping import is_sweep, show_plan

    if is_sweep(overrides):
        return show_plan(overrides, options.json)

    def show(config: RunConfig) -> int:
        from clusterrun.launch.plan import plan_next
        from clusterrun.report.plan_view import plan_text

        plan = plan_next(config).as_json()
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(json.dumps(plan, indent=1) if options.json else plan_text(plan, bold=bold))
        return 0

    return over_configs(overrides, show)
