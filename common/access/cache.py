"""A folder of plain tars fetched from elsewhere, shared by any number of processes and jobs.

A shard is fetched by one process at a time, under a lock, to a temporary name; it gets its own name when it is whole
and is a tar. What has been unused for longest goes when the limit is reached, but nothing that somebody has open.

    >>> path, file = Cache("/tmp/cache", max_bytes=10**10).acquire("https://host/train-0000.tar", fetch)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.access.copies import (
    TAR,
    UNKNOWN,
    Copy,
    Promised,
    escaped,
    file_name,
    noted,
    open_locked,
    remove_unused,
)
from common.access.urls import shown
from common.errors import UserError
from common.tars.index import write_index
from common.tars.samples import TornTar, walk_tar, warn_of_no_end
from common.tars.stream import BROKEN, decompressed

CHUNK = 1 << 22


@dataclass(frozen=True)
class Cache:
    """`max_bytes` is the limit for all files in `folder` together, None for no limit. Waits `patience_seconds` for
    room."""

    folder: str
    max_bytes: int | None = None
    patience_seconds: float = 60.0

    def acquire(self, url: str, fetch: Callable[[], Any], identity: str = "",
                promised: Promised = UNKNOWN) -> tuple[str, int]:
        """Path of the plain tar, and a descriptor that keeps it from being removed until it is closed.

        `fetch()` opens what is to be stored, plain or compressed. `identity` changes when the thing behind `url` does.
        A copy that contradicts what was `promised`, or is not as it was fetched, is fetched anew, once.
        """
        name = file_name(url, identity)
        path = os.path.join(self.folder, name)
        with self._telling():
            os.makedirs(self.folder, exist_ok=True)
            file = self._open(name, promised)
            while file is None:
                with self._locked(f".{name}.lock"):
                    file = self._open(name, promised)  # another process may have been faster
                    if file is None:
                        self._drop(path)
                        self._fetch(name, url, fetch, promised)
                        file = open_locked(path, fcntl.LOCK_SH)
            with suppress(OSError):
                os.utime(path)
        return path, file

    def clean(self) -> None:
        """Remove what killed processes have left. Called by rank 0 at the start."""
        for part in Path(self.folder).glob(".*.part"):
            name = part.name[1:].rpartition(TAR)[0] + TAR
            with suppress(OSError), self._locked(f".{name}.lock", wait=False):
                part.unlink(missing_ok=True)

    def _open(self, name: str, promised: Promised) -> int | None:
        """A descriptor of the copy, if it is there and as it should be."""
        file = open_locked(os.path.join(self.folder, name), fcntl.LOCK_SH)
        if file is None:
            return None
        size, copy = os.fstat(file).st_size, noted(os.path.join(self.folder, f".{name}.lock"))
        if (copy is None and promised.num_bytes in (None, size)
                or copy is not None and copy.num_bytes == size and copy.fits(promised)):
            return file
        os.close(file)
        return None

    def _drop(self, path: str) -> None:
        """Remove a copy that is not what it should be, as soon as nobody reads it."""
        deadline = time.monotonic() + self.patience_seconds
        while os.path.exists(path) and not remove_unused(path):
            if time.monotonic() > deadline:
                raise UserError(f"a cached shard is out of date, and another run is reading it; {path}; wait for that "
                                "run to end, or give another --cache_dir")
            time.sleep(0.1)

    def _fetch(self, name: str, url: str, fetch: Callable[[], Any], promised: Promised) -> None:
        """Download, check, and give it its name. Called with the shard's lock held."""
        for old in Path(self.folder).glob(f".{escaped(name)}.*.part"):
            old.unlink(missing_ok=True)
        part = Path(self.folder, f".{name}.{os.getpid()}.part")
        try:
            with fetch() as source, open(part, "wb") as target:
                num_bytes = self._copy(decompressed(source), target, part)
                num_fetched = _position(source)
            samples, has_end = walk_tar(part, shown(url))
            if samples and not has_end:
                warn_of_no_end(shown(url), len(samples))
            copy = Copy(num_bytes, num_fetched, len(samples))
            if not copy.fits(promised._replace(samples=None)):  # of their number, who reads them tells
                raise UserError(f"info.json promises {promised.num_bytes} bytes, {num_fetched} came; shard "
                                f"{shown(url)}; it was cut or changed: write or copy it again, with its info.json")
            copy.note(os.path.join(self.folder, f".{name}.lock"))
            final = Path(self.folder, name)
            os.replace(part, final)
            write_index(final, samples)
        except TornTar as error:  # nothing of it is kept, so nothing of it can be used
            raise UserError(str(error)) from None
        except BROKEN as error:
            raise UserError(f"the compressed tar is damaged ({error}); shard {shown(url)}; copy or write it "
                            "again") from None
        finally:
            part.unlink(missing_ok=True)

    def _copy(self, source: Any, target: Any, part: Path) -> int:
        """The number of bytes. Room is taken before it is filled, so that the limit holds while several processes
        download."""
        taken, size = 0, 0
        while data := source.read(CHUNK):
            if size + len(data) > taken:
                taken = self._take(part, size + len(data), size)
            target.seek(size)
            target.write(data)
            size += len(data)
        target.truncate(size)
        target.flush()
        os.fsync(target.fileno())
        return size

    def _take(self, part: Path, size: int, written: int) -> int:
        """Grow the file to `size`, after others had to make room. Returns the size."""
        if self.max_bytes is None:
            return size
        deadline = time.monotonic() + self.patience_seconds
        while True:
            with self._locked(".room.lock"):
                if self._make_room(size - (part.stat().st_size if part.exists() else 0), size):
                    os.truncate(part, size)
                    return size
            if time.monotonic() > deadline:
                raise UserError(f"the cache is full of shards in use ({self.max_bytes} bytes); {self.folder}; raise "
                                "--cache_size, or lower --shuffle or -w")
            time.sleep(0.1)

    def _make_room(self, needed: int, size: int) -> bool:
        """Whether `needed` more bytes fit, once the files unused for longest are gone."""
        assert self.max_bytes is not None
        if size > self.max_bytes:
            raise UserError(f"a shard is larger than the whole cache ({self.max_bytes} bytes); {self.folder}; raise "
                            "--cache_size")
        files = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        used = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in sorted(files):
            if used + needed <= self.max_bytes:
                return True
            if path.endswith(TAR) and remove_unused(path):
                used -= num_bytes
        return used + needed <= self.max_bytes

    @contextmanager
    def _locked(self, name: str, wait: bool = True) -> Iterator[None]:
        """Hold a lock file of the folder; the kernel lets go of it when its holder dies. It stays, so that all lock
        the same."""
        file = os.open(os.path.join(self.folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(file)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = f", {shutil.disk_usage(self.folder).free >> 20} MB free" if error.errno == errno.ENOSPC else ""
            raise UserError(f"the cache cannot be written ({error.strerror or error}{free}); {self.folder}; "
                            "give another --cache_dir, or a smaller --cache_size") from None


def _position(source: Any) -> int:
    """How many bytes came in all, what follows the end of a compressed tar included; 0 from a command, which nobody
    has promised anything of."""
    while source.read(CHUNK):
        pass
    with suppress(OSError):
        return source.tell()
    return 0
