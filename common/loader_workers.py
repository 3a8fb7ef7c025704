"""The worker processes behind a loader: how they start, how they are waited for and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from common.collate import MadePiece
from common.errors import UserError
from common.processes import die_with_parent
from common.stop import SIGNALS

CHECK_SECONDS = 5.0  # at which a wait for the workers looks at them


def patience(timeout_seconds: float) -> float:
    """How long a batch is waited for: less than the other ranks wait for this one, so that it can say why."""
    return max(timeout_seconds - 1, 0.9 * timeout_seconds)


def awaited(made: Any, deaths: Deaths, timeout_seconds: float) -> MadePiece | None:
    """The next piece; None at the end. Raises UserError that names the workers which hang."""
    deadline = time.monotonic() + patience(timeout_seconds) - 0.01
    while True:
        try:
            return deaths.awaited(made)
        except RuntimeError as error:  # torch's own timeout, a part of this one: it looks for dead workers
            if "DataLoader timed out" not in str(error):
                raise
        if time.monotonic() >= deadline:
            break
    hanging = sorted({task[0] for task in made._task_info.values() if len(task) == 1})  # the others are ahead
    names = ", ".join(f"{worker} (pid {made._workers[worker].pid})" for worker in hanging)
    for worker in made._workers:
        worker.kill()  # torch would wait for each of them before the other ranks are told
    raise UserError(f"no batch came within --timeout {timeout_seconds:g} s; loader worker {names} on "
                    f"{os.uname().nodename}; see whether the shards' file system answers there (ls), "
                    "then --resume auto; raise --timeout if reading takes that long")


def end_workers(made: Any) -> None:
    """Have torch's iterator end its workers now, not when the last traceback lets go of it; kill those that stay."""
    made._shutdown_workers()
    for worker in made._workers:  # torch's SIGTERM is ignored by a worker that is stuck in a read
        if worker.is_alive():
            worker.kill()


@contextmanager
def deaf() -> Iterator[None]:
    """Hold stop signals back from this thread and from the processes that it starts; other threads still take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Deaths:
    """A handler of SIGCHLD that lets torch's raise only while a piece is waited for, not within a step or a save.

    A wait that begins after a worker's death finds out by itself, in five seconds.
    """

    def __init__(self, before: Any):
        self.before, self.waiting = before, False
        self.torchs: Any = before.torchs if isinstance(before, Deaths) else before

    @classmethod
    def listen(cls) -> Deaths:
        """Called after the workers have started: torch's handler is there by then."""
        deaths = cls(signal.getsignal(signal.SIGCHLD))
        deaths._install(deaths)
        return deaths

    def __call__(self, number: int, frame: Any) -> None:
        if self.waiting and callable(self.torchs):
            self.torchs(number, frame)

    def awaited(self, made: Iterator[MadePiece]) -> MadePiece | None:
        """The next piece; None at the end."""
        self.waiting = True
        try:
            return next(made, None)
        finally:
            self.waiting = False

    def close(self) -> None:
        """Make way for the handler of a loader that was there before. torch's stays muted: workers are being killed."""
        if isinstance(self.before, Deaths):
            self._install(self.before)

    def _install(self, handler: Any) -> None:
        with suppress(ValueError, TypeError):  # not the main thread, or a handler not from Python
            signal.signal(signal.SIGCHLD, handler)


def start_worker(worker: int, parent: int) -> None:
    """Called in each worker as it starts: it leaves signals to its rank, and dies with it."""
    signal.set_wakeup_fd(-1)  # the rank's
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, parent)
