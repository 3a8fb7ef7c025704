"""One lock for all ranks of a node and all threads of each, so that what they print comes out in whole blocks.

Threads are kept apart by an `RLock`, processes by `flock` on a file, which the kernel lets go of when its
holder dies. It fits `tqdm.set_lock`, so progress bars and blocks of `--trace print` do not cut each other.

    lock = NodeLock(lock_path(output))
    tqdm.set_lock(lock)
    with lock:
        print(block, flush=True)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from common.errors import UserError

POLL_SECONDS = 0.01


def lock_path(output: str | Path) -> Path:
    """Where the ranks of one run meet: a file local to the node, named after the user and the run's folder."""
    run = hashlib.sha256(os.fsencode(Path(output).resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"shardwise-{os.geteuid()}-{run}.lock"


class NodeLock:
    """Re-entrant lock between threads and processes. `acquire` takes what `threading.RLock` takes.

    The file is made for each outermost `acquire` and removed by `release` (40 µs): nothing is left behind, and a
    loader worker forked meanwhile has no copy of the descriptor that would hold the lock after its parent's death.
    A child forked inside the block does not own it. Pickles as its path.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = -1  # open while held or waited for
        self._reset()
        reset = weakref.WeakMethod(self._reset)
        os.register_at_fork(after_in_child=lambda: (method := reset()) and method())

    def __reduce__(self) -> tuple[type[NodeLock], tuple[Path]]:
        return NodeLock, (self.path,)

    def _reset(self) -> None:
        """Free, whatever was held: the state of a new lock, and of every lock in a forked child."""
        self._threads = threading.RLock()
        self._depth, self._owner = 0, 0
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False where it was not free at once (`blocking=False`) or within `timeout` seconds."""
        deadline = time.monotonic() + timeout if timeout >= 0 else None
        if not self._threads.acquire(blocking, timeout):
            return False
        if self._depth == 0:
            taken = False
            try:
                taken = self._lock_file(blocking, deadline)
            finally:
                if not taken:
                    self._close()
                    self._threads.release()
            if not taken:
                return False
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Give it back. Nothing happens in a child that was forked while its parent held it."""
        if self._depth == 0:
            return
        if self._owner != threading.get_ident():
            raise RuntimeError("a lock can only be released by the thread that holds it")
        self._depth -= 1
        if self._depth == 0:
            with suppress(OSError):
                if _is_there(self._file):
                    os.unlink(self.path)
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would not free it from under a forked child's copy
            self._close()
        self._threads.release()

    def __enter__(self) -> NodeLock:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _lock_file(self, blocking: bool, deadline: float | None) -> bool:
        while True:
            self._file = self._open()
            if blocking and deadline is None:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            elif not _try_until(self._file, deadline if blocking and deadline is not None else 0.0):
                return False
            if _is_there(self._file):
                return True
            self._close()  # whoever held it has removed it meanwhile: the others are meeting at a new one

    def _open(self) -> int:
        """The lock file, made if need be: never through a link, never somebody else's."""
        advice = f"; lock {self.path}; remove it or set TMPDIR to a folder of yours"
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"the lock for printing cannot be opened ({error.strerror}){advice}") from None
        if os.fstat(file).st_uid != os.geteuid():
            os.close(file)
            raise UserError(f"the lock for printing belongs to another user{advice}")
        return file


def _is_there(file: int) -> bool:
    """Whether an open file still has its name."""
    return os.fstat(file).st_nlink > 0


def _try_until(file: int, deadline: float) -> bool:
    """Take the lock without waiting in the kernel, again and again up to `deadline` (monotonic seconds)."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
