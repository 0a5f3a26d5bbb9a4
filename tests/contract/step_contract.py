"""What every step runner promises (clusterrun.launch.steps), as functions that fail with an AssertionError.

pytest calls them for the local runner. For Slurm this file is the batch script of a job, so that they run where the
conductor does, on the job's first node:

    sbatch -N3 step_contract.py <file for the results>
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from clusterrun import frames
from clusterrun.config.schema import ClusterConfig
from clusterrun.errors import CommandError
from clusterrun.launch.slurm_steps import SlurmSteps
from clusterrun.launch.steps import Step, StepRunner, StepSpec

CLUSTER = ClusterConfig(nodes=3, nproc_per_node=2)
PATIENCE_S = 30.0

# Every task knows who it is, the way the agent and the probe find out, and says each line in one write of less than
# 1,024 bytes: that much stays whole when tasks share an output, and the frames rely on it.
WHO = """
import os, signal, subprocess, sys, time
from clusterrun import frames
from clusterrun.preflight.probe import node_name
node, index = node_name(), int(os.environ.get("CLUSTERRUN_NODE_INDEX") or os.environ["SLURM_NODEID"])
def say(*words, to=sys.stdout):
    to.write(" ".join(map(str, words)) + "\\n")
    to.flush()
"""


class Place:
    """A runner, and files for the output of one step."""

    def __init__(self, runner: StepRunner, directory: Path) -> None:
        self.runner = runner
        self.out, self.err = directory / "out", directory / "err"

    def start(self, program: str, nodes: Sequence[str] | None = None, env: dict[str, str] | None = None) -> Step:
        argv = [sys.executable, "-c", WHO + program]
        chosen = self.runner.nodes() if nodes is None else nodes
        return self.runner.start(StepSpec("contract", chosen, argv, self.out, self.err, env or {}))

    def run(self, program: str, nodes: Sequence[str] | None = None, env: dict[str, str] | None = None) -> int:
        return self.end_of(self.start(program, nodes, env))

    def end_of(self, step: Step) -> int:
        try:
            wait_for("the end of the step", lambda: step.poll() is not None)
        except AssertionError:
            step.kill()
            raise AssertionError(f"no end; it said: {self.out.read_text()} {self.err.read_text()}") from None
        code = step.poll()
        assert code is not None
        return code

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def wait_for_lines(self, count: int) -> None:
        wait_for(f"{count} lines of output", lambda: len(self.lines()) >= count)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def nodes_are_listed_in_order(place: Place) -> None:
    nodes = place.runner.nodes()
    assert len(nodes) == 3
    assert nodes == sorted(set(nodes))
    assert place.runner.nodes() == nodes


def output_of_all_tasks_arrives(place: Place) -> None:
    code = place.run("for i in range(40): say(node, i, 'o' * 900); say(node, i, 'e', to=sys.stderr)")
    assert code == 0
    expected = [(node, str(i)) for node in place.runner.nodes() for i in range(40)]
    assert sorted(tuple(line.split()[:2]) for line in place.lines()) == sorted(expected)
    assert all(line.endswith(" " + "o" * 900) for line in place.lines())
    errors = [line.split() for line in place.err.read_text().splitlines()]
    assert sorted((line[0], line[1]) for line in errors if line[-1] == "e") == sorted(expected)


def output_is_there_before_the_end(place: Place) -> None:
    """The conductor reads reports while srun still runs."""
    step = place.start("say(node); time.sleep(600)")
    place.wait_for_lines(3)
    assert step.poll() is None
    step.kill()


def output_is_appended(place: Place) -> None:
    for word in ("one", "two"):
        assert place.run(f"say('{word}')") == 0
    assert place.lines() == ["one"] * 3 + ["two"] * 3


def long_messages_arrive_whole(place: Place) -> None:
    assert place.run("sys.stdout.write(frames.encode('k', node, [index, node * 5000]))") == 0
    nodes = place.runner.nodes()
    assert frames.decode("k", place.lines()) == {node: [i, node * 5000] for i, node in enumerate(nodes)}


def tasks_know_their_node_and_place(place: Place) -> None:
    nodes = place.runner.nodes()
    for chosen in (nodes, nodes[1:], [nodes[0], nodes[2]], [nodes[2]]):
        place.out.unlink(missing_ok=True)
        assert place.run("say(index, node)", chosen) == 0
        assert sorted(place.lines()) == [f"{i} {node}" for i, node in enumerate(chosen)]


def tasks_get_the_environment(place: Place) -> None:
    os.environ["CONTRACT_OWN"] = "own"
    try:
        code = place.run("say(os.environ['CONTRACT_OWN'], os.environ['CONTRACT'])", env={"CONTRACT": "a, b='c'"})
    finally:
        del os.environ["CONTRACT_OWN"]
    assert code == 0
    assert place.lines() == ["own a, b='c'"] * 3


def the_conductors_host_can_be_reached(place: Place) -> None:
    address = place.runner.head_address()
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert place.run(f"import socket; socket.create_connection(('{address}', {port}), timeout=5)") == 0


def the_largest_exit_code_counts(place: Place) -> None:
    assert place.run("sys.exit(0)") == 0
    assert place.run("sys.exit(7 * (2 - index))") == 14
    assert place.run("sys.exit(75 if index == 1 else 0)") == 75


def a_task_killed_by_a_signal_counts_as_128_more(place: Place) -> None:
    assert place.run("os.kill(os.getpid(), signal.SIGKILL) if index == 2 else sys.exit(1)") == 128 + 9


def a_program_that_is_not_there_is_told(place: Place) -> None:
    spec = StepSpec("contract", place.runner.nodes(), ["/no/such/program"], place.out, place.err)
    try:
        step = place.runner.start(spec)
    except CommandError:
        return
    assert place.end_of(step) != 0


def a_stop_reaches_every_task(place: Place) -> None:
    """As SIGTERM or SIGUSR2, which the agent takes for the same. Asking again, and too late, does no harm."""
    step = place.start("""
