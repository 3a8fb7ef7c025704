"""What is in a shard folder: which tars, how many samples in each, which classes.

Everything else stands on this: sampling needs the sizes, the model the number of classes, a resumed
run the digest. What `info.json` lacks is found by scanning, once, and kept beside the shards.

    >>> index = ShardIndex.open(["shards/train"])
    >>> index.num_samples, index.num_classes
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.access.storage import Storage
from common.access.urls import is_command, is_remote, shown
from common.errors import UserError
from common.fields import Fields
from common.indexing.folders import basename, folder_of, folders_of, promised_of, promised_through_cache, read_any_info
from common.indexing.info import INFO, Info, check_totals, description, write_info
from common.indexing.paths import expand, gaps, shard_names
from common.indexing.scan import Scan, ScanJob, first_image_field, scan_shard
from common.processes import available_cpus, run_jobs
from common.tars.samples import has_end_mark

ScanProgress = Callable[[Iterable[Any], int], Iterable[Any]]  # wraps what takes long, such as tqdm


@dataclass(frozen=True)
class ShardIndex:
    """A data set of tar shards. Small: its members are per shard, never per sample."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    sizes: np.ndarray  # int64, (shards,): samples in each
    num_classes: int
    classes: tuple[str, ...] | None = None
    storage: Storage = Storage()
    bytes_digest: str | None = None  # of the tars' lengths; None where one of them is not known
    first_image: str | None = None  # the field that holds the image in the first sample; None where nobody asked

    @classmethod
    def open(cls, patterns: Sequence[str], fields: Fields | None = None, progress: ScanProgress | None = None,
             storage: Storage | None = None, labels: bool = True) -> ShardIndex:
        """Read or make the index of the tars that `patterns` name. Called by rank 0, which broadcasts the result.

        Raises UserError for a missing, torn or contradictory shard; for a torn sample too, unless `storage` skips
        errors, as far as tars have to be scanned. `progress` wraps that scan. Without `labels`, samples need not have
        any: nobody asks for the number of classes, and the index may have 0.
        """
        storage = storage or Storage()
        storage.clean()
        paths = expand(patterns, storage)
        _warn_of_gaps(paths)
        infos = {folder: read_any_info(path, storage) for folder, path in folders_of(paths).items()}
        storage = replace(storage, promised=promised_through_cache(paths, infos, storage))
        lengths = _lengths(paths, infos)
        sizes = _known_sizes(paths, infos, lengths)
        num_classes, classes = known_classes(infos)
        labels = labels and not num_classes  # they are what has to be looked for
        unknown = np.arange(len(paths)) if labels else np.flatnonzero(sizes < 0)
        _check_scannable([paths[i] for i in unknown], storage)
        jobs = [ScanJob(paths[i], storage, (fields or Fields()) if labels else None, not storage.skip_errors)
                for i in unknown]
        scans = _scan(jobs, progress)
        sizes[unknown] = [scan.num_samples for scan in scans]
        if storage.skip_errors:
            sizes = np.maximum(sizes, _promised_sizes(paths, infos))  # what a torn shard has lost is skipped, not gone
        check_totals(infos, zip(map(folder_of, paths), map(basename, paths), sizes.tolist(), strict=True),
                     storage.skip_errors)
        if not sizes.sum():
            raise UserError(f"no samples; all {len(paths)} shards of {shown(patterns[0])} are empty; write them anew")
        if labels:
            num_classes, classes = _found_classes(scans, paths)
        first = [paths[i] for i in np.flatnonzero(sizes)[:1]] if fields and not fields.image_field else []
        index = cls(tuple(paths), tuple(shard_names(paths)), sizes, num_classes, classes, storage,
                    _bytes_digest(paths, lengths), first_image_field(first, storage))
        if scans and num_classes and not any(info.path for info in infos.values()) and _are_whole(scans, paths):
            _keep_info(index)
        return index

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    def check_count(self, shard: int, found: int, fault: str = "") -> str:
        """What to say of the samples that a shard has lost, where it gave `found`, because of `fault` if that is known.

        Raises UserError where nothing may be lost, since errors are not skipped, and for more than were promised.
        """
        promised = int(self.sizes[shard])
        counts = f"{promised} samples were promised, the tar gave {found}"
        if found > promised or found < promised and not self.storage.skip_errors:
            raise UserError(f"{counts}; shard {shown(self.paths[shard])}; it was cut or changed: write or copy it "
                            "again")
        return fault or counts

    @cached_property
    def digest(self) -> str:
        """Identity of the data: changes when a shard is added, removed, renamed or has more or fewer samples."""
        return _digest([self.names, self.sizes.tolist(), self.num_classes])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _lengths(paths: Sequence[str], infos: dict[str, Info]) -> list[int | None]:
    """The bytes of each shard, of a remote one as info.json says."""
    return [promised_of(path, infos).num_bytes if is_remote(path) else os.path.getsize(path) for path in paths]


def _bytes_digest(paths: Sequence[str], lengths: Sequence[int | None]) -> str | None:
    """Tells other images under the same names and numbers: by the lengths of the tars.

    Where one is compressed or not known it is None: the same data may be compressed otherwise elsewhere.
    """
    if None in lengths or not all(path.endswith(".tar") for path in paths):
        return None
    return _digest(list(lengths))


