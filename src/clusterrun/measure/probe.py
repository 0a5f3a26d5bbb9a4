"""One rank of a slow check, started and if need be killed by ``measure.node``. Says on standard output what it is at.

python -m clusterrun.measure.probe WORK FIRST    FIRST: number of the phase to begin with

Lines of JSON: {"doing", "number", "ranks"} before each part, {"device"} and {"row"} after it, {"error"} at a bad end.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from clusterrun import process
from clusterrun.measure.groups import work_phases
from clusterrun.measure.results import COPIES, IMPORT, PRODUCT, WAIT, DeviceResult, Row, Work


def main() -> NoReturn:
    process.signal_when_parent_dies(signal.SIGKILL)
    work, first = Work.from_argument(sys.argv[1]), int(sys.argv[2])
    code = 0
    try:
        _probe(work, first)
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300])
        code = 1
    sys.stderr.flush()
    os._exit(code)  # torch 2.13 with Gloo may abort in an ordinary exit


def _probe(work: Work, first: int) -> None:
    doing(IMPORT)
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from clusterrun.config.schema import Accelerator
    from clusterrun.measure import device as devices
    from clusterrun.measure import ranks
    from clusterrun.measure.timing import Settings

    accelerator, local = Accelerator[work.accelerator], int(os.environ["LOCAL_RANK"])
    device = ranks.device_of(accelerator, local)
    if work.devices and not first:
        uuid = devices.uuid_of(device)
        doing(PRODUCT)
        found = devices.multiply(device, local)
        say(device=DeviceResult(local, uuid, **found).__dict__)
        doing(COPIES)
        found |= devices.copy(device, uuid)
        say(device=DeviceResult(local, uuid, **found).__dict__)
    world = int(os.environ["WORLD_SIZE"])
    phases = work_phases(work.kind, world // work.per_node, work.per_node)[first:]
    if not phases:
        return
    doing(WAIT)
    host, _, port = os.environ["CLUSTERRUN_MEET_AT"].rpartition(":")
    long = datetime.timedelta(days=1)  # who waits is ended by measure.node
    store = TCPStore(host, int(port), None, is_master=os.environ["RANK"] == "0", timeout=long)
    ranks.join(accelerator, long.total_seconds(), PrefixStore(os.environ["CLUSTERRUN_MEET_TOKEN"], store))
    ranks.go_through(
        phases,
        ["all_reduce"],
        [work.size],
        Settings(warmup=2, iterations=20, seconds=0.5, check=True),
        device,
        begin=lambda what, number, members: doing(what, number + first, members),
        emit=lambda row: _emit(row),
    )


def _emit(row: Row) -> None:
    say(row=row.as_json())


def doing(what: str, number: int = -1, ranks: tuple[int, ...] = ()) -> None:
    say(doing=what, number=number, ranks=ranks)


def say(**fields: Any) -> None:
    sys.stdout.write("\n" + json.dumps(fields) + "\n")  # a line of its own, whatever a library left there
    sys.stdout.flush()


if __name__ == "__main__":
    main()
