"""Whether Slurm has lost the head node, from its own words, and what is done then.

The lines were printed by a Slurm 22.05 (``scontrol show job --oneliner``), shortened. The whole story on a real Slurm:
scripts/fault_matrix --only "head node".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.errors import CommandError
from clusterrun.launch.head_watch import head_is_lost, look, watchers
from clusterrun.launch.srun import why_no_step

WHOLE = "JobId=17 JobName=a JobState=RUNNING Requeue=1 Restarts=0 NodeList=c[1-3] BatchHost=c1 NumNodes=3"
LOST = "JobId=17 JobName=a JobState=RUNNING Requeue=1 Restarts=0 NodeList=c[2-3] BatchHost=c1 NumNodes=2"
OTHER_LOST = "JobId=17 JobName=a JobState=RUNNING Requeue=1 Restarts=0 NodeList=c[1,3] BatchHost=c1 NumNodes=2"
REQUEUED = "JobId=17 JobName=a JobState=COMPLETING Requeue=1 Restarts=1 NodeList=c[2-3] BatchHost=c1 NumNodes=2"
PENDING = "JobId=17 JobName=a JobState=PENDING Requeue=1 Restarts=0 NodeList=(null) NumNodes=3-3"
HOSTS = {"c[1-3]": ["c1", "c2", "c3"], "c[2-3]": ["c2", "c3"], "c[1,3]": ["c1", "c3"]}


@pytest.mark.parametrize(
    ("job", "lost"),
    [(WHOLE, False), (LOST, True), (OTHER_LOST, False), (REQUEUED, False), (PENDING, False), ("", False)],
)
def test_the_head_is_lost_only_when_slurm_says_so(job: str, lost: bool) -> None:
    assert head_is_lost(job, HOSTS.__getitem__) is lost


def test_the_last_nodes_watch_and_never_the_head() -> None:
    assert watchers(["c1", "c2", "c3", "c4"], "c1") == ["c3", "c4"]
    assert watchers(["c1", "c2"], "c1") == ["c2"]
    assert watchers(["c1", "c2"], "c2") == ["c1"]
    assert watchers(["c1"], "c1") == []


def test_a_step_that_slurm_would_not_start_is_told_from_nodes_that_did_not_answer() -> None:
    refused = "srun: error: Unable to create step for job 461: Invalid generic resource (gres) specification\n"
    assert why_no_step(refused) == "Unable to create step for job 461: Invalid generic resource (gres) specification"
    assert why_no_step("srun: error: c3: task 0: Terminated\n") is None


class Slurm:
    """scontrol and scancel that note what they were told: the commands are real, the cluster behind them is not."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = place
        monkeypatch.setenv("PATH", str(place), prepend=":")
        self.says("scancel")

    def says(self, program: str, text: str = "", code: int = 0, requeue: int = 0) -> None:
        script = self._place / program
        log = self._place / "told"
        hosts = "".join(f"'show hostnames {k}') printf '%s\\n' {' '.join(v)}; exit;;\n" for k, v in HOSTS.items())
        script.write_text(
            f'#!/bin/sh\ncase "$*" in\n{hosts}'
            f"requeue*) echo {program} $* >> {log}; echo 'slurm_error: refused' >&2; exit {requeue};;\n"
            f"show*) echo '{text}'; exit {code};;\n*) echo {program} $* >> {log};;\nesac\n"
        )
        script.chmod(0o755)

    @property
    def told(self) -> list[str]:
        log = self._place / "told"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def test_a_job_without_its_head_is_queued_again(slurm: Slurm) -> None:
    slurm.says("scontrol", LOST)
    assert look("17", restarts=0)
    assert slurm.told == ["scontrol requeue 17"]


def test_a_whole_job_is_left_alone(slurm: Slurm) -> None:
    slurm.says("scontrol", WHOLE)
    assert not look("17", restarts=0)
    assert slurm.told == []


def test_a_later_start_of_the_job_is_not_touched(slurm: Slurm) -> None:
    slurm.says("scontrol", LOST.replace("Restarts=0", "Restarts=1"))
    assert look("17", restarts=0)
    assert slurm.told == []


def test_a_job_that_may_not_be_requeued_is_cancelled(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.says("scontrol", LOST, requeue=1)
    assert look("17", restarts=0)
    assert slurm.told == ["scontrol requeue 17", "scancel 17"]
    assert "clusterrun resume" in capsys.readouterr().out


def test_a_controller_that_is_away_is_no_lost_head(slurm: Slurm) -> None:
    slurm.says("scontrol", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(CommandError):
        look("17", restarts=0)
    assert slurm.told == []
