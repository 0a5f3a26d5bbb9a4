"""Being told to stop. A signal sets a flag and nothing else; ranks act on it together, at a step boundary.

Torch-free, so that the handlers are there before torch is imported.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopFlag:
    """Remembers the first stop signal. A second one changes nothing: schedulers send SIGTERM again and again."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Handle the stop signals, and ignore SIGINT: a Ctrl-C in the terminal is the launcher's to handle."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
