"""Which image goes into which shard: decided before anything is written, from source, seed and options alone.

So every process, every machine and every restart makes the same shards, and none waits for another.

    plan = make_plan(source, "shards/", PlanOptions(samples_per_shard=1000))
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from common.indexing.paths import UNFINISHED
from common.sampling import permutation
from common.tars.format import BLOCK
from common.writing.image_files import Rejected, encode, prepare
from common.writing.keys import make_keys, safe_name
from common.writing.sources import ImageSource, extension
from common.writing.writer import Entry, ShardJob, read_image

FORMAT = 1  # of plans and records; another number, and nothing begun by older code is gone on with
VAL, ORDER = range(2)  # what a permutation is for
NUM_MEASURED = 100  # images that --shard_size converts to learn their size


@dataclass(frozen=True)
class PlanOptions:
    """What decides the bytes of the shards, besides the source. `seed` -1 keeps the order of the source."""

    samples_per_shard: int = 1000
    shard_size: int | None = None  # bytes of a tar; replaces samples_per_shard
    name: str | None = None
    val_fraction: float | None = None
    seed: int = 0
    resize: int | None = None
    verify: str = "header"


class PlannedShard(NamedTuple):
    """A shard before it is written. `place` counts within its folder, `indices` are those of the source."""

    folder: Path
    name: str
    place: int
    indices: np.ndarray

    @property
    def tar(self) -> Path:
        return self.folder / self.name


@dataclass(frozen=True)
class ShardPlan:
    """Everything that is going to be written. `digest` identifies it: input, options, seed."""

    source: ImageSource
    out: Path
    options: PlanOptions
    keys: list[str]
    shards: list[PlannedShard]
    digest: str

    @property
    def folders(self) -> list[Path]:
        """The shard folders: OUT, or OUT/train and OUT/val."""
        return list(dict.fromkeys(shard.folder for shard in self.shards))

    @property
    def work(self) -> Path:
        """Where unfinished things live. A reader that meets this folder knows that the shards are not complete."""
        return self.out / UNFINISHED

    @property
    def mark(self) -> str:
        """The file in it that says whose work it is."""
        return f"plan-{self.digest}"

    def job(self, number: int) -> ShardJob:
        """All that is needed to write shard `number` of the plan."""
        entries = [self._entry(index) for index in self.shards[number].indices.tolist()]
        shard, options = self.shards[number], self.options
        return ShardJob(shard.place, shard.tar, self.work, entries, options.verify, options.resize)

    def files(self, number: int) -> list[str | None]:
        """The files that shard `number` is made from; None for an image that is no file."""
        indices = self.shards[number].indices.tolist()
        return [self.source.content(index) if self.source.images is None else None for index in indices]

    def _entry(self, index: int) -> Entry:
        source, path, label = self.source, self.source.paths[index], self.source.labels[index]
        return Entry(source.content(index), path, self.keys[index], extension(path), label, source.category(label))


def make_plan(source: ImageSource, out: str | Path, options: PlanOptions) -> ShardPlan:
    """Plan the shards of `source`. Called by every process that takes part in writing them, with the same result."""
    out = Path(out)
    shards: list[PlannedShard] = []
    for folder, indices in _splits(source, out, options):
        if options.seed >= 0:
            indices = indices[permutation(len(indices), options.seed, ORDER)]
        stem = shard_name(folder, out, options)
        parts = list(_cut(source, indices, options))
        digits = max(4, len(str(len(parts) - 1)))  # names of one length sort as their numbers do
        names = [f"{stem}-{place:0{digits}d}.tar" for place in range(len(parts))]
        shards += [PlannedShard(folder, name, place, parts[place]) for place, name in enumerate(names)]
    keys = make_keys(source.paths)
    return ShardPlan(source, out, options, keys, shards, _digest(source, keys, options))


def shard_name(folder: Path, out: Path, options: PlanOptions) -> str:
    """What the shards of a folder are called, without their numbers: --name, or the folder's own name."""
    own = safe_name(folder.resolve().name.replace(".", "_")) or "shard"
    if options.name is None:
        return own
    return options.name if folder == out else f"{options.name}-{own}"


def _splits(source: ImageSource, out: Path, options: PlanOptions) -> list[tuple[Path, np.ndarray]]:
    """Each shard folder with its images, in the order of the source."""
    everything = np.arange(len(source.paths))
    if options.val_fraction is None or not len(everything):
        return [(out, everything)]
    val = choose_val(np.asarray(source.labels, dtype=np.int64), options.val_fraction, options.seed)
    if not len(val):
        raise UserError(f"no image is left for validation; --val_fraction {options.val_fraction} "
                        f"of {len(everything)} images; raise it")
    return [(out / "train", np.setdiff1d(everything, val)), (out / "val", val)]


def choose_val(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The images for validation, sorted: `fraction` of all, and of each class to within one image.

    Rounding is carried from class to class, so that many small classes do not lose theirs. A class
    keeps at least one image for training.
    """
    chosen, wanted, taken = [np.zeros(0, dtype=np.int64)], 0.0, 0
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted += fraction * len(members)
        num = round(wanted) - taken
        chosen.append(members[permutation(len(members), seed, VAL, int(label))[: min(num, len(members) - 1)]])
        taken += num
    return np.sort(np.concatenate(chosen))


def _cut(source: ImageSource, indices: np.ndarray, options: PlanOptions) -> Iterator[np.ndarray]:
    """Cut a list of images into shards."""
    if options.shard_size is None:
        for start in range(0, len(indices), options.samples_per_shard):
            yield indices[start : start + options.samples_per_shard]
        return
    sizes = _sample_sizes(source, indices, options)
    start, size = 0, 2 * BLOCK
    for place, sample_size in enumerate(sizes.tolist()):
        if size + sample_size > options.shard_size and place > start:
            yield indices[start:place]
            start, size = place, 2 * BLOCK
        size += sample_size
    if len(indices):
        yield indices[start:]


def _sample_sizes(source: ImageSource, indices: np.ndarray, options: PlanOptions) -> np.ndarray:
    """Bytes of each sample in a tar, headers included: exact for copied files, an average for converted ones."""
    if source.images is None and options.resize is None:
        sizes = np.array([_file_size(source.content(index)) for index in indices.tolist()], dtype=np.int64)
        return -(-sizes // BLOCK) * BLOCK + 3 * BLOCK
    measured = indices[:: max(1, len(indices) // NUM_MEASURED)].tolist()
    measured_sizes = [size for size in (_converted_size(source, index, options.resize) for index in measured) if size]
    average = sum(measured_sizes) // len(measured_sizes) if measured_sizes else 0
    return np.full(len(indices), average + BLOCK // 2 + 3 * BLOCK)


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0  # rejected when it is its turn


def _converted_size(source: ImageSource, index: int, resize: int | None) -> int:
    content = source.content(index)
    try:
        if isinstance(content, str):
            return len(prepare(read_image(content)[0], extension(content), "header", resize)[0])
        return len(encode(content, resize)[0])
    except (OSError, ValueError, Rejected):
        return 0


def _digest(source: ImageSource, keys: list[str], options: PlanOptions) -> str:
    about = [FORMAT, asdict(options), source.classes, source.num_classes, source.rejected]
    digest = hashlib.sha256(json.dumps(about).encode())
    for key, path, label in zip(keys, source.paths, source.labels, strict=True):
        digest.update(f"{key}\0{path}\0{label}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
