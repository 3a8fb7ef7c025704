"""A clean shard, written sample by sample from what could be saved of another: `check_shards --fix` uses it.

Members stand together and in order, keys hold nothing that a reader could stumble over, the index is beside the tar.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from common.fields import RawSample, SampleError
from common.tars.format import BLOCK
from common.tars.index import write_index
from common.tars.samples import Member, Sample
from common.writing.shard_plan import make_keys
from common.writing.writer import header

MAX_NAME_BYTES = 100  # of a ustar header


class CleanShard:
    """`folder`/`name`.tar, under that name once it is finished."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / f"{name.replace('/', '-')}.tar"
        self._unfinished = folder / f".{self.path.name}.{os.getpid()}.unfinished"
        self._file = open(self._unfinished, "wb", buffering=1 << 20)
        self._samples: list[Sample] = []
        self._keys: set[str] = set()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def add(self, sample: RawSample) -> None:
        """Append a sample with all its fields. Raises SampleError where a field's name is too long for a header."""
        key = self._new_key(sample.key)
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
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _new_key(self, key: str) -> str:
        mended = make_keys([f"{key}.x"])[0]
        number, unique = 1, mended
        while unique in self._keys:
            number += 1
            unique = f"{mended}-{number}"
        return unique


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
