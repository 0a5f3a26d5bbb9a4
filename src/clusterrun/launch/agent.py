"""One torchrun agent per node: torchrun itself, told this node's address, log files, and what a signal means here.

    python -m clusterrun.launch.agent --run-dir DIR --attempt N [--interface IF] -- <torchrun arguments>

What it adds to plain torchrun:
- the rendezvous host is decided by the node's place in the step, never by comparing host names;
- one log file per rank, named by node and rank;
- SIGTERM and SIGUSR2 mean "save at the next step boundary": they are passed on to the workers and the agent lives on
  (plain torchrun would end the workers 30 s later, saved or not);
- it watches the workers' signs of life, and tells the conductor of hangs and of how fast each rank is (``lookout``);
- NCCL gets what only the node knows (``settle``), and each rank a file for its lines;
- at its end it prints one outcome frame that the conductor reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from clusterrun import frames, imports, network, process, pulse
from clusterrun.config import frozen
from clusterrun.config.grace import save_grace_s
from clusterrun.config.schema import Accelerator, RunConfig
from clusterrun.launch.lookout import Lookout, catches
from clusterrun.launch.outcome import FRAME, How, Outcome
from clusterrun.nccl.on_node import numa_mode, on_node
from clusterrun.preflight.probe import node_name
from clusterrun.preflight.report import NodeReport
from clusterrun.rundir import AttemptDir, RunDir
from clusterrun.topology.model import Topology

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# After a worker failed, how long its peers on the node get before SIGKILL, seconds. They can't save without it anyway.
_SHUTDOWN_TIMEOUT_S = 10
# A worker without a SIGTERM handler after this long has none, seconds; before, it is still starting.
_HANDLER_PATIENCE_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--interface")
    parser.add_argument("torchrun", nargs=argparse.REMAINDER, help="arguments for torchrun, after --")
    args = parser.parse_args()
    torchrun = args.torchrun[1:] if args.torchrun[:1] == ["--"] else args.torchrun

    stop = StopForwarder()
    stop.install()
    if "CLUSTERRUN_LOCAL_STEP" in os.environ:
        # torchrun ends its workers on SIGINT; on a laptop nobody else would clean up after a killed conductor.
        process.signal_when_parent_dies(signal.SIGINT)
    node = node_name()
    with tempfile.TemporaryDirectory(prefix="clusterrun-") as scratch:
        stopped_file = Path(scratch) / "stopped"
        os.environ["CLUSTERRUN_NODE"] = node
        os.environ["CLUSTERRUN_STOPPED_FILE"] = str(stopped_file)
        stop.file = Path(scratch) / "stop"
        os.environ["CLUSTERRUN_STOP_FILE"] = str(stop.file)
        os.environ["CLUSTERRUN_RUN_DIR"] = str(args.run_dir)
        os.environ["CLUSTERRUN_ATTEMPT"] = str(args.attempt)
        run_dir = RunDir(args.run_dir)
        config = frozen.load(run_dir.config)
        os.environ["CLUSTERRUN_GRACE_S"] = f"{save_grace_s(config):g}"
        pulses = Path(scratch) / "pulse"
        pulses.mkdir()
        os.environ[pulse.DIRECTORY] = str(pulses)
        lookout = Lookout(pulses, node, _nodes(torchrun), config)
        lookout.start()
        for line in settle(config, run_dir.attempt(args.attempt), node):
            print(f"{node}: {line}", flush=True)
        outcome = run(torchrun, run_dir.attempt(args.attempt), args.interface, stop, config)
        outcome = dataclasses.replace(outcome, step=lookout.step())
        if stop.requested and outcome.how is not How.port_taken:
            # Workers that have no handler die of the signal; that is a stop, not a failure.
            saved = stopped_file.exists()
            if saved or outcome.how is not How.done:
                outcome = Outcome(How.stopped, saved=saved, message=outcome.message, step=outcome.step)
    sys.stdout.write(frames.encode(FRAME, node, outcome.as_json()))
    sys.stdout.flush()
    return {How.done: 0, How.stopped: 75}.get(outcome.how, 1)


def settle(config: RunConfig, attempt: AttemptDir, node: str) -> list[str]:
    """Set what only this node can know, from what preflight detected. What is set already wins. Says what and why."""
    if config.cluster.accelerator is not Accelerator.cuda:
        return []
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(attempt.flight_prefix(node)))
    said = []
    for one in on_node(config, detected(attempt, node), os.environ):
        if one.value is not None:
            os.environ[one.name] = one.value
        said.append(f"{one.name}{'' if one.value is None else '=' + one.value}: {one.reason}")
    return said


def detected(attempt: AttemptDir, node: str) -> Topology | None:
    """The topology that this node's preflight reported; None when it can't be read back."""
    try:
        report = json.loads(attempt.report(node).read_text())["report"]
        facts = NodeReport.from_json(report).gpus
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if facts is None else facts.wiring


def numa_binding(config: RunConfig, attempt: AttemptDir, torch_can: bool) -> str | None:
    """What to give torchrun's --numa-binding on this node."""
    found = detected(attempt, node_name())
    near = [gpu.cpu_affinity for gpu in found.gpus] if found else []
    mode, why = numa_mode(
        config,
        torch_can=torch_can,
        numactl=shutil.which("numactl") is not None,
        near_cpus=near,
        allowed=os.sched_getaffinity(0),
    )
    if config.cluster.accelerator is Accelerator.cuda:
        print(f"{node_name()}: --numa-binding{'' if mode is None else '=' + mode}: {why}", flush=True)
    return mode


