"""One copy in the cache: what it is called, who may read or remove it, and what is known of it since it was fetched.

    >>> copy = Copy(num_bytes=30720, num_fetched=2048, num_samples=8)
    >>> copy.fits(Promised(samples=8, num_bytes=2048))
    True
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from contextlib import suppress
from typing import NamedTuple

from common.access.urls import shown
from common.tars.index import index_path

TAR = ".tar"


class Promised(NamedTuple):
    """What the description of a folder says of a shard; None where it does not say."""

    samples: int | None = None
    num_bytes: int | None = None


UNKNOWN = Promised()


class Copy(NamedTuple):
    """What a copy was when it was fetched: its bytes, those that came for it (fewer if compressed), its samples."""

    num_bytes: int
    num_fetched: int
    num_samples: int

    def fits(self, promised: Promised) -> bool:
        """Whether it may be what was promised. A server that compresses is no contradiction."""
        return (promised.samples in (None, self.num_samples)
                and promised.num_bytes in (None, self.num_bytes, self.num_fetched))

    def note(self, path: str) -> None:
        """Keep this in the file that is the copy's lock: it stays, and is small."""
        with open(path, "w", encoding="ascii") as file:
            json.dump(self, file)


def noted(path: str) -> Copy | None:
    """What was kept by `note`; None where it was not, or is no longer whole."""
    with suppress(OSError, ValueError, TypeError), open(path, encoding="ascii") as file:
        return Copy(*map(int, json.load(file)))
    return None


def file_name(url: str, identity: str) -> str:
    """Different for different URLs, commands included; readable enough to know what it is."""
    digest = hashlib.sha256(f"{url}\0{identity}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    stem = re.sub(r"(\.tar(\.\w+)?|\.tgz)$", "", shown(url).rpartition("/")[2])
    return f"{digest}-{re.sub(r'[^A-Za-z0-9_-]', '_', stem)[-60:]}{TAR}"


def escaped(name: str) -> str:
    """The name as a pattern that matches it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def open_locked(path: str, how: int) -> int | None:
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


def remove_unused(path: str) -> bool:
    """Remove a tar that nobody has open, and its index."""
    file = open_locked(path, fcntl.LOCK_EX)
    if file is None:
        return False
    with suppress(FileNotFoundError):
        index_path(path).unlink(missing_ok=True)
        os.unlink(path)
    os.close(file)
    return True
