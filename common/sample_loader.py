"""Samples with fields of your own: each goes through a function, and comes out as a tensor of a batch.

    fields = {"front.png": decode_image, "speed.json": load_json, "path.npy": load_numpy, "command.pth": load_torch}
    for batch in SampleLoader(world, ["shards/"], fields, batch_size=32):
        batch["front.png"], batch["__key__"]        # uint8 (32, 3, height, width), 32 names

The same sources as in training read them: the three sampling modes and their promises, ranks, workers, one line for
what is wrong. Nothing in a shard is executed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from common.access.storage import Storage
from common.assembly import make_source, open_shards
from common.batch_dataset import BatchDataset
from common.collate import MadePiece
from common.dataset import ExactSource, Keyed, Source
from common.distributed import World
from common.errors import UserError, printable
from common.fields import Fields, RawSample, SampleError
from common.images.decode import decode_image
from common.indexing.reader import ShardReader
from common.loader import Loader, checked
from common.mixing import Mix, Piece
from common.plan import Plan
from common.sampling import Progress, Step
from common.shards import ShardIndex
from common.transforms import ImageTransform

__all__ = ["SampleLoader", "decode_image", "load_json", "load_numpy", "load_torch"]

Functions = Mapping[str, Callable[[bytes], Any]]


def load_json(data: bytes) -> Any:
    """Numbers, strings, lists and dicts."""
    return json.loads(data)


def load_numpy(data: bytes) -> np.ndarray:
    """One array of numbers as `np.save` writes it. Raises ValueError for one of objects, which would have to be run."""
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def load_torch(data: bytes) -> Any:
    """Tensors and plain containers as `torch.save` writes them. Whatever else would have to be run raises."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@dataclass
class SampleLoader:
    """Iterate once, on every rank alike: a dict per step of all epochs.

    `fields` maps what follows the key in a member's name, lower-case, to a function of its bytes. The values of
    a batch are put together by torch's `default_collate`. Beside them a batch has `__shard__`, `__count__`, `__key__`
    (lists, one entry a sample) and `__step__`, after which `progress` may go on. A rank without a sample in the last
    batch of an exact epoch gets tensors of length 0. Raises UserError that names shard, key and field.
    """

    world: World
    shards: Sequence[str]
    fields: Functions
    batch_size: int = 64  # of one rank
    num_workers: int = 2
    sampling: str = "exact"
    num_epochs: int = 1
    seed: int = 0
    shuffle: int = 5000
    epoch_samples: int | None = None
    progress: Progress = field(default_factory=Progress)
    storage: Storage = field(default_factory=Storage)

    @cached_property
    def index(self) -> ShardIndex:
        """What is in the shards; every rank asks for it, rank 0 reads it."""
        return open_shards(self.world, self.shards, None, self.storage, self.sampling == "exact")

    @cached_property
    def plan(self) -> Plan:
        """Steps per epoch and more, for these shards and this world."""
        return Plan.make(
            self.index, sampling=self.sampling, mix="none", seed=self.seed, shuffle=self.shuffle,
            epoch_samples=self.epoch_samples, batch_size=self.batch_size, world_size=self.world.size,
            num_workers=self.num_workers, num_epochs=self.num_epochs, max_steps=None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        source = make_source(self.plan, self.index, self.world.rank, self.progress)
        num_workers = self.plan.workers_of(self.world.rank)
        mixing = Mix("none", self.batch_size, max(num_workers, 1), self.seed)
        dataset = FieldDataset(source, mixing, self.fields)
        made = Loader(dataset, num_workers, timeout_seconds=self.storage.timeout_seconds).made()
        try:
            for batch in map(checked, made):
                assert isinstance(batch, MadeFields)
                yield {**batch.values, "__shard__": batch.shard, "__count__": batch.count, "__key__": batch.key,
                       "__step__": batch.step}
        except UserError as error:
            raise self.world.own_error(error) from None
        finally:
            made.close()


@dataclass
class MadeFields(MadePiece):
    """A worker's batch, whole: unlike images, its tensors are as large as they happen to be."""

    values: dict[str, Any] = field(default_factory=dict)


class FieldDataset(BatchDataset):
    """Applies the functions to the samples of a source. Iterated by every worker, or by the main process."""

    kind = MadeFields

    def __init__(self, source: Source, mixing: Mix, functions: Functions):
        super().__init__(source, mixing, Fields(), ImageTransform())
        self.functions = functions

    def _fill(self, made: MadePiece, piece: Piece, samples: Iterable[Keyed], worker: int, number: int) -> None:
        """Apply the functions to each sample, and put together what they make."""
        assert isinstance(made, MadeFields)
        values = []
        for _, sample in samples:
            values.append(self._read(sample))
            made.shard.append(sample.shard)
            made.count.append(sample.count)
            made.key.append(sample.key)
        made.values = self._joined(values, made) if values else self._empty()

    def _read(self, sample: RawSample) -> dict[str, Any]:
        values = {}
        try:
            sample.check()
            for name, function in self.functions.items():
                if name not in sample.fields:
                    raise SampleError("no such field", f"{name}, found the fields "
                                      f"{printable(', '.join(sorted(sample.fields)))}")
                values[name] = function(bytes(sample.fields[name]))
        except Exception as error:  # whatever a function makes of bytes that are not for it
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            if not isinstance(error, SampleError):
                reason = f"{name} cannot be read ({type(error).__name__}: {reason})"
            raise UserError(f"{reason}; shard {sample.shard}, key {printable(sample.key)}, count {sample.count}; "
                            "mend the shard, or the function of this field") from None
        return values

    def _joined(self, values: list[dict[str, Any]], made: MadeFields) -> dict[str, Any]:
        joined = {}
        for name in self.functions:
            try:
                joined[name] = default_collate([value[name] for value in values])
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                reason = str(error).strip().splitlines()[0][:160]
                raise UserError(f"the values of {name} make no batch ({reason}); shard {made.shard[0]}, "
                                f"key {printable(made.key[0])} and {len(made.key) - 1} others; "
                                "give the field a function that makes them alike") from None
        return joined

    def _empty(self) -> dict[str, Any]:
        """A batch without samples, of the shapes that the first sample of all has."""
        assert isinstance(self.source, ExactSource)
        reader, made = ShardReader(self.source.index), MadeFields(0, Step(0, 0, 0, 0, 0), 0)
        sample = reader.read(int(np.flatnonzero(self.source.index.sizes)[0]), 0)
        made.shard, made.key = [sample.shard], [sample.key]
        values = self._joined([self._read(sample)], made)
        reader.close()
        return _emptied(values)


def _emptied(value: Any) -> Any:
    """What `default_collate` made of one sample, with its tensors and its lists of texts cut to nothing."""
    if isinstance(value, dict):
        return {name: _emptied(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor) or isinstance(value[0], str | bytes):
        return value[:0]
    return [_emptied(item) for item in value]
