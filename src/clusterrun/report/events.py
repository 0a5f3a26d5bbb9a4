"""Reading the events that workers write, while they are being written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from clusterrun.measure.collectives import size_text
from clusterrun.measure.results import MEASURED, Row
from clusterrun.rundir import RunDir


@dataclass
class EventTail:
    """New records of one rank over all attempts, in order. Files are opened afresh each time, as NFS needs it."""

    run: RunDir
    rank: int = 0
    _offsets: dict[Path, int] = field(default_factory=dict)

    def new(self) -> list[dict[str, Any]]:
        """Records written since the last call; a line still being written waits for the next."""
        found: list[dict[str, Any]] = []
        for attempt in self.run.all_attempts():
            for path in attempt.event_files(self.rank):
                found += self._read(path, attempt.number)
        return found

    def _read(self, path: Path, attempt: int) -> list[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
        records = []
        for line in whole.split(b"\n"):
            try:
                records.append({**json.loads(line), "attempt": attempt})
            except (ValueError, TypeError):  # cut short by a crash, which may also leave zero bytes
                continue
        return records


@dataclass
class Progress:
    """What the events so far say of a run."""

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    world_size: int | None = None
    global_batch: int | None = None
    batch_per_rank: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    metric: str | None = None
    value: float | None = None
    resumed_from: int | None = None
    saved_step: int | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    finished: bool = False
    measured: str = ""  # a bench's last result

    def take(self, record: dict[str, Any]) -> None:
        """Fold one record in."""
        kind = record.get("kind")
        if kind == "start":
            for name in ("step", "total_steps", "world_size", "global_batch", "batch_per_rank", "resumed_from"):
                setattr(self, name, record.get(name))
        elif kind == "step":
            self.step, self.epoch = record["step"], record.get("epoch", self.epoch)
            self.loss, self.samples_per_s = record.get("loss"), record.get("samples_per_s")
        elif kind == "eval":
            self.metric, self.value = record.get("metric"), record.get("value")
        elif kind == "checkpoint":
            if record.get("ok"):
                self.saved_step = record["step"]
            else:
                self.warnings.append(f"checkpoint at step {record['step']} failed: {record.get('problem')}")
        elif kind == "error":
            self.errors.append(f"rank {record.get('rank')}, step {record.get('step')}: {record.get('message')}")
        elif kind == MEASURED:
            row = Row.from_json(record)
            self.measured = f"{row.collective}, {row.phase}, {size_text(row.bytes)}: {row.busbw / 1e9:.3g} GB/s"
        elif kind == "done":
            self.finished = True
            self.step = record.get("step", self.step)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the present rate."""
        if not (self.total_steps and self.samples_per_s and self.global_batch):
            return None
        return (self.total_steps - self.step) * self.global_batch / self.samples_per_s


def objective(run: RunDir, what: str) -> float | None:
    """What a sweeper wants to know of a finished run: ``loss`` or ``metric`` of its last validation, ``samples_per_s``.

    None when the run has not got that far.
    """
    records = EventTail(run).new()
    if what == "samples_per_s":
        rates = [record["samples_per_s"] for record in records if record["kind"] == "step"]
        return median(rates) if rates else None
    field = "value" if what == "metric" else what
    results = [record[field] for record in records if record["kind"] in ("eval", "done")]
    return float(results[-1]) if results and results[-1] is not None else None
