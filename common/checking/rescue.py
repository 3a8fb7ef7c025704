"""A clean shard, written sample by sample from what could be saved of another: `check_shards --fix` uses it.

Members stand together and in order, keys hold nothing that a reader could stumble over, the index is beside the tar.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from common.fields import RawSample, SampleError
from common.tars.format import BLOCK
from common.tars.index import write_index
from common.tars.samples import Member, Sample
from common.writing.keys import make_keys, unused
from common.writing.writer import header

MAX_NAME_BYTES = 100  # of a ustar header


class CleanShard:
    """The tar `path`, under that name once it is finished. Raises OSError where it cannot be written."""

    def __init__(self, path: Path):
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        self._file = open(self._unfinished, "wb", buffering=1 << 20)
        self._samples: list[Sample] = []
        self._keys: set[str] = set()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def add(self, sample: RawSample) -> None:
        """Append a sample with all its fields. Raises SampleError where a field's name is too long for a header."""
        key = unused(make_keys([f"{sample.key}.x"])[0], self._keys)
        names = {f"{key}.{'_'.join(extension.split())}": bytes(data) for extension, data in sample.fields.items()}
        if len(names) < len(sample.fields) or any(len(_encoded(name)) > MAX_NAME_BYTES for name in names):
            raise SampleError("not saved", "the names of its fields are too long")
        members = []
        for name, data in names.items():
            if name.endswith(".json"):
                data = _counted(data, len(self._samples))
            self._file.write(header(_encoded(name), len(data)))
            members.append(Member(name[len(key) + 1 :], self._file.tell(), len(data), name))
            self._file.write(data)
            self._file.write(bytes(-len(data) % BLOCK))
        self._samples.append(members)
        self._keys.add(key)

    def finish(self) -> int:
        """Give the shard its name and write its index; a shard without samples is left out. Returns its bytes."""
        self._file.write(bytes(2 * BLOCK))
        num_bytes = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if not self._samples:
            return 0
        os.replace(self._unfinished, self.path)
        write_index(self.path, self._samples)
        return num_bytes

    def discard(self) -> None:
        """Remove what is not finished."""
        with suppress(OSError):  # what is still to be written has no place on a full disk
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "replace")


def _counted(data: bytes, count: int) -> bytes:
    """The json that this project's writer leaves says which sample of its shard it belongs to: that may have
    changed."""
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(meta, dict) or not isinstance(meta.get("count"), int) or "write worker id" not in meta:
        return data
    return json.dumps({**meta, "count": count}).encode()
