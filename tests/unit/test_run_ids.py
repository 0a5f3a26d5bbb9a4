"""Run ids: the same configuration has the same id, whatever the order it was given in; what only concerns how to look
at it, or where a sweep runs its points, is no part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.config import frozen
from clusterrun.config.compose import compose
from clusterrun.config.schema import RunConfig
from clusterrun.config.validate import validated
from clusterrun.errors import RunError
from clusterrun.launch.plan import base_run_id
from clusterrun.launch.submit import find_run
from clusterrun.rundir import RunDir, SweepDir


def run_id(*overrides: str) -> str:
    return base_run_id(validated(compose(list(overrides))))


def test_order_and_view_change_nothing(place: Path) -> None:
    one = run_id("train.task_args.b=1", "train.task_args.a=2", "seed=3")
    assert one == run_id("seed=3", "train.task_args.a=2", "train.task_args.b=1")
    assert one == run_id("seed=3", "train.task_args={a: 2, b: 1}", "wait=true", "sweep.array_parallelism=7")
    assert one != run_id("seed=4", "train.task_args={a: 2, b: 1}")
    assert one != run_id("seed=3", "train.task_args={a: 2, b: true}")  # 1 == True in Python


def test_a_default_written_out_is_the_same_configuration(place: Path) -> None:
    lead = RunConfig().cluster.signal_lead_s
    assert run_id() == run_id(f"cluster.signal_lead_s={lead}")


def test_runs_are_found_alone_and_in_sweeps(place: Path) -> None:
    shared = place / "shared"
    config = frozen.to_yaml(validated(compose([])))
    RunDir.create(shared, "linear-1").config.write_text(config)
    sweep = SweepDir.of(shared, "scaling-9")
    sweep.make()
    for name in ("linear-1", "linear-2"):
        RunDir.create_in(sweep.root, name).config.write_text(config)
    assert find_run("linear-2", [shared]).root == sweep.root / "linear-2"
    assert find_run("scaling/linear-1", [shared]).root == sweep.root / "linear-1"
    with pytest.raises(RunError, match=r"several runs begin so: linear-1, scaling-9/linear-1"):
        find_run("linear-1", [shared])
