"""Stopping: a signal to any one rank, or a file in the run's folder, ends the run after a step that all ranks agree on.

    kill -TERM $PID_OF_ANY_RANK        or        touch runs/…/stop
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 5.0  # launchers send a signal twice in a row; a person who means it comes back later
ORPHAN_SECONDS = 20.0  # to save in, once the launcher is gone


class StopSignals:
    """Remembers that a stop was asked for. The second ask, `REPEAT_SECONDS` or more after the first, ends the process.

    A thread does so: Python's own handlers wait for the main thread, which may sit in a collective for minutes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_seconds: float | None = None  # when the first signal came: `requested` may have another reason
        self._parent = os.getppid()

    @classmethod
    def listen(cls) -> StopSignals:
        """Take the signals over, from now on. Called once, by the main thread, before the slow imports."""
        stop = cls()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _leave_it_to_the_thread)
        threading.Thread(target=stop._watch, args=(reading,), name="stop signals", daemon=True).start()
        stop._follow_launcher()
        return stop

    def _follow_launcher(self) -> None:
        """Under torchrun, whose ranks have sessions of their own: leave when it is killed.

        Its only node saves first. One of several dies at once, so that those that are left go on without it.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from common.processes import die_with_parent  # slow to import: the signals are taken care of first

            alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
            die_with_parent(signal.SIGTERM if alone else signal.SIGKILL, self._parent)

    @contextmanager
    def impatient(self, seconds: float) -> Iterator[None]:
        """Around a wait for the other ranks: after a stop it lasts `seconds` at most, then the process ends."""
        left, began = threading.Event(), time.monotonic()

        def watch() -> None:
            while not left.wait(0.1):
                first = self._first_seconds
                if first is not None and time.monotonic() - max(first, began) > seconds:
                    os._exit(128 + signal.SIGTERM)

        threading.Thread(target=watch, name="impatient", daemon=True).start()
        try:
            yield
        finally:
            left.set()

    def _watch(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._first_seconds is None:
            self.requested, self._first_seconds = True, now
        elif now - self._first_seconds >= REPEAT_SECONDS:
            os._exit(128 + number)
        if os.getppid() != self._parent:
            timer = threading.Timer(ORPHAN_SECONDS, os._exit, [128 + number])
            timer.daemon = True
            timer.start()


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Something must be installed for the number to reach the pipe."""
