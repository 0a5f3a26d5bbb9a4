"""A step that asks every node something: starts it and takes in the answers as they come, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from clusterrun import frames
from clusterrun.launch.steps import Step, StepRunner, StepSpec

_POLL_S = 0.05
_END_PATIENCE_S = 10.0  # for the step to end after every node has answered


def ask(
    steps: StepRunner, spec: StepSpec, frame: str, deadline_s: float, told_to_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Node -> its message of kind ``frame``; nodes that did not answer in time are missing. The step is over then."""
    reader = frames.FileReader(frame, spec.stdout)
    step = steps.start(spec)
    deadline = time.monotonic() + deadline_s
    while step.poll() is None and time.monotonic() < deadline and not told_to_stop():
        reader.poll()
        if len(reader.nodes) == len(spec.nodes):
            break  # srun itself takes a moment longer to end
        time.sleep(_POLL_S)
    reader.poll()
    answers = {node: value for node, value in reader.messages().items() if node in spec.nodes}
    finish(step, patience_s=_END_PATIENCE_S if len(answers) == len(spec.nodes) else 0.0)
    return answers


def finish(step: Step, patience_s: float) -> None:
    """Wait a while for a step to end, then end it."""
    end = time.monotonic() + patience_s
    while step.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    if step.poll() is None:
        step.kill()