def run(
    torchrun: Sequence[str], attempt: AttemptDir, interface: str | None, stop: StopForwarder, config: RunConfig
) -> Outcome:
    """torchrun to its end, in this process."""
    with imports.uncollected():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.launcher.api import elastic_launch
        from torch.distributed.run import config_from_args, parse_args

        from clusterrun.launch.rank_logs import RankLogs

    args = parse_args(list(torchrun))
    host, _, port = args.rdzv_endpoint.rpartition(":")
    index = int(os.environ.get("CLUSTERRUN_NODE_INDEX") or os.environ["SLURM_NODEID"])
    if index == 0 and not network.is_free(host, int(port)):
        return Outcome(How.port_taken, message=f"port {port} on {host} was free at preflight and is taken now")
    address = network.own_address(host, interface)
    for name, value in network.socket_environment(address).items():
        os.environ.setdefault(name, value)  # what the user set wins
    args.local_addr = address
    args.rdzv_conf = f"is_host={int(index == 0)}," + args.rdzv_conf
    if args.max_restarts:
        # torch 2.13 keeps one store for all rounds of a rendezvous, without a prefix: workers that were started again
        # find the addresses of those before, and Gloo is refused. With this each round gets a store of its own.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if mode := numa_binding(config, attempt, torch_can=hasattr(args, "numa_binding")):
        args.numa_binding = mode
    launch, command, command_args = config_from_args(args)
    launch.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    launch.shutdown_timeout = _SHUTDOWN_TIMEOUT_S
    nccl = config.cluster.accelerator is Accelerator.cuda and "NCCL_DEBUG_FILE" not in os.environ
    launch.logs_specs = RankLogs(attempt, node_name(), stop, nccl=nccl)
    try:
        elastic_launch(launch, command)(*command_args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        died = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        return Outcome(
            How.crashed if died else How.failed,
            rank=int(rank),
            exit_code=int(failure.exitcode),
            message=f"killed by {failure.signal_name()}" if died else _message(failure, attempt, int(rank)),
            time=float(failure.timestamp),
        )
    except RendezvousError as error:
        return Outcome(How.no_rendezvous, message=f"{type(error).__name__}: {error}", time=time.time())
    except StoppedBeforeStartError:
        return Outcome(How.stopped, message="told to stop before the workers started")
    return Outcome(How.done)


def _nodes(torchrun: Sequence[str]) -> int:
    return next((int(a.partition("=")[2]) for a in torchrun if a.startswith("--nnodes=")), 1)


class StoppedBeforeStartError(Exception):
    """Raised instead of starting workers once a stop was asked for."""


class StopForwarder:
    """Passes a stop on to the workers, as SIGTERM, once they are able to take it; and by a file."""

    def __init__(self) -> None:
        self.requested = False
        self.file: Path | None = None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR2, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            threading.Thread(target=self._forward, name="stop-forwarder", daemon=True).start()

    def _forward(self) -> None:
        if self.file is not None:
            self.file.touch()
        told: set[int] = set()
        begin = time.monotonic()
        while True:
            for pid in _children():
                patient = time.monotonic() - begin < _HANDLER_PATIENCE_S
                if pid not in told and (catches(pid, signal.SIGTERM) or not patient):
                    told.add(pid)
                    try:
                        os.kill(pid, signal.SIGTERM)
                    except ProcessLookupError:
                        continue
            time.sleep(0.1)


def _children() -> list[int]:
    own = str(os.getpid())
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own:
            found.append(int(stat.parent.name))
    return found


def _message(failure: ProcessFailure, attempt: AttemptDir, rank: int) -> str:
    """One line of what a failed worker said: from its error file, else the last line of its standard error."""
    said: object = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    while isinstance(said, dict):
        said = said.get("message")
    if not said or said == "<NONE>":  # torch's word for "no error file"
        logs = sorted(attempt.logs.glob(f"{node_name()}.{rank}*.err"), key=lambda path: path.stat().st_mtime)
        said = logs[-1].read_text(errors="replace").strip().rpartition("\n")[2] if logs else ""
    return str(said).strip().partition("\n")[0][:500]


if __name__ == "__main__":
    raise SystemExit(main())
