"""Numbers as people read them."""

from __future__ import annotations


def duration_text(seconds: float) -> str:
    """Three digits in the unit that suits: 517 ms, 37.6 s."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
