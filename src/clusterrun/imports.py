"""Large imports at the start of a process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which finds nothing in an import and takes a tenth of torch's (1.3 s).

    Nor does it look at what was imported later, or at the end of the process.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
