"""What libjpeg remarks while it decodes: it goes on after damage, fills what it lacks with gray, and says so on stderr
alone, once an image. Caught here, so that a remark is held against its image and reaches no log without a name.

    with remarks() as said:
        pixels = decode(data)
    if b"Premature end" in said: ...
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_REMARK = re.compile(rb"Corrupt JPEG|Premature end of JPEG|Inconsistent progression|Invalid SOS|Unknown Adobe|"
                     rb"Warning: unknown JFIF|Application transferred")


@contextmanager
def remarks() -> Iterator[bytearray]:
    """Catch what libjpeg writes to file descriptor 2 of this process, one thread at a time.

    The bytes are there when the block is left; what others wrote meanwhile comes out then. Blocks may be nested: one
    around those of several images saves each 25 µs, for the way there and back. The drawback: if C code
    ends the process within a block, its last words are lost.
    """
    said, catcher = bytearray(), _catcher(os.getpid())
    with catcher.lock:
        is_outermost = catcher.real < 0
        if is_outermost:
            catcher.real = os.dup(2)  # anew each time: a launcher or a test may have moved it
            os.dup2(catcher.file, 2)
        start = os.lseek(catcher.file, 0, os.SEEK_CUR)
        try:
            yield said
        finally:
            num_bytes = os.lseek(catcher.file, 0, os.SEEK_CUR) - start  # what was there before is written over
            if num_bytes:
                os.lseek(catcher.file, start, os.SEEK_SET)
                for line in os.pread(catcher.file, num_bytes, start).splitlines(keepends=True):
                    if _REMARK.match(line):
                        said += line
                    else:
                        os.write(catcher.real, line)
            if is_outermost:
                os.dup2(catcher.real, 2)
                os.close(catcher.real)
                catcher.real = -1


class _Catcher:
    """Where descriptor 2 leads within a block, an unnamed file; `real`: where it leads outside, while it does not."""

    def __init__(self) -> None:
        self.lock, self.real = threading.RLock(), -1
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("stderr")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())


@lru_cache(maxsize=1)
def _catcher(pid: int) -> _Catcher:
    """One for each process: a forked child would share the place where its parent writes."""
    return _Catcher()
