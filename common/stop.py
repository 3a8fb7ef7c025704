"""Stopping: a signal to any one rank, or a file in the run's folder, ends the run after a step that all ranks agree on.

    kill -TERM $PID_OF_ANY_RANK        or        touch runs/…/stop
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 5.0  # launchers send a signal twice in a row; a person who means it comes back later


class StopSignals:
    """Remembers that a stop was asked for. The second ask, `REPEAT_SECONDS` or more after the first, ends the process."""

    def __init__(self) -> None:
        self.requested = False
        self._first_seconds = 0.0

    @classmethod
    def listen(cls) -> StopSignals:
        """Take the signals over, from now on. Called once, by the main thread, before the slow imports."""
        stop = cls()
        for number in SIGNALS:
            signal.signal(number, stop._on_signal)
        return stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._first_seconds >= REPEAT_SECONDS:
            os._exit(128 + number)
        if not self.requested:
            self.requested, self._first_seconds = True, now