def _promised_sizes(paths: Sequence[str], infos: dict[str, Info]) -> np.ndarray:
    """Samples per shard as info.json has them, -1 where it does not."""
    return np.array([promised_of(path, infos).samples or -1 for path in paths], np.int64)


def _known_sizes(paths: Sequence[str], infos: dict[str, Info], lengths: Sequence[int | None]) -> np.ndarray:
    """Samples per shard as info.json has them, -1 where it does not, or where the tar is of another size than it
    says."""
    sizes = np.full(len(paths), -1, dtype=np.int64)
    for i, path in enumerate(paths):
        samples, num_bytes = promised_of(path, infos)
        if samples is not None and num_bytes == lengths[i]:
            sizes[i] = samples
    return sizes


def _check_scannable(paths: Sequence[str], storage: Storage) -> None:
    """Raise UserError for a remote shard of which nothing is known: nothing is assumed, and nothing read through just
    to count."""
    for path in paths:
        if is_remote(path) and not is_command(path) and not storage.cache_dir:
            storage.open(path).close()  # where there is no such thing, this says so
            raise UserError(f"nobody says how many samples and classes are in a shard; {shown(path)}; "
                            f"put the {INFO} that common.make_shards writes beside it, or give --cache_dir to have it "
                            "counted")


def _scan(jobs: list[ScanJob], progress: ScanProgress | None) -> list[Scan]:
    """Several processes where there is enough to do: a scan is Python work, 6 µs a member, and waiting for the disk."""
    numbered = run_jobs(scan_shard, enumerate(jobs), min(available_cpus(), 16) if len(jobs) >= 32 else 0)
    done = dict((progress or (lambda items, total: items))(numbered, len(jobs))) if jobs else {}
    return [done[number] for number in range(len(jobs))]


def known_classes(infos: dict[str, Info]) -> tuple[int, tuple[str, ...] | None]:
    """The number of classes and their names as all folders have them; 0 and None where none does. Raises UserError if
    they differ."""
    classes = _agree("classes", [info.classes for info in infos.values() if info.classes])
    num_classes = _agree("num_classes", [info.num_classes for info in infos.values() if info.num_classes])
    if classes and num_classes and len(classes) != num_classes:
        raise UserError(f"shard folders differ: {num_classes} classes and {len(classes)} names; --shard_path; train on "
                        "folders of the same classes")
    return num_classes or len(classes or ()), classes


def _agree(name: str, values: list[Any]) -> Any:
    if len(set(values)) > 1:
        raise UserError(f"shard folders differ in {name}: {str(values[0])[:80]} and {str(values[1])[:80]}; "
                        "--shard_path; "
                        "train on folders of the same classes")
    return values[0] if values else None


def _found_classes(scans: list[Scan], paths: Sequence[str]) -> tuple[int, tuple[str, ...] | None]:
    """The number of classes, and their names where every one has been seen with a name."""
    labels = set().union(*(scan.labels for scan in scans))
    if not labels:
        scan, path = next((scan, path) for scan, path in zip(scans, paths, strict=True) if scan.error)
        is_there = "found the fields" in str(scan.error)
        raise UserError(f"no sample has a label: {scan.error}; shard {shown(path)}; "
                        + ("give --label_field one of the fields that are there" if is_there else "mend the shards"))
    path = next(path for scan, path in zip(scans, paths, strict=True) if max(scan.labels, default=0) == max(labels))
    return classes_of(labels, {label: name for scan in scans for label, name in scan.names.items()}, path)


def classes_of(labels: Collection[int], names: Mapping[int, str], path: str) -> tuple[int, tuple[str, ...] | None]:
    """The number of classes, and their names where every one has been seen with a name. Raises UserError for a largest
    label, of the shard `path`, that would make a model of classes which nobody has seen."""
    num_classes = max(labels) + 1
    if num_classes > 1000 + 10 * len(labels):
        raise UserError(f"a label of {num_classes - 1} among {len(labels)} different ones; shard {shown(path)}; "
                        f"mend it, or say in {INFO} what num_classes is")
    return num_classes, tuple(names[i] for i in range(num_classes)) if set(names) >= set(range(num_classes)) else None


def _warn_of_gaps(paths: Sequence[str]) -> None:
    missing = gaps(paths)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        print(f"warning: the numbers of the shards have a gap; {shown(missing[0])}{more} not there; copy it again if "
              "that is not meant",
              file=sys.stderr, flush=True)


def _are_whole(scans: list[Scan], paths: Sequence[str]) -> bool:
    """Whether what was counted may be kept. Not of a tar that may have been cut: that is told at each start."""
    return not any(scan.is_torn for scan in scans) and all(
        is_remote(path) or not path.endswith(".tar") or has_end_mark(path) for path in paths)


def _keep_info(index: ShardIndex) -> None:
    folders = {folder_of(path) for path in index.paths}
    folder = folders.pop()
    if folders or not os.path.isdir(folder) or len(expand([folder])) != len(index.paths):
        return
    if not Path(folder, INFO).exists():
        shards = [(os.path.basename(path), int(size), os.path.getsize(path))
                  for path, size in zip(index.paths, index.sizes, strict=True)]
        write_info(folder, description(shards, index.num_classes, index.classes))
