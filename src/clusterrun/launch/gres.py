"""Generic resources as Slurm prints them: ``gpu:a100:8(S:0-1)``, ``gpu:h100:3(IDX:1-3)``, ``gres/gpu:a100=8``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NOTHING = ("", "(null)", "N/A", "n/a", "none", "(none)")
_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ITEM = re.compile(r"[A-Za-z_][\w.-]*(?::[^\s:,()=]+)*[:=]\d+[KMGT]?(?:\([^()]*\))?")


@dataclass(frozen=True)
class Gres:
    """So many of one resource. ``detail`` is what stood in brackets: sockets (S:0-1) or indices in use (IDX:0,3)."""

    name: str  # gpu, mig, shard, ...
    type: str | None
    count: int
    detail: str | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """Which of them are in use, as far as it is said."""
        if not self.detail or not self.detail.startswith("IDX:") or self.detail == "IDX:N/A":
            return ()
        found: list[int] = []
        for part in self.detail[len("IDX:") :].split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        return tuple(found)


def is_gres(text: str) -> bool:
    """Whether a cell holds generic resources, or says that there are none."""
    return text in ("(null)", "N/A") or re.fullmatch(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*", text) is not None


def parse_gres(text: str) -> tuple[Gres, ...]:
    """All resources of a cell; none for ``(null)``. Items of a TRES list that are no GRES (cpu=, mem=) are left out.

    Raises:
        ValueError: an item has no count.
    """
    if text.strip() in _NOTHING:
        return ()
    found = []
    for item in re.split(r",(?![^(]*\))", text.strip()):
        if "=" in item:
            if not item.startswith("gres/"):
                continue
            item = item.removeprefix("gres/").replace("=", ":")
        found.append(_item(item))
    typed = {gres.name for gres in found if gres.type}
    in_tres = "gres/" in text  # which lists the sum beside its parts
    return tuple(gres for gres in found if not (in_tres and gres.type is None and gres.name in typed))


def _item(text: str) -> Gres:
    match = re.fullmatch(r"([^():]+)((?::[^():]+)*?):(\d+)([KMGT]?)(?:\(([^()]*)\))?", text)
    if match is None:
        raise ValueError(f"{text!r}: not a generic resource with a count, like gpu:a100:8")
    name, kind, count, unit, detail = match.groups()
    kinds = [part for part in kind.split(":") if part and part != "no_consume"]
    return Gres(name, ":".join(kinds) or None, int(count) * _FACTOR[unit], detail or None)


def gpus(items: Iterable[Gres]) -> int:
    """Whole GPUs among them; MIG slices and shards are something else."""
    return sum(item.count for item in items if item.name == "gpu")


def gpu_types(items: Iterable[Gres]) -> dict[str | None, int]:
    """GPUs by type, in the order given."""
    found: dict[str | None, int] = {}
    for item in items:
        if item.name == "gpu" and item.count:
            found[item.type] = found.get(item.type, 0) + item.count
    return found
