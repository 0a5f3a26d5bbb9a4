"""The worker of ``bench.tool=nccl-tests``: runs <collective>_perf over the GPUs of one node, and reads what it prints.

python -m clusterrun.measure.perf --run-dir DIR --attempt N

One process drives all GPUs of its node, so no MPI is needed, and nothing is measured between nodes. Its table goes to
standard output (the rank's log), its rows to the events, as those of ``measure.worker`` do. Torch-free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from pathlib import Path

from clusterrun import process
from clusterrun.config import frozen
from clusterrun.config.schema import RunConfig
from clusterrun.errors import ClusterrunError, CommandError, ConfigError
from clusterrun.measure import collectives, groups, nccl_tests
from clusterrun.measure.results import MEASURED, Row
from clusterrun.rundir import RunDir
from clusterrun.train.events import EventLog

# nccl-tests' own names.
_PROGRAMS = {"all_to_all": "alltoall_perf"}
_READ_AS = {"all_to_all": "alltoall"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    run = RunDir.open(args.run_dir)
    config = frozen.load(run.config)
    place, node = int(os.environ["RANK"]), os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    per_node = config.cluster.nproc_per_node
    ranks = tuple(range(place * per_node, (place + 1) * per_node))
    events = EventLog(run.attempt(args.attempt).event_file(node, place), place)
    events.write("start", node=node, ranks=ranks, device="nccl-tests")
    try:
        for row in measure(config, ranks):
            events.write(MEASURED, **row.as_json())
    except ClusterrunError as error:
        events.error(error)
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def measure(config: RunConfig, ranks: tuple[int, ...]) -> list[Row]:
    """Run it and read it.

    Raises:
        ConfigError: the program is not on this node.
        ClusterrunError: it failed, or printed no table that can be trusted.
    """
    bench, name = config.bench, config.bench.collective
    program = _PROGRAMS.get(name, f"{name}_perf")
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"{program}: not in PATH on this node; install nccl-tests there, or use bench.tool=torch")
    sizes = collectives.sizes(bench.sizes or collectives.default_sizes(config.cluster.accelerator))
    argv = [found, "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-g", str(len(ranks))]
    argv += ["-w", str(bench.warmup), "-n", str(bench.iterations), "-c", str(int(bench.check))]
    try:
        said = process.run(argv, timeout_s=bench.timeout_s)
    except CommandError as error:
        print(error.output, flush=True)
        raise
    print(said, flush=True)
    table = nccl_tests.read(said, _READ_AS.get(name, name))[0]
    if table.status is not nccl_tests.Status.OK:
        notes = f": {'; '.join(table.notes)}" if table.notes else ""
        raise ClusterrunError(f"{program}: its table is {table.status.value.replace('_', ' ')}{notes}; see the log")
    if table.ranks is not None and table.ranks != len(ranks):
        raise ClusterrunError(f"{program}: measured {table.ranks} GPUs, {len(ranks)} were asked for")
    return [
        Row(
            groups.IN_NODE,
            ranks,
            name,
            row.size,
            row.out_of_place.time_us / 1e6,
            row.out_of_place.time_us / 1e6,
            bench.iterations,
            None if row.out_of_place.wrong is None else int(row.out_of_place.wrong),
        )
        for row in table.rows
        if row.out_of_place.time_us > 0
    ]


if __name__ == "__main__":
    raise SystemExit(main())
