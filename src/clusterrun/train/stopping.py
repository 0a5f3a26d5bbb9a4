"""Being told to stop. A signal sets a flag and nothing else; ranks act on it together, at a step boundary.

Torch-free, so that the handlers are there before torch is imported.
"""

from __future__ import annotations

import functools
import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """Remembers the first stop signal. A second one changes nothing: schedulers send SIGTERM again and again."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self, *, ignore_interrupt: bool = True) -> None:
        """Handle the stop signals, and ignore SIGINT: a Ctrl-C in the terminal is the launcher's to handle."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        if ignore_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


class ScriptFlag(StopFlag):
    """A user's script can also be told by a file, CLUSTERRUN_STOP_FILE, where no signal reaches it."""

    def look(self) -> bool:
        """Whether this process was told to stop."""
        file = os.environ.get("CLUSTERRUN_STOP_FILE")
        if self.received is None and file and os.path.exists(file):
            self.received = signal.SIGTERM
        return self.received is not None


@functools.cache
def script_flag() -> ScriptFlag:
    """The flag of this process. Made at the first call, which takes over SIGTERM and SIGUSR2: call it early.

    Raises:
        RuntimeError: called first outside the main thread.
    """
    flag = ScriptFlag()
    try:
        flag.install(ignore_interrupt=False)
    except ValueError:
        raise RuntimeError("stop_requested(), CheckpointManager: to be called first in the main thread") from None
    return flag


def stop_requested() -> bool:
    """Whether this process was told to stop: save at the next step boundary, then exit with 0.

    The first call takes over SIGTERM and SIGUSR2, so call it once before the loop. Ranks are told at different moments
    and must agree before one leaves the loop; ``CheckpointManager`` does that.
    """
    return script_flag().look()
