"""The one tree of errors. Each says what was wrong, where, and what to do; each knows its exit code.

Exit codes (README, "Exit codes"): 0 done, 1 the user's code failed, 2 bad configuration, 3 preflight refused,
4 not enough healthy nodes, 75 stopped, saved and to be requeued, 93 no progress over several attempts, 130 cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """How a clusterrun process ends. A batch job ends with the same codes, so sacct shows them too."""

    DONE = 0
    USER_CODE_FAILED = 1
    BAD_CONFIG = 2
    PREFLIGHT_REFUSED = 3
    NOT_ENOUGH_NODES = 4
    REQUEUE = 75
    NO_PROGRESS = 93
    CANCELLED = 130


class ClusterrunError(Exception):
    """Base of every error that is shown to a user as one line.

    Attributes:
        exit_code: what the process ends with when nothing handles the error.
    """

    exit_code: ExitCode = ExitCode.USER_CODE_FAILED


class ConfigError(ClusterrunError):
    """A setting is wrong. The message names the field, the value and what would be right."""

    exit_code = ExitCode.BAD_CONFIG


class SubmissionError(ClusterrunError):
    """The scheduler refused the job, or is not there."""

    exit_code = ExitCode.BAD_CONFIG


class RunError(ClusterrunError):
    """A run directory is missing, unreadable, or in a state that forbids what was asked."""

    exit_code = ExitCode.BAD_CONFIG


class CommandError(ClusterrunError):
    """A subprocess failed, was not found or ran past its time. Carries what it printed."""

    def __init__(self, message: str, *, output: str = "", returncode: int | None = None) -> None:
        super().__init__(message)
        self.output = output
        self.returncode = returncode


class CheckpointError(ClusterrunError):
    """A checkpoint can't be written, or what is stored can't be trusted."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the closest known name, or '' when none is close."""
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def choices(known: Iterable[str]) -> str:
    """A readable list of what is allowed."""
    return ", ".join(sorted(known))
