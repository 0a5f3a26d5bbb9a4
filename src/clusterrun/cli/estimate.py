"""``clusterrun estimate``: what a model that does not exist yet would cost on a cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterrun.cli.common import verb_parser
from clusterrun.errors import ConfigError

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig
    from clusterrun.cost.estimate import Estimate

SHORT = {"params": "train.parameters", "tokens": "train.tokens_per_sample", "batch": "train.batch_per_rank"}


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "estimate",
        "Predict a model's step, memory and time to train as DDP, FSDP and HSDP on a cluster. params= (7e9), tokens= "
        "of a sample (2048), batch= samples per GPU (1), total= tokens to train on; anything else is an override.",
        "clusterrun estimate params=7e9 total=1e12 cluster=h100_nvswitch_ib cluster.nodes=8",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    options, rest = parser.parse_known_args(argv)
    from clusterrun.config.compose import compose

    total, overrides = None, []
    for item in rest:
        key, _, value = item.partition("=")
        if key == "total":
            total = _number(item, value)
        elif key == "params":
            overrides.append(f"{SHORT[key]}={_number(item, value)!r}")
        else:
            overrides.append(f"{SHORT[key]}={value}" if key in SHORT else item)
    if not any(o.startswith("train.parameters=") for o in overrides):
        raise ConfigError("estimate: give the size of the model, e.g. params=7e9")
    given = {o.partition("=")[0] for o in overrides}
    usual = {
        "train.tokens_per_sample": "2048",
        "train.batch_per_rank": "1",
        "train.precision": "bf16",
        "train.optimizer": "adamw",
    }
    config = compose([*(f"{k}={v}" for k, v in usual.items() if k not in given), *overrides])
    from clusterrun.config.user_dirs import user_config_dirs
    from clusterrun.cost.catalog import Catalog
    from clusterrun.cost.estimate import estimate

    found = estimate(config, Catalog(user_config_dirs()), total)
    print(json.dumps([asdict(e) for e in found], indent=1) if options.json else _table(found, config, total))
    return 0


def _number(item: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{item}: must be a number above 0, e.g. 7e9")
    return number


def _table(found: list[Estimate], config: RunConfig, total: float | None) -> str:
    from clusterrun.report.units import duration_text

    cluster = config.cluster
    rows = [["", "step", "communication", "tokens/s", "state per GPU", "fits"]]
    for e in found:
        rows.append(
            [
                e.variant,
                duration_text(e.step_s),
                f"{100 * e.share:.0f}% of it",
                f"{e.tokens_per_s:,.0f}",
                f"{e.state_gb:.1f} GB",
                "no" if e.fits is False else "yes" if e.fits else "if activations do",
            ]
        )
        if total is not None and e.days is not None and e.mwh is not None:
            rows[-1] += [f"{e.days:.1f} days", f"{e.mwh:,.1f} MWh"]
    if total is not None:
        rows[0] += [f"{total:.3g} tokens", "energy"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{config.train.parameters:.3g} parameters on {cluster.nodes} x {cluster.nproc_per_node} {cluster.gpu_model}, "
        f"{config.train.precision.value}, {config.train.optimizer.value}, slowest link: {found[0].bottleneck}"
    ]
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))
    return "\n".join(lines)
