"""Read any sample of any shard by its position: one `pread`, no pass over the tar.

    >>> reader = ShardReader(ShardIndex.open(["shards/train"]))
    >>> reader.read(0, 17).key
"""

from __future__ import annotations

import os
from collections import OrderedDict

from common.access.urls import shown
from common.errors import UserError
from common.fields import Data, RawSample, lost_sample
from common.shards import ShardIndex
from common.tars.index import load_samples
from common.tars.samples import Sample, TornTar, sample_faults, split_name

MAX_OPEN = 32  # files open at a time; a new one costs 0.02 ms
MAX_OPEN_CACHED = 2  # of a cache with a limit, where what is open cannot make room
MAX_SAMPLES = 200_000  # places that are kept in memory: 0.6 kB each
NUM_VALID = 16  # samples read last whose bytes are still there
MAX_GAP = 1 << 16  # bytes between two members that are read along rather than in a call of their own


class ShardReader:
    """One for each process that reads. Keeps a bounded number of files and of indexes open, the latest used."""

    def __init__(self, index: ShardIndex):
        self.index = index
        self._files: OrderedDict[int, int] = OrderedDict()
        self._paths: dict[int, str] = {}  # where the open ones lie
        self._samples: OrderedDict[int, list[Sample]] = OrderedDict()
        self._faults: dict[int, dict[int, str]] = {}
        self._tears: dict[int, str] = {}  # why a shard has fewer samples than promised
        self._num_samples = 0
        self._max_open = MAX_OPEN_CACHED if index.storage.cache_bytes is not None else MAX_OPEN
        self._buffers, self._turn = [bytearray(1 << 18) for _ in range(NUM_VALID)], 0

    def read(self, shard: int, place: int) -> RawSample:
        """Sample number `place` of a shard. Its bytes are views of a buffer, valid until NUM_VALID more are read."""
        self._turn = (self._turn + 1) % NUM_VALID
        samples = self._members(shard)
        if place >= len(samples):
            return lost_sample(self.index.names[shard], place, self._tears[shard])
        members = samples[place]
        start, stop, num_bytes = members[0].offset, 0, 0
        for _, offset, size, _ in members:
            start, stop, num_bytes = min(start, offset), max(stop, offset + size), num_bytes + size
        data: dict[str, Data]
        if stop - start > num_bytes + MAX_GAP * len(members):
            data = {m.extension.lower(): bytes(self._read(shard, m.offset, m.offset + m.size)) for m in members}
        else:
            view = self._read(shard, start, stop)
            data = {m.extension.lower(): view[m.offset - start : m.offset - start + m.size] for m in members}
        key = split_name(members[0].name)[0]
        return RawSample(self.index.names[shard], place, key, data, self._faults[shard].get(place))

    def _read(self, shard: int, start: int, stop: int) -> memoryview:
        size = stop - start
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = bytearray(size)
        view = memoryview(self._buffers[self._turn])[:size]
        done = 0
        while done < size:
            try:
                num_bytes = os.preadv(self._file(shard), [view[done:]], start + done)
            except OSError as error:
                raise UserError(f"a shard cannot be read ({error.strerror}) on {os.uname().nodename}; "
                                f"{shown(self.index.paths[shard])}; check the disk, and copy the shard again") from None
            if not num_bytes:
                raise UserError(f"the tar became shorter while it was read; shard {shown(self.index.paths[shard])}; "
                                "write or copy it again")
            done += num_bytes
        return view

    def _members(self, shard: int) -> list[Sample]:
        samples = self._samples.get(shard)
        if samples is None:
            self._file(shard)  # opened first: what is open stays
            samples = self._load(shard)
            self._samples[shard], self._faults[shard] = samples, sample_faults(samples)
            self._num_samples += len(samples)
            while self._num_samples > MAX_SAMPLES and len(self._samples) > 1:
                oldest, dropped = self._samples.popitem(last=False)
                self._num_samples -= len(dropped)
                del self._faults[oldest]
        self._samples.move_to_end(shard)
        return samples

    def _load(self, shard: int) -> list[Sample]:
        """As many samples as were promised; fewer only where errors are skipped and the shard is torn."""
        try:
            samples, fault = load_samples(self._paths[shard]), ""
        except TornTar as error:
            if not self.index.storage.skip_errors:
                raise
            samples, fault = error.samples, error.fault
        self._tears[shard] = self.index.check_count(shard, len(samples), fault)
        return samples

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            while len(self._files) >= self._max_open:  # closed before another is asked for: it may have to make room
                oldest, file = self._files.popitem(last=False)
                del self._paths[oldest]
                os.close(file)
            self._paths[shard], self._files[shard] = self.index.storage.acquire(self.index.paths[shard])
        self._files.move_to_end(shard)
        return self._files[shard]

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._paths.clear()

    def __getstate__(self) -> ShardIndex:
        return self.index  # a copy in another process opens its own files

    def __setstate__(self, index: ShardIndex) -> None:
        self.__init__(index)  # type: ignore[misc]
