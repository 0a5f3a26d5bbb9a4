"""Profiles of chosen steps on chosen ranks (profile.steps, profile.ranks): torch.profiler, or marks for nsys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from clusterrun.config.schema import ProfileConfig, ProfileTool
from clusterrun.rundir import AttemptDir, make_private

_ROWS = 40  # of the table of operators


class Profiler:
    """Told of every step before it begins. A profile that can't be written is warned of and ends no training."""

    def __init__(self, config: ProfileConfig, attempt: AttemptDir, rank: int, device: torch.device) -> None:
        self.first, self.last = config.steps
        self._nsys = config.tool is ProfileTool.nsys
        self._trace, self._table = attempt.profile(rank, "trace.json.gz"), attempt.profile(rank, "operators.txt")
        self._device = device
        self._memory = config.memory
        self._running: Any = None
        self.written: Path | None = None
        self.problem: str | None = None  # why it could not be written

    @classmethod
    def of(cls, config: ProfileConfig, attempt: AttemptDir, rank: int, device: torch.device) -> Profiler | None:
        """None for a rank that is not to be profiled."""
        return cls(config, attempt, rank, device) if config.steps and rank in config.ranks else None

    def before(self, step: int) -> None:
        """``step`` (from 1) is about to begin."""
        if step == self.first:
            self._start()
        elif step == self.last + 1:
            self.stop()

    def _start(self) -> None:
        if self._nsys:  # nsys waits for this mark (--capture-range=cudaProfilerApi)
            self._running = True
            if self._device.type == "cuda":
                torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=kinds, record_shapes=True, profile_memory=self._memory)
        self._running.start()

    def stop(self) -> None:
        """End a profile that runs, and write it."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._nsys:
            if self._device.type == "cuda":
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return
        running.stop()
        try:
            make_private(self._trace.parent.parent)
            make_private(self._trace.parent)
            running.export_chrome_trace(str(self._trace))
            by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            self._table.write_text(running.key_averages().table(sort_by=by, row_limit=_ROWS))
        except (OSError, RuntimeError) as error:
            self.problem = f"the profile could not be written: {error}"
        else:
            self.written = self._trace
