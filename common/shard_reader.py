"""Read any sample of any shard by its position: one `pread`, no pass over the tar.

    >>> reader = ShardReader(ShardIndex.open(["shards/train"]))
    >>> reader.read(0, 17).key
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable

from common import tar_index
from common.errors import UserError
from common.fields import RawSample
from common.shards import ShardIndex, load_samples

MAX_OPEN = 32  # files open at a time; a new one costs 0.02 ms
MAX_INDEXES = 256  # shards whose index is kept in memory
MAX_GAP = 1 << 16  # bytes between two members that are read along rather than in a call of their own


class ShardReader:
    """One for each process that reads. Keeps a bounded number of files and of indexes open, the latest used."""

    def __init__(self, index: ShardIndex):
        self.index = index
        self._files: OrderedDict[int, int] = OrderedDict()
        self._samples: OrderedDict[int, list[tar_index.Sample]] = OrderedDict()
        self._buffer = bytearray(1 << 20)

    def read(self, shard: int, place: int) -> RawSample:
        """Sample number `place` of a shard. Its bytes are views of one buffer, valid until the next read."""
        members = self._members(shard)[place]
        start = min(member.offset for member in members)
        stop = max(member.offset + member.size for member in members)
        if stop - start > sum(member.size for member in members) + MAX_GAP * len(members):
            data = {m.extension.lower(): bytes(self._read(shard, m.offset, m.offset + m.size)) for m in members}
        else:
            view = self._read(shard, start, stop)
            data = {m.extension.lower(): view[m.offset - start : m.offset - start + m.size] for m in members}
        return RawSample(self.index.names[shard], place, tar_index.split_name(members[0].name)[0], data)

    def _read(self, shard: int, start: int, stop: int) -> memoryview:
        size = stop - start
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        done = 0
        while done < size:
            num_bytes = os.preadv(self._file(shard), [view[done:]], start + done)
            if not num_bytes:
                raise UserError(f"the tar became shorter while it was read; shard {self.index.paths[shard]}; write or copy it again")
            done += num_bytes
        return view

    def _members(self, shard: int) -> list[tar_index.Sample]:
        samples = self._samples.get(shard)
        if samples is None:
            samples = load_samples(self.index.paths[shard])
            if len(samples) != self.index.sizes[shard]:
                raise UserError(f"{self.index.sizes[shard]} samples were promised, the tar holds {len(samples)}; "
                                f"shard {self.index.paths[shard]}; it was cut or changed: write or copy it again")
            self._samples[shard] = samples
            _drop_oldest(self._samples, MAX_INDEXES)
        self._samples.move_to_end(shard)
        return samples

    def _file(self, shard: int) -> int:
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = _open(self.index.paths[shard])
            for closed in _drop_oldest(self._files, MAX_OPEN):
                os.close(closed)
        self._files.move_to_end(shard)
        return file

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __getstate__(self) -> ShardIndex:
        return self.index  # a copy in another process opens its own files

    def __setstate__(self, index: ShardIndex) -> None:
        self.__init__(index)  # type: ignore[misc]


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"a shard cannot be read ({error.strerror}) on {os.uname().nodename}; {path}; "
                        "every node needs every shard under the same path") from None


def _drop_oldest(cache: OrderedDict, limit: int) -> Iterable:
    return [cache.popitem(last=False)[1] for _ in range(len(cache) - limit)]
