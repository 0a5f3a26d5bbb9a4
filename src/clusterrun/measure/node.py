"""Runs on every node as a step of preflight=full: starts this node's ranks and reports what they measured. Torch-free.

python -m clusterrun.measure.node --work JSON --head ADDRESS [--interface IF]

Every rank is a process that is killed when a part of its work takes longer than ``timeout_s``: a GPU or a link that
hangs becomes a finding with a name. In a node by itself the phases after the one that hung are then tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from clusterrun import frames, network, process
from clusterrun.measure.groups import work_phases
from clusterrun.measure.results import IMPORT, MEASURED, WAIT, DeviceResult, Job, NodeMeasured, Row, Stuck, Work

_MOST_HANGS = 3  # in a node by itself; each costs timeout_s
_PORTS = 3
_END_S = 5.0  # from the end of a process's output to its own
# Who waits for another rank gives it time to be found out, and killed, by its own node first.
_WAIT_SHARE, _WAIT_MORE_S = 1.5, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True)
    parser.add_argument("--head", required=True, help="an address of the conductor's host")
    parser.add_argument("--interface")
    args = parser.parse_args()
    node = os.environ.get("CLUSTERRUN_NODE") or os.environ["SLURMD_NODENAME"]
    if "CLUSTERRUN_LOCAL_STEP" in os.environ:
        process.signal_when_parent_dies(signal.SIGKILL)
    address = network.own_address(args.head, args.interface)
    measured = measure_node(node, Work.from_argument(args.work), address)
    sys.stdout.write(frames.encode(MEASURED, node, measured.as_json()))
    sys.stdout.flush()
    return 0


def measure_node(node: str, work: Work, address: str) -> NodeMeasured:
    """This node's part of the work."""
    key = f"{node}/{os.getpid()}"
    job = next((job for job in work.jobs if node in job.nodes), None)
    if work.jobs and job is None:
        return NodeMeasured(node)
    devices: dict[int, DeviceResult] = {}
    rows: list[Row] = []
    stuck: list[Stuck] = []
    first = 0
    while True:
        meet = job or Job((node,), f"127.0.0.1:{network.free_port('127.0.0.1', f'{key}/{first}')}", os.urandom(8).hex())
        ranks = Ranks(node, work, meet, address, first)
        ranks.run()
        devices.update(ranks.devices)
        rows += ranks.rows
        stuck += ranks.stuck
        hung = [one for one in ranks.stuck if one.what != WAIT]
        first = max((rank.number for rank in ranks.ranks if rank.stuck), default=-1) + 1
        again = job is None and hung and hung[0].ranks and first < len(work_phases(work.kind, 1, work.per_node))
        if not again or len([one for one in stuck if one.what != WAIT]) >= _MOST_HANGS:
            break
    ports = [network.free_port(address, f"{key}/port {i}") for i in range(_PORTS)]
    in_order = tuple(device for _, device in sorted(devices.items()))
    return NodeMeasured(node, in_order, tuple(rows), tuple(stuck), tuple(port for port in ports if port))


@dataclass
class Rank:
    """One process, and what it said last."""

    local: int
    process: subprocess.Popen[bytes]
    what: str = IMPORT
    number: int = -1
    ranks: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)
    error: str = ""
    stuck: bool = False
    ended: bool = False
    rest: bytes = b""

    @property
    def group(self) -> tuple[Any, ...]:
        """What it does together with others; ranks of the same group are stuck together."""
        return (self.what, self.number, self.ranks) if self.ranks else (self.what, self.local)


class Ranks:
    """All ranks of this node in one job, from start to end."""

    def __init__(self, node: str, work: Work, job: Job, address: str, first: int) -> None:
        self.timeout_s = work.timeout_s
        self.devices: dict[int, DeviceResult] = {}
        self.rows: list[Row] = []
        self.stuck: list[Stuck] = []
        place = job.nodes.index(node)
        argument = replace(work, jobs=())
        argv = [sys.executable, "-m", "clusterrun.measure.probe", argument.to_argument(), str(first)]
        self.ranks = []
        for local in range(work.per_node):
            env = {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                **(network.socket_environment(address) if len(job.nodes) > 1 else {}),
                **os.environ,
                "RANK": str(place * work.per_node + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(len(job.nodes) * work.per_node),
                "NCCL_DEBUG": "WARN",  # more of it would mix with what the ranks say
                "CLUSTERRUN_MEET_AT": job.endpoint,
                "CLUSTERRUN_MEET_TOKEN": job.token,
            }
            started = process.start(argv, env=env, stdout=subprocess.PIPE, stderr=sys.stderr.fileno())
            self.ranks.append(Rank(local, started))

    def run(self) -> None:
        """Until all have ended, one has died, or one has been at the same thing for too long."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                assert rank.process.stdout is not None
                os.set_blocking(rank.process.stdout.fileno(), False)
                selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._judge():
                for key, _ in selector.select(timeout=0.2):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            key.data.process.wait(timeout=_END_S)
        if not self.stuck:
            self._judge()
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            assert rank.process.stdout is not None
            rank.process.stdout.close()

    def _read(self, rank: Rank) -> bool:
        """Take in what a rank said. False at the end of its output."""
        assert rank.process.stdout is not None
        data = os.read(rank.process.stdout.fileno(), 1 << 16)
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # whatever else prints there
                self._take(rank, json.loads(line))
        rank.ended = not data
        return bool(data)

    def _take(self, rank: Rank, said: dict[str, Any]) -> None:
        if "doing" in said:
            rank.what, rank.number, rank.ranks = said["doing"], said["number"], tuple(said["ranks"])
            rank.since = time.monotonic()
        elif "device" in said:
            self.devices[rank.local] = DeviceResult(**said["device"])
        elif "row" in said:
            self.rows.append(Row.from_json(said["row"]))
        elif "error" in said:
            rank.error = said["error"]

    def _judge(self) -> bool:
        """Whether this is over: a rank died, or hangs. Those that merely wait for it are no news."""
        now, timeout_s = time.monotonic(), self.timeout_s
        for rank in self.ranks:
            limit = timeout_s * _WAIT_SHARE + _WAIT_MORE_S if rank.what == WAIT else timeout_s
            rank.stuck = (rank.ended and _died(rank)) or (not rank.ended and now - rank.since > limit)
        if not any(rank.stuck for rank in self.ranks):
            return False
        culprits = [rank for rank in self.ranks if rank.stuck and rank.what != WAIT]
        for rank in self.ranks:  # its group is stuck with it, whoever was found first
            rank.stuck |= any(rank.group == culprit.group for culprit in culprits)
        for group in dict.fromkeys(rank.group for rank in self.ranks if rank.stuck):
            one = next((r for r in self.ranks if r.group == group and _died(r)), None)
            one = one or next(rank for rank in self.ranks if rank.group == group)
            self.stuck.append(Stuck(one.what, one.local, one.ranks, self._why(one)))
        return True

    def _why(self, rank: Rank) -> str:
        code = rank.process.poll()
        if rank.error:
            return rank.error
        if code is None:
            return f"no answer in {self.timeout_s:g} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _died(rank: Rank) -> bool:
    return rank.process.poll() not in (None, 0)


if __name__ == "__main__":
    raise SystemExit(main())
