"""Profiles by configuration: real traces of torch.profiler; nsys put before the chosen workers, or missed clearly."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterrun.errors import ConfigError
from conftest import Ended
from support import clusterrun, environment, run_dir

TWO = ["cluster.nodes=1", "cluster.nproc_per_node=2", "train.max_steps=8"]
NSYS = """#!/bin/sh
# Stands in for NVIDIA Nsight Systems, which needs a GPU: keeps its own options, then becomes the worker.
for option in "$@"; do
  shift
  case "$option" in
    --output=*) echo "$option" > "${option#--output=}.options" ;;
    /*) exec "$option" "$@" ;;
    *) all="$all $option"; echo "$all" >> "$NSYS_LOG" ;;
  esac
done
"""


def test_chosen_steps_on_chosen_ranks(tmp_path: Path) -> None:
    code, said = clusterrun(tmp_path, *TWO, "profile.steps=[3,5]", "profile.ranks=[1]", "run_id=profiled")
    assert code == 0, said
    run = run_dir(tmp_path, "profiled")
    assert sorted(p.name for p in run.profiles.glob("*/*")) == ["rank1.operators.txt", "rank1.trace.json.gz"]
    with gzip.open(run.attempt(1).profile(1, "trace.json.gz")) as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert names.count("aten::cross_entropy_loss") == 3  # steps 3, 4 and 5, no more
    assert "gloo:all_reduce" in names
    assert "aten::linear" in run.attempt(1).profile(1, "operators.txt").read_text()
    assert "rank1.trace.json.gz" in clusterrun(tmp_path, "report", "profiled", "--html")[1] + run.report.read_text()


def test_nsys_before_the_chosen_ranks(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text(NSYS)
    (tmp_path / "bin" / "nsys").chmod(0o755)
    env = environment(tmp_path) | {"NSYS_LOG": str(tmp_path / "log")}
    arguments = [*TWO, "profile.tool=nsys", "profile.steps=[2,3]", "profile.nsys_options=['--stats=true']"]
    for name, path, code in (("with", f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}", 0), ("without", env["PATH"], 1)):
        argv = [sys.executable, "-m", "clusterrun", *arguments, f"run_id={name}"]
        done = subprocess.run(argv, env=env | {"PATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout
    assert "profile.tool=nsys: no nsys on node0 in PATH; install NVIDIA Nsight Systems" in done.stdout
    written = run_dir(tmp_path, "with").attempt(1).profiles
    assert sorted(p.name for p in written.iterdir()) == ["rank0.options"]
    asked = (tmp_path / "log").read_text().splitlines()[-1].split()
    assert asked[0] == "profile"
    assert {"--capture-range=cudaProfilerApi", "--trace=cuda,nvtx,osrt", "--stats=true"} <= set(asked)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["profile.steps=[5]"], "profile.steps=[5]: the first and the last step"),
        (["profile.steps=[5,4]"], "profile.steps=[5, 4]"),
        (["profile.steps=[1,2]", "profile.ranks=[4]"], "profile.ranks=[4]: there are ranks 0 to 3"),
        (["profile.steps=[1,2]", "train=script", f"train.script={__file__}"], "a script's steps are its own"),
    ],
)
def test_what_can_not_be_profiled(clusterrun_here: Callable[..., Ended], overrides: list[str], said: str) -> None:
    ended = clusterrun_here("plan", *overrides)
    assert ended.code == ConfigError.exit_code
    assert said in ended.stderr


def test_the_plan_shows_it(clusterrun_here: Callable[..., Ended]) -> None:
    plan = json.loads(clusterrun_here("plan", "profile.tool=nsys", "profile.ranks=[0,3]", "--json").stdout)
    argv = plan["training_argv"]
    at = argv.index("clusterrun.train.nsys")
    assert argv[at - 1 : at + 2] == ["-m", "clusterrun.train.nsys", "--ranks=0,3"]
    assert argv[at + 3 : at + 6] == ["--", "-m", "clusterrun.train.worker"]
