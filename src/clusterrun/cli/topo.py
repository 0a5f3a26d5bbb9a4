"""``clusterrun topo``: the wiring of this machine, or of a pasted or recorded one."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    from clusterrun.report.topology_table import main as topology_command

    return topology_command(argv)
