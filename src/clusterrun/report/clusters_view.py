"""The clusters one can choose, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterrun.report.status_view import print_whole


def show(clusters: Sequence[Mapping[str, Any]], console: Console) -> None:
    """``clusters`` as ``KnownCluster.as_json()`` gives them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("cluster", "runs on", "nodes x GPUs", "in a node", "between nodes", "from", "what it is"):
        table.add_column(column, no_wrap=True)
    for one in clusters:
        size = f"{_or_dash(one['nodes'])} x {_or_dash(one['gpus_per_node'])}"
        place = one["place"] + (f" (before {one['shadows']})" if one["shadows"] else "")
        cells = [one["name"], _or_dash(one["executor"]), size, _or_dash(one["intra_node"]), _or_dash(one["inter_node"])]
        table.add_row(*map(Text, map(str, [*cells, place, one["problem"] or one["description"]])))
    print_whole(table, console)


def _or_dash(value: object) -> object:
    return "-" if value is None else value
