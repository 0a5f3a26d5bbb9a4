"""The quickest cases of the fault matrix, on the real Slurm lab. All of them: scripts/fault_matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_matrix import CASES, Case, run_case

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab"), pytest.mark.timeout(400)]

QUICK = ("SIGKILL of a worker", "SIGSTOP of a rank", "cable pulled, with a spare")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_ends_with_the_bits_of_an_undisturbed_run(case: Case, shared: Path) -> None:
    done = run_case(case, shared, CASES.index(case))
    assert done.ok, f"{done.problem} (in {shared})"
    assert done.identical


def test_the_quick_cases_exist() -> None:
    assert {case.name for case in CASES} >= set(QUICK)
