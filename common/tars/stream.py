"""Samples of one shard from front to back, as `split` and `resampled` read them: compressed, counted, never decoded.

    >>> with open("train-0000.tar", "rb") as file:
    ...     for sample in stream_samples(file, "train-0000"): print(sample.key, list(sample.fields))
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from common.fields import RawSample
from common.tars.format import ByteStream, TarError, Walker
from common.tars.samples import RESCUE, TornTar, duplicate, is_sample_file, scattered, split_name, warn_of_no_end

OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)  # what a damaged compressed file raises


def stream_samples(file: BinaryIO, shard: str, path: str = "", warn: bool = False) -> Iterator[RawSample]:
    """The samples of a tar, plain or compressed. `shard` is what they are called by, `path` what an error names.
    `warn`: tell of a missing end mark.

    Raises TornTar for a tar that is torn, after the samples before the tear; a sample that is torn has its `fault`.
    """
    path = path or shard
    walker = Walker(ByteStream(decompressed(file)))
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
        if warn and seen and not walker.has_end:
            warn_of_no_end(path, count + 1)
    except TarError as error:
        raise TornTar(str(error), f"shard {path}; {RESCUE}") from None
    except BROKEN as error:
        raise TornTar(f"the compressed tar is damaged ({error})", f"shard {path}; {RESCUE}") from None


def _grouped(walker: Walker) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Neighbours that share a key. Members are read when they are reached: a stream cannot go back."""
    latest, members, is_whole, tear = None, [], False, None
    try:
        for entry in filter(is_sample_file, walker):
            key, extension = split_name(entry.name)
            if key != latest and latest is not None:
                yield latest, members
                members = []
            latest, is_whole = key, False
            members.append((extension, walker.data(entry)))
            is_whole = True
    except (TarError, *BROKEN) as error:
        tear = error
    if latest is not None and (is_whole or tear is None):
        yield latest, members
    if tear is not None:
        raise tear


def compression(start: bytes) -> bytes | None:
    """The magic bytes that a compressed file begins with, None for a plain one. `start` is its first 6 bytes."""
    return next((magic for magic in OPENERS if start.startswith(magic)), None)


def decompressed(file: Any) -> BinaryIO:
    """The bytes of a tar, whether `file` holds them as they are or compressed. `file` is buffered: it is peeked
    into."""
    magic = compression(file.peek(6)[:6])
    return OPENERS[magic](file) if magic else file
