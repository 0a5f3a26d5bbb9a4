"""Time limits and memory sizes as people write them."""

from __future__ import annotations

import re

_UNIT_MINUTES = {"m": 1, "h": 60, "d": 24 * 60}


def time_limit_minutes(text: str) -> int:
    """Minutes (rounded up) of ``90m``, ``24h``, ``2d``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM`` or ``D-HH:MM:SS``.

    A bare number is refused: Slurm reads it as minutes, YAML turns an unquoted 24:00:00 into 86400, and nobody
    can tell the two apart afterwards.

    Raises:
        ValueError: with what would be right.
    """
    help_ = "write 90m, 24h, 2d, HH:MM:SS or D-HH:MM:SS (in quotes in YAML)"
    short = re.fullmatch(r"(\d+)\s*([mhd])", text)
    if short:
        minutes = int(short.group(1)) * _UNIT_MINUTES[short.group(2)]
    else:
        clock = re.fullmatch(r"(?:(\d+)-(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?|(\d+):(\d{2}):(\d{2}))", text)
        if not clock:
            raise ValueError(f"not a time limit; {help_}")
        days, d_hours, d_minutes, d_seconds, hours, mins, secs = (int(g or 0) for g in clock.groups())
        if max(d_minutes, d_seconds, mins, secs) > 59 or d_hours > 23:
            raise ValueError(f"not a time of day; {help_}")
        minutes = days * 24 * 60 + (d_hours + hours) * 60 + d_minutes + mins + (1 if d_seconds or secs else 0)
    if minutes < 1:
        raise ValueError("must be at least one minute")
    return minutes


def is_memory_size(text: str) -> bool:
    """Whether Slurm reads this as a size: a number with an optional K, M, G or T (MiB when bare)."""
    return re.fullmatch(r"\d+[KMGT]?B?", text, flags=re.IGNORECASE) is not None
