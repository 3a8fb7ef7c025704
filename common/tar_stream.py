"""Samples of one shard from front to back, as `split` and `resampled` read them: compressed, counted, never decoded.

    >>> with open("train-0000.tar", "rb") as file:
    ...     for sample in stream_samples(file, "train-0000"): print(sample.key, list(sample.fields))
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from common.fields import RawSample
from common.tar_format import Entry, StreamSource, TarError, Walker
from common.tar_index import RESCUE, duplicate, is_sample_file, scattered, split_name

OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)  # what a damaged compressed file raises


def stream_samples(file: BinaryIO, shard: str, path: str = "") -> Iterator[RawSample]:
    """The samples of a tar, plain or compressed. `shard` is what they are called by, `path` what an error names.

    Raises UserError for a tar that is torn; a sample that is, has its `fault`.
    """
    path = path or shard
    walker = Walker(StreamSource(decompressed(file)))
    seen: set[str] = set()
    try:
        for count, (key, members) in enumerate(_grouped(walker)):
            fields: dict[str, bytes] = {}
            fault = scattered() if key in seen else None
            for extension, data in members:
                fault = duplicate(extension.lower()) if extension.lower() in fields else fault
                fields[extension.lower()] = data
            seen.add(key)
            yield RawSample(shard, count, key, fields, fault)
    except TarError as error:
        raise UserError(f"{error}; shard {path}; {RESCUE}") from None
    except BROKEN as error:
        raise UserError(f"the compressed tar is damaged ({error}); shard {path}; {RESCUE}") from None


def _grouped(walker: Walker) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Neighbours that share a key. Members are read when they are reached: a stream cannot go back."""
    latest, members = None, []
    for entry, data in _read(walker):
        key, extension = split_name(entry.name)
        if key != latest and latest is not None:
            yield latest, members
            members = []
        latest = key
        members.append((extension, data))
    if latest is not None:
        yield latest, members


def _read(walker: Walker) -> Iterable[tuple[Entry, bytes]]:
    for entry in walker:
        if is_sample_file(entry):
            yield entry, walker.data(entry)


def compression(start: bytes) -> bytes | None:
    """The magic bytes that a compressed file begins with, None for a plain one. `start` is its first 6 bytes."""
    return next((magic for magic in OPENERS if start.startswith(magic)), None)


def decompressed(file: Any) -> BinaryIO:
    """The bytes of a tar, whether `file` holds them as they are or compressed. `file` is buffered: it is peeked
    into."""
    magic = compression(file.peek(6)[:6])
    return OPENERS[magic](file) if magic else file
