"""One make_shards at a time works on an OUT, or one for each part of the work: a second would remove what the first has
not finished.

    with sole_writer(plan.work, f"plan-{plan.digest}"): ...
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from common.errors import UserError


@contextmanager
def sole_writer(work: Path, mark: str, part: tuple[int, int] | None = None) -> Iterator[None]:
    """Keep others away for the length of a block: all of them, or with `part` those who have the same one or want the
    whole. `mark` is a file in `work`, which is there as long as there is something to do. Raises UserError."""
    with lock(work / mark, fcntl.LOCK_EX if part is None else fcntl.LOCK_SH):
        if part is None:
            yield
        else:
            with lock(work / f"part-{part[0]}-of-{part[1]}"):
                yield


def lock(path: Path, how: int = fcntl.LOCK_EX) -> IO[bytes]:
    """A file that is locked until it is closed; the kernel lets go of it when its holder dies. Raises UserError where
    somebody else has it."""
    out = path.parent.parent
    refusal = UserError(f"another make_shards is writing here; {out}; wait for its end, or choose another OUT")
    try:
        file = open(path, "ab+")  # noqa: SIM115  some network file systems lock what is open for both alone
    except FileNotFoundError:
        raise refusal from None  # it has come to its end at this moment, and the folder is gone
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        is_there = os.fstat(file.fileno()).st_nlink > 0
    except BlockingIOError:
        is_there = False
    except OSError:
        is_there = True  # a file system without locks
    if not is_there:
        file.close()
        raise refusal
    return file
