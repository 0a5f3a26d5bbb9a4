"""The collectives that are measured, with nccl-tests' definitions of size and bandwidth. Torch-free.

``bytes`` is what nccl-tests calls size (doc/PERFORMANCE.md and the column "size" of its tables): the buffer that a rank
ends up with (all_reduce, all_gather, broadcast), or the one it begins with (reduce_scatter, all_to_all).

    algbw = bytes / time
    busbw = algbw x factor(ranks)      the rate each rank's link has to carry, whatever the number of ranks
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from clusterrun.config.schema import Accelerator
from clusterrun.errors import ConfigError, choices, nearest

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
ALL = "all"  # every collective, one after the other
ELEMENT = 4  # bytes of a float32, what is sent
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LARGEST = 2**40


def busbw(collective: str, ranks: int, size: int, seconds: float) -> float:
    """Bytes per second."""
    return size / seconds * FACTORS[collective](ranks)


def names(collective: str) -> list[str]:
    """The collectives that a setting asks for. Raises ConfigError."""
    if collective == ALL:
        return list(FACTORS)
    if collective not in FACTORS:
        known = [*FACTORS, ALL]
        raise ConfigError(
            f"bench.collective={collective}: no such collective.{nearest(collective, known)} Known: {choices(known)}"
        )
    return [collective]


def sizes(texts: Iterable[str]) -> list[int]:
    """Sizes in bytes, ascending, of ``64K``, ``1M-1G`` (doubling) and ``1M-1G*4`` (times 4). K is 1,024.

    Raises:
        ConfigError: not a size, or none at all.
    """
    found: set[int] = set()
    for text in texts:
        match = re.fullmatch(r"(\d+)([KMG]?)(?:-(\d+)([KMG]?)(?:\*(\d+))?)?", str(text).strip().upper())
        if not match:
            raise ConfigError(f"bench.sizes={text}: not a size; write 64K, 1M-1G (doubling) or 1M-1G*4")
        low = int(match[1]) * _UNITS[match[2]]
        high = int(match[3]) * _UNITS[match[4]] if match[3] else low
        step = int(match[5] or 2)
        if not (ELEMENT <= low <= high <= _LARGEST and step > 1):
            raise ConfigError(f"bench.sizes={text}: must be from {ELEMENT} bytes to 1024G, the smaller one first")
        while low <= high:
            found.add(low)
            low *= step
    if not found:
        raise ConfigError("bench.sizes=[]: give at least one, e.g. 1M-64M")
    return sorted(found)


def default_sizes(accelerator: Accelerator) -> list[str]:
    """NCCL reaches its rate at hundreds of MiB, Gloo and a slow link much earlier."""
    return ["4K-1G*4"] if accelerator is Accelerator.cuda else ["4K-16M*4"]


def size_text(size: int) -> str:
    """64 KiB, 1 MiB, 1000 B: exact, or with one digit."""
    for unit, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.0f} {word}" if size % unit == 0 else f"{size / unit:.1f} {word}"
    return f"{size} B"
