"""Who tells what went wrong, where several ranks fail together: one rank says it in one line, and all leave.

    except Exception as error:
        raise explain(error, rank=1, timeout_seconds=600) from error

The first rank that fails leaves its words in the store where the ranks have met (`common.launching.rendezvous`).
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UsageError, UserError
from common.lock import NodeLock, lock_path

HEAR_SECONDS = 5.0  # that a store is waited for, or kept, when a run is over anyway


class SharedError(UserError):
    """Raised on every rank alike: rank 0 tells it."""


class RankError(UserError):
    """What ends this rank. `told`: another one tells it."""

    def __init__(self, message: str, told: bool = False):
        super().__init__(message)
        self.told = told


def explain(error: BaseException, *, rank: int, timeout_seconds: float) -> BaseException:
    """The error to raise in its place: of all ranks, one is to tell it. A bug stays what it is, with its traceback.

    Every rank that fails calls it, again on its result if it likes, and `leave` at last.
    """
    if isinstance(error, RankError) or not isinstance(error, Exception):
        return error
    if isinstance(error, UsageError):
        _tell(str(error))
        return error  # with an exit code of its own
    host = os.uname().nodename
    if isinstance(error, SharedError):
        if rank == 0:
            _tell(str(error))  # for a rank that learns of it by losing this one
        return error
    if isinstance(error, UserError):
        first, _ = _tell(str(error))
        return RankError(str(error), told=not first)
    if not _is_lost_peer(error):
        _tell(f"rank {rank} ({host}): {type(error).__name__}: {error}")
        return error
    reason = _first_words(str(error)) or type(error).__name__
    if (fault := _fault_of_nccl(str(error))) is not None:
        first, told = _tell(message := f"rank {rank} ({host}): NCCL failed ({fault}); NCCL_DEBUG=INFO tells more")
        return RankError(told or message, told=not first)
    timed_out = "timed out" in reason.lower() or "timeout" in reason.lower()
    hint = f"no answer within --timeout {timeout_seconds:g} s" if timed_out else "the connection is closed"
    message = (f"rank {rank} lost another rank in a collective, {hint} ({reason}); on {host}; "
               "look at the launcher's report (a killed process leaves no words)")
    first, told = _tell(message)
    return RankError(told or message, told=not first)


def _first_words(text: str) -> str:
    """The first sentence, without the place in gloo's source that it begins with."""
    line = (text.strip().splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*:\d+\] ", "", line).partition(". ")[0][:160]


def _fault_of_nccl(text: str) -> str | None:
    """What NCCL says of a fault of this machine's, behind "Last error:"; None where it has lost another rank."""
    fault = " ".join(text.partition("Last error:")[2].split())
    lost = re.search(r"remote|peer|connection|socket|closed|reset|timed? ?out|abort", fault, re.IGNORECASE)
    return fault[:200] if fault and not lost else None


def own_error(error: Exception, rank: int, size: int) -> Exception:
    """An error that only this rank can have, with the rank's name where there are several."""
    if size == 1 or isinstance(error, RankError | SharedError):
        return error
    return UserError(f"rank {rank} ({os.uname().nodename}): {error}")


def told_memory(error: BaseException) -> UserError | None:
    """What to say where memory ran out, of a GPU or of the machine; None for any other error."""
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"the device is out of memory ({reason[:160]}); --batch_size; lower -b, raise --accum or use "
                         "--amp bf16")
    words = ("can't allocate memory", "cannot allocate memory", "storage size calculation overflowed")
    if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError | OSError) and any(word in reason.lower() for word in words)):
        return UserError(f"the machine is out of memory ({reason.rpartition('Allocator: ')[2][:160]}); -b, -w or "
                         "--image_size; lower it, or raise --accum")
    return None


def leave(rank: int, size: int) -> None:
    """After `explain`, once: close the connections, so that the others notice. The store stays for them to read."""
    if size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with suppress(Exception):
        store = _store()
        if rank:
            store.add("left", 1)
            return
        threading.Thread(target=dist.destroy_process_group, daemon=True).start()  # it may wait for what never comes
        deadline = time.monotonic() + HEAR_SECONDS
        while store.add("left", 0) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)


def _is_lost_peer(error: Exception) -> bool:
    if not isinstance(error, dist.DistError | RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("connection closed", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting", "tcpstore")
    return any(word in str(error).lower() for word in words)


def _tell(message: str) -> tuple[bool, str]:
    """Whether this rank is the first that fails, by the ranks' store; and else what the first one says.

    Where the store is gone, too, one rank of each node counts as the first.
    """
    try:
        store = _store()
        if store.add("failed", 1) == 1:
            store.set("why", message)
            return True, ""
    except Exception:  # whatever it is: the store is gone, with rank 0 or with a launcher, killed without a word
        return _first_here(), ""
    with suppress(Exception):
        return False, store.get("why").decode()
    return False, ""


def _first_here() -> bool:
    """Whether no other rank of this node tells it, where there is no store to ask. The lock is kept to the very end."""
    meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        return NodeLock(lock_path(meeting)).acquire(blocking=False)
    except UserError:
        return True  # two lines rather than none


def _store() -> dist.Store:
    """Where the ranks have met: of this meeting alone."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=HEAR_SECONDS))
    return store
