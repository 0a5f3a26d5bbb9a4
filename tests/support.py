"""What end-to-end tests share: starting the real command, reading what a run left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clusterrun.ledger import Attempt, Ledger
from clusterrun.report.events import EventTail
from clusterrun.rundir import RunDir

TESTS = Path(__file__).parent


def environment(shared: Path) -> dict[str, str]:
    """A clean environment: runs go to ``shared``, the test tasks can be imported, no colours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERRUN_", "SLURM_", "SUBMITIT_"))}
    return {**clean, "CLUSTERRUN_SHARED_DIR": str(shared), "PYTHONPATH": str(TESTS), "NO_COLOR": "1"}


def start(shared: Path, arguments: Sequence[str], **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterrun", *arguments],
        env=environment(shared),
        cwd=shared,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )


def clusterrun(shared: Path, *arguments: str, timeout_s: float = 240) -> tuple[int, str]:
    """Run the command to its end: exit code and everything it printed."""
    process = start(shared, arguments)
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        raise AssertionError(f"clusterrun {' '.join(arguments)}: no end in {timeout_s} s; it said:\n{said}") from None
    return process.returncode, said


def run_dir(shared: Path, run_id: str) -> RunDir:
    return RunDir.open(shared / "runs" / run_id)


def attempts(shared: Path, run_id: str) -> list[Attempt]:
    return Ledger(shared / "runs" / run_id / "ledger.jsonl").attempts()


def events(shared: Path, run_id: str, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [e for e in EventTail(run_dir(shared, run_id), rank).new() if e["kind"] == kind]


def losses(shared: Path, run_id: str) -> dict[int, float]:
    """Step -> loss as logged, over all attempts."""
    return {e["step"]: e["loss"] for e in events(shared, run_id, "step")}


def final_state(shared: Path, run_id: str) -> dict[str, Any]:
    """Every tensor of the newest checkpoint: model, optimizer, RNG of all ranks."""
    import torch

    from clusterrun.checkpoint import dcp
    from clusterrun.checkpoint.store import Store

    newest = Store(run_dir(shared, run_id).checkpoints).list()[0]
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in dcp.layout(newest.path).items()}
    dcp.read(tensors, newest.path)
    return {"step": torch.tensor(newest.step), **tensors}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    assert one.keys() == other.keys()
    assert any(key.startswith("model") for key in one), sorted(one)
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different, f"not bit-identical: {different}"


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.2)


def step_reached(shared: Path, run_id: str) -> int:
    """The last step logged so far, 0 before the first."""
    if not (shared / "runs" / run_id / "config.yaml").exists():
        return 0
    return max((e["step"] for e in events(shared, run_id, "step")), default=0)
