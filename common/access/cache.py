"""A folder of plain tars fetched from elsewhere, shared by any number of processes and jobs.

A shard is fetched by one process at a time, under a lock, to a temporary name; it gets its own name when it is whole
and is a tar. What has been unused for longest goes when the limit is reached, but nothing that somebody has open.

    >>> path, file = Cache("/tmp/cache", max_bytes=10**10).acquire("https://host/train-0000.tar", fetch)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.access.urls import shown
from common.errors import UserError
from common.tars.index import index_path, write_index
from common.tars.samples import TornTar, walk_tar, warn_of_no_end
from common.tars.stream import BROKEN, decompressed

CHUNK = 1 << 22
TAR = ".tar"


@dataclass(frozen=True)
class Cache:
    """`max_bytes` is the limit for all files in `folder` together, None for no limit. Waits `patience_seconds` for
    room."""

    folder: str
    max_bytes: int | None = None
    patience_seconds: float = 60.0

    def acquire(self, url: str, fetch: Callable[[], Any], identity: str = "") -> tuple[str, int]:
        """Path of the plain tar, and a descriptor that keeps it from being removed until it is closed.

        `fetch()` opens what is to be stored, plain or compressed. `identity` changes when the thing behind `url` does.
        """
        name = _file_name(url, identity)
        path = os.path.join(self.folder, name)
        with self._telling():
            os.makedirs(self.folder, exist_ok=True)
            file = _open_locked(path, fcntl.LOCK_SH)
            while file is None:
                with self._locked(f".{name}.lock"):
                    if not os.path.exists(path):
                        self._fetch(name, url, fetch)
                file = _open_locked(path, fcntl.LOCK_SH)
            with suppress(OSError):
                os.utime(path)
        return path, file

    def clean(self) -> None:
        """Remove what killed processes have left. Called by rank 0 at the start."""
        for part in Path(self.folder).glob(".*.part"):
            name = part.name[1:].rpartition(TAR)[0] + TAR
            with suppress(OSError), self._locked(f".{name}.lock", wait=False):
                part.unlink(missing_ok=True)

    def _fetch(self, name: str, url: str, fetch: Callable[[], Any]) -> None:
        """Download, check, and give it its name. Called with the shard's lock held."""
        for old in Path(self.folder).glob(f".{_escaped(name)}.*.part"):
            old.unlink(missing_ok=True)
        part = Path(self.folder, f".{name}.{os.getpid()}.part")
        try:
            with fetch() as source, open(part, "wb") as target:
                self._copy(decompressed(source), target, part)
            samples, has_end = walk_tar(part, shown(url))
            if samples and not has_end:
                warn_of_no_end(shown(url), len(samples))
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

    def _copy(self, source: Any, target: Any, part: Path) -> None:
        """Room is taken before it is filled, so that the limit holds while several processes download."""
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
            if path.endswith(TAR) and _remove_unused(path):
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


def _file_name(url: str, identity: str) -> str:
    """Different for different URLs, commands included; readable enough to know what it is."""
    digest = hashlib.sha256(f"{url}\0{identity}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    stem = re.sub(r"(\.tar(\.\w+)?|\.tgz)$", "", shown(url).rpartition("/")[2])
    return f"{digest}-{re.sub(r'[^A-Za-z0-9_-]', '_', stem)[-60:]}{TAR}"


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _open_locked(path: str, how: int) -> int | None:
    """A descriptor with a lock on the file that stands under `path`; None where there is none, or others hold it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == os.stat(path).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass  # it is in use, or being removed, at this moment
    os.close(file)
    return None


def _remove_unused(path: str) -> bool:
    """Remove a tar that nobody has open, and its index."""
    file = _open_locked(path, fcntl.LOCK_EX)
    if file is None:
        return False
    with suppress(FileNotFoundError):
        index_path(path).unlink(missing_ok=True)
        os.unlink(path)
    os.close(file)
    return True
