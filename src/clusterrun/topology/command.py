"""``clusterrun topo [FILE|-] [--json] [--record F]``: this machine, a pasted file, or a recorded snapshot."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterrun.errors import ExitCode
from clusterrun.topology import snapshot
from clusterrun.topology.document import document
from clusterrun.topology.model import Topology, TopologyError
from clusterrun.topology.node import NVML_TIMEOUT_S, read_node
from clusterrun.topology.normalize import decode
from clusterrun.topology.text import parse_topologies

Show = Callable[[Sequence[Topology]], None]
Plot = Callable[[Sequence[Topology], Path], None]


def build_parser() -> argparse.ArgumentParser:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="clusterrun topo",
        description="Show how the GPUs and NICs of a machine are wired, and what that means for training.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        help="a pasted `nvidia-smi topo -m`, or a file of --record; - reads standard input; none: this machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", metavar="FILE", type=Path, help="also write a snapshot that can be read back")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw a heat map, .png or .svg (extra: plots)")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=NVML_TIMEOUT_S, help="seconds to wait for NVML (%(default)g)"
    )
    return parser


def load(path: str) -> list[Topology]:
    """Topologies of a file (or "-"): a snapshot or pasted text, told apart by their content.

    Raises:
        TopologyError: the file can't be read, or holds no topology.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise TopologyError(f"{path}: {error.strerror or error}") from None
    text = decode(data)
    try:
        return snapshot.loads(text) if snapshot.is_snapshot(text) else parse_topologies(text)
    except TopologyError as error:
        raise TopologyError(f"{'standard input' if path == '-' else path}: {error}") from None


def main(argv: Sequence[str], *, show: Show, plot: Plot) -> int:
    """Run the command; ``show`` prints the machines for people, ``plot`` draws them (clusterrun.report).

    Returns:
        0, or 2 with one line on standard error when the input is not a topology.
    """
    options = build_parser().parse_args(list(argv))
    try:
        machines = load(options.file) if options.file else [read_node(timeout_s=options.timeout)]
        if options.record:
            _write(options.record, snapshot.dumps(machines))
        if options.plot:
            plot(machines, options.plot)
    except TopologyError as error:
        sys.stderr.write(f"clusterrun topo: {error}\n")
        return int(error.exit_code)
    if options.json:
        sys.stdout.write(json.dumps(document(machines), indent=1) + "\n")
    else:
        show(machines)
    return int(ExitCode.DONE)


def _write(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise TopologyError(f"{path}: can't be written: {error.strerror or error}") from None
