"""``clusterrun plan``: what would be submitted, and nothing is."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from clusterrun.cli.common import is_sweep, over_configs, verb_parser
from clusterrun.errors import ConfigError

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "plan",
        "Show what would be submitted, and submit nothing.",
        "clusterrun plan +cluster=a100_nvswitch train=ddp_linear",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="predictions side by side: --compare cluster=a100_pcie,a100_nvswitch",
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="what nvidia-smi topo -m printed on a node: advice also on which GPUs and NICs to use",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.compare:
        return _compare(overrides, as_json=options.json)
    if is_sweep(overrides):
        from clusterrun.cli.sweeping import show_plan

        return show_plan(overrides, options.json)

    def show(config: RunConfig) -> int:
        from clusterrun.launch.plan import plan_next
        from clusterrun.report.plan_view import plan_text

        plan = plan_next(config).as_json()
        if options.topology:
            _add_placing(plan, config, options.topology)
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(json.dumps(plan, indent=1) if options.json else plan_text(plan, bold=bold))
        return 0

    return over_configs(overrides, show)


def _add_placing(plan: dict[str, Any], config: RunConfig, file: str) -> None:
    """Advice that needs to know how a node is wired, GPU by GPU."""
    from dataclasses import asdict

    from clusterrun.config.user_dirs import user_config_dirs
    from clusterrun.cost.catalog import Catalog
    from clusterrun.nccl.placing import placing
    from clusterrun.topology.command import load

    found = placing(load(file)[0], config, Catalog(user_config_dirs()), {**os.environ, **config.cluster.env})
    prediction = plan["prediction"]
    if prediction is None or prediction["why_not"]:
        raise ConfigError(f"plan --topology {file}: nothing can be predicted, so there is no advice either")
    both = [*prediction["advice"], *map(asdict, found)]
    prediction["advice"] = sorted(both, key=lambda a: (not a["to_fit"], -a["speedup"]))


def _compare(overrides: list[str], *, as_json: bool) -> int:
    """One prediction per cluster that ``cluster=a,b,c`` names."""
    from dataclasses import asdict

    from clusterrun.config.compose import compose
    from clusterrun.config.user_dirs import user_config_dirs
    from clusterrun.cost.catalog import Catalog
    from clusterrun.cost.prediction import predict
    from clusterrun.report.plan_view import compare_text

    named = [o for o in overrides if o.lstrip("+").startswith("cluster=")]
    if len(named) != 1:
        raise ConfigError("plan --compare: give the clusters as one argument, e.g. cluster=a100_pcie,a100_nvswitch")
    rest, catalog = [o for o in overrides if o not in named], Catalog(user_config_dirs())
    found = {}
    for name in filter(None, named[0].partition("=")[2].split(",")):
        config = compose([f"cluster={name}", *rest])
        found[name] = (config.world_size, predict(config, catalog, {**os.environ, **config.cluster.env}))
    if as_json:
        print(json.dumps({name: {"world_size": size, **asdict(p)} for name, (size, p) in found.items()}, indent=1))
    else:
        print(compare_text({name: (size, asdict(p)) for name, (size, p) in found.items()}))
    return 0
