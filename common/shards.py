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
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from common import tar_index
from common.errors import UserError
from common.fields import Fields, SampleError
from common.shard_paths import expand, shard_names

Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # wraps what takes long, such as tqdm


@dataclass(frozen=True)
class ShardIndex:
    """A data set of tar shards. Small: its members are per shard, never per sample."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    sizes: np.ndarray  # int64, (shards,): samples in each
    num_classes: int
    classes: tuple[str, ...] | None = None

    @classmethod
    def open(cls, patterns: Sequence[str], fields: Fields | None = None, progress: Progress | None = None) -> ShardIndex:
        """Read or make the index of the tars that `patterns` name. Called by rank 0, which broadcasts the result.

        Raises UserError for a missing, torn or contradictory shard. `progress` wraps the scan of tars without an index.
        """
        paths = expand(patterns)
        infos = {folder: _read_info(folder) for folder in dict.fromkeys(os.path.dirname(path) or "." for path in paths)}
        sizes = _count(paths, infos, progress or (lambda items, total: items))
        _check_totals(paths, sizes, infos)
        if not sizes.sum():
            raise UserError(f"no samples; all {len(paths)} shards of {patterns[0]} are empty; write them anew")
        classes = _agree("classes", [tuple(info["classes"]) for info in infos.values() if info.get("classes")])
        num_classes = _agree("num_classes", [int(info["num_classes"]) for info in infos.values() if info.get("num_classes")])
        index = cls(tuple(paths), tuple(shard_names(paths)), sizes, num_classes or len(classes or ()), classes)
        if index.num_classes:
            return index
        return _with_classes(index, fields or Fields())

    @property
    def num_samples(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def digest(self) -> str:
        """Identity of the data: changes when a shard is added, removed, renamed or of another size."""
        text = json.dumps([self.names, self.sizes.tolist(), self.num_classes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_samples(path: str) -> list[tar_index.Sample]:
    """Where each sample of one tar lies: from the index beside it, else by a scan that is kept where it can be."""
    samples = tar_index.read_index(path)
    if samples is None:
        samples = tar_index.scan_tar(path)
        try:
            tar_index.write_index(path, samples)
        except OSError:
            pass  # a read-only folder: every process that needs this shard scans it for itself
    return samples


def _count(paths: Sequence[str], infos: dict[str, dict], progress: Progress) -> np.ndarray:
    """Samples per shard: what info.json says of a tar of that very size, else counted."""
    known = {os.path.join(folder, entry["name"]): entry for folder, info in infos.items() for entry in info.get("shards", [])}
    sizes = np.full(len(paths), -1, dtype=np.int64)
    for i, path in enumerate(paths):
        entry = known.get(os.path.join(os.path.dirname(path) or ".", os.path.basename(path)))
        if entry and entry.get("bytes") == os.path.getsize(path):
            sizes[i] = entry["samples"]
    unknown = np.flatnonzero(sizes < 0)
    for i, size in zip(unknown, progress(_map(_count_one, [paths[i] for i in unknown]), len(unknown)), strict=True):
        sizes[i] = size
    return sizes


def _count_one(path: str) -> int:
    return len(load_samples(path))


def _map(function: Callable[[str], int], paths: list[str]) -> Iterable[int]:
    """Several processes where there is enough to do: a scan is Python work, 0.05 ms a member."""
    if len(paths) < 32 or (os.cpu_count() or 1) < 2:
        yield from map(function, paths)
        return
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("fork")) as pool:
        yield from pool.map(function, paths, chunksize=4)


def _read_info(folder: str) -> dict:
    """The first *.json of a folder that describes shards; {} without one. Broken or of another shape: UserError."""
    for path in sorted(Path(folder).glob("*.json")):
        try:
            info = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"not readable as JSON ({error}); {path}; mend it, or remove it and it is made anew") from None
        if not isinstance(info, dict) or not {"dataset size", "num_classes", "shards"} & set(info):
            continue
        try:
            for key in ("dataset size", "num_classes"):
                info[key] = int(info[key]) if info.get(key) is not None else None
            info["shards"] = [{"name": str(s["name"]), "samples": int(s["samples"]), "bytes": s.get("bytes")} for s in info.get("shards") or []]
            info["classes"] = [str(name) for name in info.get("classes") or []]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"not a description of shards ({error!r}); {path}; mend it, or remove it and it is made anew") from None
        return info
    return {}


def _check_totals(paths: Sequence[str], sizes: np.ndarray, infos: dict[str, dict]) -> None:
    """Hold what was counted against what info.json promises: the only sign of a tar cut between two members."""
    for folder, info in infos.items():
        found = {os.path.basename(p): int(n) for p, n in zip(paths, sizes, strict=True) if (os.path.dirname(p) or ".") == folder}
        for entry in info.get("shards", []):
            name, samples = entry["name"], entry["samples"]
            if name in found and found[name] != samples:
                raise UserError(f"info.json promises {samples} samples, the tar holds {found[name]}; shard {folder}/{name}; "
                                "it was cut or changed: write or copy it again")
        everything = {path.name for path in Path(folder).iterdir() if path.name.endswith(".tar")} == set(found)
        gone = [entry["name"] for entry in info.get("shards", []) if not os.path.exists(os.path.join(folder, entry["name"]))]
        if everything and gone:
            raise UserError(f"info.json names a shard that is not there; {folder}/{gone[0]}; copy it again, or make the shards anew")
        total = info.get("dataset size")
        if everything and total is not None and total != sum(found.values()):
            raise UserError(f"the json promises {total} samples, the {len(found)} tars hold {sum(found.values())}; {folder}; "
                            "a tar was cut or is missing: copy the shards again, or correct `dataset size`")


def _agree(name: str, values: list) -> Any:
    if len(set(values)) > 1:
        raise UserError(f"shard folders differ in {name}: {values[0]} and {values[1]}; --shard_path; train on folders of the same classes")
    return values[0] if values else None


def _with_classes(index: ShardIndex, fields: Fields) -> ShardIndex:
    """Find the classes by reading every label, and leave an info.json where a folder has none."""
    from common.shard_reader import ShardReader  # it stands on this module

    reader, names, largest = ShardReader(index), {}, -1
    for shard, size in enumerate(index.sizes):
        for place in range(size):
            sample = reader.read(shard, place)
            try:
                label, category = fields.label(sample), fields.category(sample)
            except SampleError:
                continue  # counted, with shard and key, when training reaches it
            largest = max(largest, label)
            if category is not None:
                names[label] = category
    if largest < 0:
        fields.label(reader.read(int(np.argmax(index.sizes > 0)), 0))  # says what the first sample lacks
    classes = tuple(names[i] for i in range(largest + 1)) if set(names) == set(range(largest + 1)) else None
    found = ShardIndex(index.paths, index.names, index.sizes, largest + 1, classes)
    _keep_info(found)
    return found


def _keep_info(index: ShardIndex) -> None:
    folders = {os.path.dirname(path) or "." for path in index.paths}
    folder = folders.pop()
    if folders or _read_info(folder) or len(list(Path(folder).glob("*.tar"))) != len(index.paths):
        return
    entries = [{"name": os.path.basename(path), "samples": int(size), "bytes": os.path.getsize(path)}
               for path, size in zip(index.paths, index.sizes, strict=True)]
    info = {"dataset size": index.num_samples, "num_classes": index.num_classes, "shards": entries}
    if index.classes:
        info["classes"] = list(index.classes)
    write_info(folder, info)


def write_info(folder: str | Path, info: dict) -> None:
    """Write `info.json`, whole or not at all; a folder that cannot be written is left as it is."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".info.json.", delete=False) as file:
            json.dump(info, file, indent=1)
        os.chmod(file.name, 0o644)
        os.replace(file.name, os.path.join(folder, "info.json"))
    except OSError:
        pass
