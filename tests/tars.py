"""Tars as people make them, and as they should not."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from common.dataset import EpochPlan, StreamSource
from common.fields import RawSample
from common.indexing.reader import ShardReader
from common.mixing import Mix
from common.shards import ShardIndex
from common.tars.samples import Sample, walk_tar
from tests.helpers import jpeg

Files = Iterable[tuple[str, bytes]]


def scan_tar(path: str | Path) -> list[Sample]:
    """The samples of a tar in order, whether it has an end mark or not."""
    return walk_tar(path)[0]


def write_tar(path: Path, files: Files, mode: str = "w", format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar of these files, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=format) as tar:  # type: ignore[call-overload]
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def files(keys: Iterable[str], image: str = "jpg", label: str = "json") -> list[tuple[str, bytes]]:
    """Image and label of each key, small and readable."""
    found = []
    for number, key in enumerate(keys):
        found.append((f"{key}.{image}", jpeg(number % 2, number)))
        found.append((f"{key}.{label}", json.dumps({"label": number % 2}).encode() if label == "json"
                      else b"%d" % (number % 2)))
    return found


def index_of(*paths: Path, sizes: list[int] | None = None, num_classes: int = 2) -> ShardIndex:
    """An index that believes `sizes`."""
    return ShardIndex(tuple(map(str, paths)), tuple(path.name.removesuffix(".tar") for path in paths),
                      np.array(sizes, dtype=np.int64), num_classes)


def by_position(index: ShardIndex) -> list[RawSample]:
    """Everything that exact sampling would read, with its bytes copied."""
    reader = ShardReader(index)
    found = []
    for shard, size in enumerate(index.sizes):
        for place in range(size):
            sample = reader.read(shard, place)
            sample.fields = {name: bytes(data) for name, data in sample.fields.items()}
            found.append(sample)
    reader.close()
    return found


def by_stream(index: ShardIndex) -> list[RawSample]:
    """One pass of split sampling on one rank with one worker, in the shards' order."""
    plan = EpochPlan(index.num_samples, 1, 1, rank=0, world_size=1, seed=0, window=-1, drop_last=True)
    pieces = StreamSource(index, plan, resampled=False).pieces(0, 1, Mix("none", 1, 1, 0))
    return [sample for _, samples in pieces for _, sample in samples]


def write_two_kinds(folder: Path) -> Path:
    """Two shards of six: the first sample has a bmp, some have a png alone, others both, with other pixels."""
    for shard in range(2):
        members = []
        for number in range(6 * shard, 6 * shard + 6):
            for kind in ("bmp",) if number == 0 else ("png",) if number % 4 == 1 else ("png", "bmp"):
                buffer = io.BytesIO()
                Image.new("RGB", (40, 40), (20 * number, 200 if kind == "png" else 0, 0)).save(buffer, kind)
                members.append((f"{number:02d}.{kind}", buffer.getvalue()))
            members.append((f"{number:02d}.cls", b"%d" % (number % 2)))
        write_tar(folder / f"t-{shard}.tar", members)
    return folder
