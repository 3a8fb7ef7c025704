"""Where the bytes of a shard come from: a file, a compressed file, a URL, a command; and what may be read by position.

    >>> with Storage(cache_dir="/tmp/cache").held("https://host/train-0000.tar") as (path, file): ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.access import remote
from common.access.cache import Cache
from common.access.copies import UNKNOWN, Promised
from common.access.urls import COMPRESSED, is_command, is_remote, shown
from common.errors import UserError
from common.files import regular
from common.tars.stream import compression

BY_POSITION = "--cache_dir DIR keeps plain copies of such shards; --sampling split or resampled reads them as a stream"


@dataclass(frozen=True)
class Storage:
    """How shards are reached. Small and picklable: every process that reads has a copy."""

    cache_dir: str | None = None
    cache_size: float | None = None  # GB; None: no limit
    allow_pipe: bool = False
    timeout_seconds: float = 600.0  # that ranks wait for each other: a stall must be told before
    skip_errors: bool = False  # samples that cannot be used are left out and counted, instead of ending the run
    promised: Mapping[str, Promised] = field(default_factory=dict)  # of shards that go through the cache: by URL

    def open(self, path: str) -> Any:
        """The bytes of a shard from front to back, as they are stored: a buffered file. Raises UserError."""
        if self.cache_dir and is_remote(path):
            return os.fdopen(self.acquire(path)[1], "rb", buffering=1 << 18)
        return self._open_at_source(path)

    def acquire(self, path: str) -> tuple[str, int]:
        """A plain tar on this machine with the bytes of the shard, and its descriptor. Raises UserError."""
        if not is_remote(path):
            file = _open(path)
            if compression(os.pread(file, 6, 0)) is None:
                return path, file
            status = os.fstat(file)
            os.close(file)
            identity = f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"
        else:
            identity = ""
        if not self.cache_dir:
            kind = "remote" if is_remote(path) else "compressed"
            raise UserError(f"a {kind} shard cannot be read by position; {shown(path)}; {BY_POSITION}")
        promised = self.promised.get(path, UNKNOWN)
        if self.skip_errors:  # fewer samples are no reason to fetch a shard anew each time it is opened
            promised = promised._replace(samples=None)
        return self._cache.acquire(path, lambda: self._open_at_source(path), identity, promised)

    @contextmanager
    def held(self, path: str) -> Iterator[tuple[str, int]]:
        """As `acquire`, for the length of a block."""
        local, file = self.acquire(path)
        try:
            yield local, file
        finally:
            os.close(file)

    def is_local(self, path: str) -> bool:
        """Whether a shard can be read by position: a plain tar, or anything through the cache."""
        if self.cache_dir:
            return True
        if is_remote(path):
            return False
        file = _open(path)
        try:
            return compression(os.pread(file, 6, 0)) is None
        finally:
            os.close(file)

    def check_positions(self, paths: Sequence[str]) -> None:
        """Raise UserError, before anything is read, for shards that exact sampling could not read."""
        if not self.cache_dir:
            for path in paths:
                if is_remote(path) or path.endswith(COMPRESSED):
                    with self.held(path):
                        pass

    def check_command(self, path: str) -> None:
        """Raise UserError for a command that nobody has allowed: a list of shards must not be able to run programs."""
        if not self.allow_pipe:
            raise UserError(f"a shard is a command to be run; {path}; add --allow_pipe if you trust it")

    def listed(self, url: str) -> list[str]:
        """The shards that a URL names."""
        return remote.listed(url)

    def read_small(self, url: str, limit: int = 1 << 26) -> bytes | None:
        """A small remote file; None where it does not exist."""
        return remote.read_small(url, self.patience_seconds, limit + 1)

    def clean(self) -> None:
        """Remove what killed downloads have left in the cache."""
        if self.cache_dir:
            self._cache.clean()

    @property
    def cache_bytes(self) -> int | None:
        """The limit of the cache, None for none."""
        return None if self.cache_size is None else int(self.cache_size * 10**9)

    @property
    def patience_seconds(self) -> float:
        """How long a source may give nothing."""
        return min(60.0, self.timeout_seconds / 3)

    @property
    def _cache(self) -> Cache:
        assert self.cache_dir is not None
        return Cache(self.cache_dir, self.cache_bytes, self.patience_seconds)

    def _open_at_source(self, path: str) -> Any:
        if is_command(path):
            self.check_command(path)
        if is_remote(path):
            return remote.open_url(path, self.patience_seconds)
        return os.fdopen(_open(path), "rb", buffering=1 << 18)


def _open(path: str) -> int:
    """A file of this machine. Raises UserError that names the machine, since others may have it."""
    try:
        return regular(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"a shard cannot be read ({error.strerror}) on {os.uname().nodename}; {path}; "
                        "every node needs every shard, a file, under the same path") from None
