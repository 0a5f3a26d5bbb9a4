"""The worker of ``clusterrun bench``, which torchrun starts.

python -m clusterrun.measure.worker --run-dir DIR --attempt N

Writes one event per row (``train.events``), in the file of the first rank of each group.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args()
    code = _bench(args.run_dir, args.attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch 2.13 with Gloo may abort in an ordinary exit


def _bench(directory: Path, attempt: int) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    from clusterrun.config import frozen
    from clusterrun.errors import ClusterrunError
    from clusterrun.measure import collectives, groups, ranks
    from clusterrun.measure.results import MEASURED
    from clusterrun.measure.timing import Settings
    from clusterrun.rundir import RunDir
    from clusterrun.train.events import EventLog

    run = RunDir.open(directory)
    config = frozen.load(run.config)
    bench, cluster = config.bench, config.cluster
    node = os.environ.get("CLUSTERRUN_NODE") or socket.gethostname()
    events = EventLog(run.attempt(attempt).event_file(node, int(os.environ["RANK"])), int(os.environ["RANK"]))

    def go() -> None:
        device = ranks.join(cluster.accelerator, bench.timeout_s)
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        world = dist.get_world_size()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        events.write("start", node=node, world_size=world, per_node=per_node, device=name, torch=torch.__version__)
        ranks.go_through(
            groups.bench_phases(bench.groups, world // per_node, per_node),
            collectives.names(bench.collective),
            collectives.sizes(bench.sizes or collectives.default_sizes(cluster.accelerator)),
            Settings(bench.warmup, bench.iterations, bench.seconds_per_size, bench.check),
            device,
            begin=lambda what, number, members: None,
            emit=lambda row: events.write(MEASURED, **row.as_json()),
        )
        dist.destroy_process_group()

    try:
        record(go)()
    except Exception as error:
        events.error(error)
        if isinstance(error, ClusterrunError):
            print(f"error: {error}", file=sys.stderr)
            return int(error.exit_code)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