stop = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: stop.append(number))
say("ready")
while not stop:
    time.sleep(0.02)
time.sleep(0.5)
say("saved", node)
""")
    place.wait_for_lines(3)
    assert step.poll() is None
    for _ in range(3):
        step.ask_to_stop()
        time.sleep(0.1)
    assert place.end_of(step) == 0
    assert sorted(place.lines()) == ["ready"] * 3 + [f"saved {node}" for node in place.runner.nodes()]
    step.ask_to_stop()
    step.kill()
    assert step.poll() == 0


def a_stop_may_come_at_any_moment(place: Place) -> None:
    """Also before the tasks have started; the step ends, or can be ended."""
    for delay_s in (0.0, 0.02, 0.1):
        step = place.start("time.sleep(600)")
        time.sleep(delay_s)
        step.ask_to_stop()
        step.ask_to_stop()
        step.kill()
        assert step.poll() is not None


STUBBORN = """
for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
say(os.getpid(), child.pid)
time.sleep(600)
"""


def kill_ends_everything(place: Place) -> None:
    """Also workers, which live in sessions of their own, and whoever ignores signals."""
    step = place.start(STUBBORN)
    place.wait_for_lines(3)
    pids = [int(pid) for line in place.lines() for pid in line.split()]
    assert len(pids) == 6
    assert all(is_running(pid) for pid in pids)
    step.kill()
    assert not [pid for pid in pids if is_running(pid)]
    code = step.poll()
    assert code not in (None, 0)
    step.kill()
    assert step.poll() == code


def kill_spares_other_steps(place: Place) -> None:
    nodes = place.runner.nodes()
    other = place.start("say(os.getpid()); time.sleep(600)", nodes[:1])
    place.wait_for_lines(1)
    pid = int(place.lines()[0])
    step = place.start("say('ready'); time.sleep(600)", nodes[1:])
    place.wait_for_lines(3)
    step.kill()
    assert is_running(pid)
    assert other.poll() is None
    other.kill()
    assert not is_running(pid)


CONTRACT: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (
        nodes_are_listed_in_order,
        output_of_all_tasks_arrives,
        output_is_there_before_the_end,
        output_is_appended,
        long_messages_arrive_whole,
        tasks_know_their_node_and_place,
        tasks_get_the_environment,
        the_conductors_host_can_be_reached,
        the_largest_exit_code_counts,
        a_task_killed_by_a_signal_counts_as_128_more,
        a_program_that_is_not_there_is_told,
        a_stop_reaches_every_task,
        a_stop_may_come_at_any_moment,
        kill_ends_everything,
        kill_spares_other_steps,
    )
}


def main(results: Path) -> None:
    """Inside a Slurm job: check everything, write one line for each."""
    for name, check in CONTRACT.items():
        begin, problem = time.monotonic(), ""
        with tempfile.TemporaryDirectory(prefix="contract-") as scratch:
            try:
                check(Place(SlurmSteps(CLUSTER, os.environ["SLURM_JOB_ID"]), Path(scratch)))
            except BaseException:  # whatever it was, the other checks are worth their results
                problem = traceback.format_exc()
        with results.open("a") as file:
            file.write(json.dumps({"check": name, "problem": problem, "seconds": time.monotonic() - begin}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
