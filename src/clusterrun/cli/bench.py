"""``clusterrun bench``: measure what the wiring of a cluster does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clusterrun.cli.common import over_configs, verb_parser
from clusterrun.cli.following import wait_quietly
from clusterrun.errors import ConfigError

if TYPE_CHECKING:
    from clusterrun.config.schema import RunConfig

# What people type often may go without "bench.".
_SHORT = ("collective", "sizes", "groups", "tool")


def main(argv: list[str]) -> int:
    parser = verb_parser(
        "bench",
        "Measure collectives over the nodes of a cluster, as a job: all ranks, in each node, between nodes, and\n"
        "with groups=pairs each pair of a node. Bandwidths as nccl-tests defines them, results checked, latency and\n"
        "rate fitted.",
        "clusterrun bench +cluster=a100_nvswitch collective=all_reduce sizes=1M-1G",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw it, .png or .svg (extra: plots)")
    parser.add_argument(
        "--read",
        metavar="FILE",
        help="read a table of nccl-tests instead (- is standard input) and compare it with what its hardware should "
        "give; collective=NAME expects another, cluster=NAME says what the hardware is",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.read is not None:
        return _read(options.read, overrides, as_json=options.json)

    def bench(config: RunConfig) -> int:
        from rich.console import Console

        from clusterrun.launch.submit import submit
        from clusterrun.report import bench_plot, bench_view
        from clusterrun.report.bench_expected import Expected

        if options.plot:
            bench_plot.check(options.plot)
        submitted = submit(config)
        code = wait_quietly(submitted)
        measured, expected = bench_view.read(submitted.run), Expected(submitted.config.cluster)
        if options.plot and measured.rows:
            bench_plot.write_plot(measured, expected, options.plot)
        if options.json:
            print(json.dumps(bench_view.as_json(measured, expected), indent=1))
        else:
            bench_view.show(measured, Console(highlight=False), expected)
        if code:
            print(f"clusterrun: {measured.run_id}: {measured.ending}: {measured.message}", file=sys.stderr)
        return code

    return over_configs([*(_in_full(a) for a in overrides), "action=bench"], bench)


def _read(path: str, rest: list[str], *, as_json: bool) -> int:
    """Someone's table: what it is, whether its figures may be used, and what the hardware should give."""
    from rich.console import Console

    from clusterrun.config.compose import compose
    from clusterrun.config.user_dirs import user_config_dirs
    from clusterrun.cost.catalog import Catalog
    from clusterrun.measure import nccl_tests
    from clusterrun.report import nccl_view
    from clusterrun.report.nccl_expected import expectation

    collective, overrides = "all_reduce", []
    for argument in rest:
        key, _, value = argument.partition("=")
        if not value or argument.startswith("-"):
            raise ConfigError(
                f"bench --read: {argument}: takes one FILE, collective=NAME, and cluster=NAME to compare with"
            )
        if key == "collective":
            collective = value
        else:
            overrides.append(argument)
    cluster = compose(overrides).cluster if overrides else None
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a file that nccl-tests printed, or -") from None
    tables = nccl_tests.read(data.decode("utf-8", errors="replace"), collective)
    catalog = Catalog(user_config_dirs())
    expected = [expectation(table, cluster, catalog) for table in tables]
    if as_json:
        found = [
            {**table.as_json(), "expected_busbw": e.busbw, "share_of_expected": e.share}
            for table, e in zip(tables, expected, strict=True)
        ]
        print(json.dumps({"tables": found}, indent=1))
    else:
        nccl_view.show(tables, expected, Console(highlight=False))
    return 0


def _in_full(argument: str) -> str:
    """``sizes=1M,4M`` is ``bench.sizes=[1M,4M]``."""
    key, equals, value = argument.partition("=")
    if not equals or key not in _SHORT:
        return argument
    if key in ("sizes", "groups") and not re.match(r"[\[\"']", value):
        value = f"[{value}]"
    return f"bench.{key}={value}"
