"""Sweeps on this machine: one point after another, by the real command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from clusterrun.ledger import Ending, Ledger
from clusterrun.rundir import RunDir, sweep_roots
from support import clusterrun, environment, wait_for

SMALL = ["cluster.nodes=1", "cluster.nproc_per_node=1", "train.max_steps=12", "preflight.policy.storage_latency=off"]


def sweep(shared: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    cwd = shared / "cwd"
    cwd.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "clusterrun", "-m", *SMALL, *arguments]
    full = {**environment(shared), **(env or {})}
    done = subprocess.run(
        argv, env=full, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert not list(cwd.iterdir()), "something was left in the current directory"
    return done.returncode, done.stdout


def endings(shared: Path) -> dict[str, list[Ending]]:
    """Of each point in the only sweep: how its attempts ended."""
    (root,) = sweep_roots(shared)
    runs = sorted(path.parent for path in root.glob("*/config.yaml"))
    return {run.name: [a.ending for a in Ledger(RunDir(run).ledger).attempts()] for run in runs}


def test_a_failing_point_hides_no_other_and_done_stays_done(tmp_path: Path) -> None:
    points = ["train.task=slow_task:SlowLinear", "train.task_args.fail_at=99,5", "seed=1"]
    code, said = sweep(tmp_path, *points)
    assert code == 1, said
    assert re.search(r"^fail_at=99: done, accuracy", said, re.MULTILINE), said
    assert re.search(r"^fail_at=5: failed.*: .*told to fail here", said, re.MULTILINE), said
    assert "1 done, 1 failed" in said
    first = endings(tmp_path)
    assert sorted(e.value for (e,) in first.values()) == ["done", "user_code_failed"]

    code, said = sweep(tmp_path, *points, "wait=false")  # goes on by itself, and the shell has its prompt back
    assert code == 0, said
    wait_for("the failed point's second end", lambda: sum(map(len, endings(tmp_path).values())) == 3)
    wait_for("its second end", lambda: all(Ending.killed not in e for e in endings(tmp_path).values()))
    again = endings(tmp_path)
    assert sorted(map(len, again.values())) == [1, 2], again
    assert [Ending.user_code_failed] * 2 in again.values()


def test_a_snapshot_is_shared_and_what_its_points_run(tmp_path: Path) -> None:
    """One copy for all points; editing after submission changes nothing; the record is found from each point."""
    tree = tmp_path / "code"
    tree.mkdir()
    script = tree / "mine.py"
    script.write_text("import helper\nprint(helper.WORD, __file__)\n")
    (tree / "helper.py").write_text("WORD = 'first'\n")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, timeout=30)
    job = ["train=script", f"train.script={script}", "snapshot=true", "run_id=snap"]
    job = [item for item in [*SMALL, *job] if not item.startswith("train.max_steps")]
    command = [sys.executable, "-m", "clusterrun", "-m", *job]

    def submit(*points: str) -> str:
        done = subprocess.run(
            [*command, *points],
            env=environment(tmp_path),
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    submit("seed=1,2", "wait=false")
    script.write_text("raise SystemExit('edited after submission')\n")
    wait_for("two ends", lambda: [[Ending.done]] * 2 == list(endings(tmp_path).values()))
    (root,) = sweep_roots(tmp_path)
    runs = [RunDir(path.parent) for path in sorted(root.glob("*/config.yaml"))]
    for run in runs:
        (log,) = run.attempt(1).logs.glob("*.out")
        assert log.read_text().split() == ["first", str(root / "code" / "tree" / "mine.py")]
        assert run.code.tree.resolve() == root / "code" / "tree"
    assert sorted(path.name for path in root.glob("code*")) == ["code"]
    code, said = clusterrun(tmp_path, "report", runs[0].id)
    assert code == 0, said
    assert re.search(r"^code +commit [0-9a-f]{10} of branch \w+, trained from a copy", said, re.MULTILINE), said

    script.write_text("print('edited', __file__)\n")
    submit("seed=2,3")
    assert sorted(path.name for path in root.glob("code*")) == ["code", "code-2"]  # for the new point alone
    new = next(path.parent for path in root.glob("*/config.yaml") if RunDir(path.parent) not in runs)
    (log,) = RunDir(new).attempt(1).logs.glob("*.out")
    assert log.read_text().split() == ["edited", str(root / "code-2" / "tree" / "mine.py")]
    code, said = clusterrun(tmp_path, "report", new.name)
    assert "with uncommitted changes" in said, said


def test_a_sweeper_that_chooses_by_results(tmp_path: Path) -> None:
    """It gets the validation loss of each point back; a second time all is read from disk."""
    path = os.pathsep.join([environment(tmp_path)["PYTHONPATH"], str(Path(__file__).parents[1] / "sweeper")])
    chooser = ["hydra.sweeper._target_=hydra_plugins.halving_sweeper.HalvingSweeper", "+hydra.sweeper.batches=1"]
    code, said = sweep(tmp_path, *chooser, env={"PYTHONPATH": path})
    assert code == 0, said
    first = endings(tmp_path)
    assert len(first) == 2, said
    assert set(map(tuple, first.values())) == {(Ending.done,)}
    (root,) = sweep_roots(tmp_path)
    results = (root / "optimization_results.yaml").read_text()
    assert "best: 0." in results
    code, said = sweep(tmp_path, *chooser, env={"PYTHONPATH": path})
    assert code == 0, said
    assert endings(tmp_path) == first
    assert (root / "optimization_results.yaml").read_text() == results
