"""Jobs for a few processes: results as they come, a bounded number waiting, and no process that outlives its parent.

    for record in run_jobs(write_shard, jobs, num_workers=8): ...
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from common.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")


def available_cpus() -> int:
    """The cores this process may use, which Slurm and containers make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def started_at(pid: int) -> str:
    """When a process started, in clock ticks since the machine did; "" where /proc does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def age_seconds(pid: int | None = None) -> float:
    """Seconds since a process (None: this one) started; 0 where /proc does not tell."""
    ticks = started_at(pid or os.getpid())
    if not ticks:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def let_threads_settle(most_seconds: float = 5.0) -> None:
    """Wait until all other threads of this process sleep. Called before a fork; costs 20 µs a thread. Linux only.

    CPython 3.11's child hangs within fork where another thread held the lock of the list of threads, as one of C++ does
    for a moment when it enters Python: torch's do, shortly after a collective is over for everybody else.
    """
    own, deadline = str(threading.get_native_id()), time.monotonic() + most_seconds
    while _is_busy(own) and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_busy(own: str) -> bool:
    """Whether a thread other than `own` runs, or wants to."""
    with suppress(OSError, IndexError):  # no /proc, or a thread that has just ended: look again
        return any((task / "stat").read_text().rpartition(")")[2].split()[0] not in "SZX"
                   for task in Path("/proc/self/task").iterdir() if task.name != own)
    return Path("/proc/self/task").exists()


def run_jobs(function: Callable[[Job], Result], jobs: Iterable[Job], num_workers: int) -> Iterator[Result]:
    """`function(job)` for every job, in the order they end. One worker or none: here, in this process.

    Jobs are taken from the iterator as they are needed, so they may be large. The first exception
    cancels what has not begun, waits for what has, and is raised.
    """
    if num_workers <= 1:
        yield from map(function, jobs)
        return
    let_threads_settle()
    pool = ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(os.getpid(),))
    pending: set[Future[Result]] = set()
    try:
        for job in jobs:
            pending.add(pool.submit(function, job))
            if len(pending) > num_workers:  # one more than can run, so that none waits for this process
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        raise UserError(f"a worker process was killed, perhaps for want of memory; -w {num_workers}; "
                        "run the same command again with fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: the parent alone tells of it
    die_with_parent(signal.SIGKILL, parent)


def die_with_parent(signal_number: int, parent: int) -> None:
    """Ask the kernel for a signal when the parent is gone, however it went. Linux only; nothing elsewhere."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent and not _is_alive(parent):  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal_number)


def _is_alive(pid: int) -> bool:
    """With `forkserver` the parent is not who asked for this process; that one goes when the other does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
