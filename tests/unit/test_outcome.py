"""What the conductor makes of all agents' words together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.launch.outcome import How, Outcome, judge, of_the_machinery, signature

NODES = ("c1", "c2", "c3")
DONE = Outcome(How.done)
SAVED = Outcome(How.stopped, saved=True)
UNSAVED = Outcome(How.stopped, saved=False)

outcomes = st.builds(
    Outcome,
    how=st.sampled_from(How),
    saved=st.booleans(),
    rank=st.none() | st.integers(0, 99),
    exit_code=st.none() | st.integers(-64, 255),
    message=st.text(max_size=20),
    time=st.floats(0, 2e9),
)


def failed(at: float, rank: int = 0) -> Outcome:
    return Outcome(How.failed, rank=rank, exit_code=1, message="boom", time=at)


def crashed(at: float = 1.0) -> Outcome:
    return Outcome(How.crashed, rank=2, exit_code=-11, message="killed by SIGSEGV", time=at)


@given(outcomes)
def test_json_round_trip(outcome: Outcome) -> None:
    assert Outcome.from_json(outcome.as_json()) == outcome


def test_done() -> None:
    end = judge(NODES, dict.fromkeys(NODES, DONE))
    assert (end.how, end.lost) == (How.done, ())


def test_the_earliest_exception_is_the_cause() -> None:
    """When one worker raises, its peers follow with errors about closed connections."""
    end = judge(NODES, {"c1": failed(12.0), "c2": failed(11.0, rank=5), "c3": failed(13.0)})
    assert (end.how, end.node) == (How.failed, "c2")
    assert end.outcome is not None
    assert end.outcome.rank == 5


def test_a_worker_killed_by_a_signal_outweighs_exceptions() -> None:
    end = judge(NODES, {"c1": failed(1.0), "c2": crashed(2.0), "c3": failed(0.5)})
    assert (end.how, end.node) == (How.crashed, "c2")


def test_the_first_to_die_of_a_signal_is_the_cause() -> None:
    end = judge(NODES, {"c1": crashed(3.0), "c2": crashed(2.0), "c3": DONE})
    assert end.node == "c2"


def test_a_node_without_a_word_outweighs_exceptions() -> None:
    end = judge(NODES, {"c1": failed(1.0), "c3": failed(2.0)})
    assert (end.how, end.node, end.lost) == (How.crashed, None, ("c2",))


def test_a_signal_and_a_lost_node_are_both_told() -> None:
    end = judge(NODES, {"c1": crashed(), "c3": failed(2.0)})
    assert (end.how, end.node, end.lost) == (How.crashed, "c1", ("c2",))


def test_all_nodes_lost() -> None:
    assert judge(NODES, {}).lost == NODES


def test_an_exception_outweighs_a_rendezvous_that_then_failed() -> None:
    late = Outcome(How.no_rendezvous, message="timed out", time=1.0)
    end = judge(NODES, {"c1": late, "c2": failed(9.0), "c3": late})
    assert (end.how, end.node) == (How.failed, "c2")
    assert judge(NODES, dict.fromkeys(NODES, late)).how is How.no_rendezvous


def test_a_taken_port_comes_before_what_follows_from_it() -> None:
    taken = Outcome(How.port_taken, message="port 21000")
    late = Outcome(How.no_rendezvous, time=1.0)
    assert judge(NODES, {"c1": taken, "c2": late, "c3": late}).how is How.port_taken
    assert judge(NODES, {"c1": taken}).how is How.port_taken  # the others were ended while they waited


def test_stopped_means_saved_only_when_all_saved() -> None:
    for given_, saved in (((SAVED, SAVED, SAVED), True), ((SAVED, UNSAVED, SAVED), False)):
        end = judge(NODES, dict(zip(NODES, given_, strict=True)))
        assert end.how is How.stopped
        assert end.outcome is not None
        assert end.outcome.saved is saved


def test_stopped_on_some_nodes_while_others_were_done() -> None:
    assert judge(NODES, {"c1": DONE, "c2": SAVED, "c3": DONE}).how is How.stopped


@pytest.mark.parametrize("bad", [failed(1.0), crashed()])
def test_a_failure_outweighs_a_stop(bad: Outcome) -> None:
    for order in itertools.permutations((bad, SAVED, DONE)):
        assert judge(NODES, dict(zip(NODES, order, strict=True))).how is bad.how


@given(st.lists(st.none() | outcomes, min_size=1, max_size=4))
def test_any_mixture_has_one_verdict(said: list[Outcome | None]) -> None:
    nodes = [f"c{i}" for i in range(len(said))]
    words = {node: one for node, one in zip(nodes, said, strict=True) if one is not None}
    end = judge(nodes, words)
    assert (end.how is How.done) == (all(one is not None and one.how is How.done for one in said))
    assert end.outcome is None or words[end.node or ""] == end.outcome
    assert set(end.lost) <= set(nodes) - set(words)


def test_whoever_started_the_agents_is_gone() -> None:
    assert judge(NODES, {}).all_lost
    assert not judge(NODES, {"c1": failed(1.0)}).all_lost


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "OSError: [Errno 116] Stale file handle: '/nfs/data/shard-3'",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ],
)
def test_errors_of_what_the_task_runs_on(message: str) -> None:
    assert of_the_machinery(message)


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: the test task was told to fail here",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x784 and 10x5)",
        "ModuleNotFoundError: No module named 'connection'",
        "AssertionError",
        "",
    ],
)
def test_errors_of_the_task(message: str) -> None:
    assert not of_the_machinery(message)


def test_the_same_error_has_the_same_signature() -> None:
    one = "RuntimeError: Connection closed by peer [10.77.0.12]:18351 at 0x7f57"
    assert signature(one) == signature("RuntimeError: Connection closed by peer [10.77.0.14]:99 at 0xffff")
    assert signature(one) != signature("RuntimeError: Connection reset by peer [10.77.0.12]:18351 at 0x7f57")
