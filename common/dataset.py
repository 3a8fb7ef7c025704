"""The data sets of the three sampling modes: what each loader worker reads, step by step.

`exact` reads by position from the index; `split` and `resampled` are webdataset pipelines. Both hand
compressed samples to the same decoding, which writes pixels into the shared ring.

    >>> plan = EpochPlan(index.num_samples, global_batch=64, num_epochs=1, rank=0, world_size=1, seed=0, window=5000)
    >>> source = ExactSource(index, plan)
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import IterableDataset, get_worker_info

from common import sampling
from common.access.urls import shown
from common.collate import Made, SkippedSample, as_images
from common.coverage import split_order
from common.errors import UserError
from common.fields import Fields, RawSample, SampleError, lost_sample
from common.images.remarks import remarks
from common.indexing.reader import NUM_VALID, ShardReader
from common.mixing import Mix, Piece, Row
from common.sampling import AUGMENT, BUFFER, Progress, Step, mix
from common.shards import ShardIndex
from common.tars.index import TornTar
from common.tars.stream import stream_samples
from common.transforms import ImageTransform, Prepared

Keyed = tuple[int, RawSample]  # the hash that all randomness of this sample's augmentation comes from, and the sample


class Ready(NamedTuple):
    """A sample before its pixels are made, or why they cannot be, and where they go."""

    slot: int
    row: Row
    sample: RawSample
    label: int
    prepared: Prepared | Exception


@dataclass(frozen=True)
class EpochPlan:
    """Which steps there are and which part of them is this rank's. `window` is what --shuffle says, in samples."""

    num_samples: int  # what an epoch counts
    global_batch: int
    num_epochs: int
    rank: int
    world_size: int
    seed: int
    window: int
    drop_last: bool = False
    progress: Progress = Progress()

    def steps(self) -> Iterator[Step]:
        """Every step that is left of the run."""
        return sampling.steps(self.num_samples, self.global_batch, self.num_epochs, self.progress, self.drop_last)


class Source(Protocol):
    """Where samples come from. Picklable: workers hold copies."""

    plan: EpochPlan

    def steps(self) -> Iterator[Step]:
        """The steps in which this rank takes part."""

    def pieces(self, worker: int, num_workers: int, mixing: Mix) -> Iterator[tuple[Piece, Iterable[Keyed]]]:
        """What worker number `worker` of the loader makes, in order. Its samples are to be taken one at a time."""


@dataclass
class ExactSource:
    """Every sample once per epoch, by position. With `whole_batches` a batch goes whole to rank t % world size."""

    index: ShardIndex
    plan: EpochPlan
    whole_batches: bool = False

    def steps(self) -> Iterator[Step]:
        """The steps in which this rank takes part."""
        plan = self.plan
        return (s for s in plan.steps() if not self.whole_batches or s.step % plan.world_size == plan.rank)

    def pieces(self, worker: int, num_workers: int, mixing: Mix) -> Iterator[tuple[Piece, Iterable[Keyed]]]:
        """Of this rank's steps, every `num_workers`-th."""
        reader, order, plan = ShardReader(self.index), None, self.plan
        for step in itertools.islice(self.steps(), worker, None, num_workers):
            if order is None or order.epoch != step.epoch:
                order = sampling.EpochOrder(self.index.sizes, plan.window, plan.seed, step.epoch)
            start, stop = (step.start, step.stop) if self.whole_batches else step.part(plan.rank, plan.world_size)
            rows = [(step.global_step, row) for row in range(stop - start)]
            yield Piece(step.global_step, step, rows), self._read(reader, order, start, stop)

    def _read(self, reader: ShardReader, order: sampling.EpochOrder, start: int, stop: int) -> Iterator[Keyed]:
        for position, (shard, place) in zip(range(start, stop), order.locate(start, stop).tolist(), strict=True):
            yield mix(self.plan.seed, order.epoch, position, AUGMENT), reader.read(shard, place)


@dataclass
class StreamSource:
    """`split` and `resampled`: each worker streams its own shards through a webdataset pipeline, an epoch at a time."""

    index: ShardIndex
    plan: EpochPlan
    resampled: bool

    def steps(self) -> Iterator[Step]:
        """The steps of the plan: every rank takes part in all."""
        return self.plan.steps()

    def pieces(self, worker: int, num_workers: int, mixing: Mix) -> Iterator[tuple[Piece, Iterable[Keyed]]]:
        """The pieces of this worker; those before the plan's progress are read again and thrown away undecoded."""
        done = self.plan.progress
        begin = done.global_step - done.step + mixing.group_start(done.step)
        replay = replace(self.plan, progress=Progress(done.epoch, 0, done.global_step - done.step, 0))
        me = (begin * mixing.pieces_per_step + worker) % num_workers  # DataLoader begins with its worker 0
        for epoch, steps in itertools.groupby(replay.steps(), key=lambda step: step.epoch):
            samples = self._stream(epoch, me, num_workers)
            for piece in itertools.chain.from_iterable(mixing.pieces(group) for group in mixing.groups(steps)):
                if piece.number % num_workers != me:
                    continue
                taken = itertools.islice(samples, len(piece.rows))
                if piece.step.global_step < begin:
                    _exhaust(taken)
                else:
                    yield piece, self._complete(taken, len(piece.rows))

    def _stream(self, epoch: int, worker: int, num_workers: int) -> Iterator[Keyed]:
        """An endless stream of one worker's samples: the pipeline of this epoch, repeated."""
        plan = self.plan
        seed = mix(plan.seed, epoch, BUFFER, plan.rank, worker)
        if self.resampled and plan.window >= 0:
            filled = [str(number) for number in np.flatnonzero(self.index.sizes)]
            shards = [wds.ResampledShards(filled, deterministic=True, worker_seed=partial(int, seed))]
        else:
            order = split_order(self.index.sizes, plan.window, plan.seed, epoch)
            dealt = partial(_dealt, place=(plan.rank, plan.world_size, worker, num_workers))
            shards = [wds.SimpleShardList([str(number) for number in order]), dealt]
        pipeline = wds.DataPipeline(
            *shards,
            partial(_read_shards, index=self.index),
            _buffer(plan.window, seed),
        ).repeat()
        for number, sample in enumerate(_explained(pipeline, plan.rank, worker)):
            yield mix(seed, number, AUGMENT), sample

    def _complete(self, samples: Iterator[Keyed], size: int) -> Iterator[Keyed]:
        missing = size
        for sample in samples:
            missing -= 1
            yield sample
        if missing:
            raise UserError(f"a loader worker of rank {self.plan.rank} has no samples; {len(self.index.paths)} shards; "
                            "use fewer workers or --sampling exact")


def _dealt(shards: Iterable[dict], place: tuple[int, int, int, int]) -> Iterator[dict]:
    """webdataset's split by node and by worker. They ask the environment, which is put back: children inherit it."""
    names = ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(number) for name, number in zip(names, place, strict=True)})
    try:
        mine = list(wds.split_by_worker(wds.split_by_node(iter(shards))))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    yield from mine


def _buffer(window: int, seed: int) -> Any:
    """webdataset's shuffle of compressed samples, `window` wide; nothing where samples keep their order."""
    return wds.shuffle(window, initial=min(window, 1000), rng=random.Random(seed)) if window > 0 else None


def _read_shards(shards: Iterable[dict], index: ShardIndex) -> Iterator[RawSample]:
    """The samples of shards that webdataset gives out by number: it would take some names for patterns or schemes."""
    for shard in shards:
        number = int(shard["url"])
        path, name, count, skips = index.paths[number], index.names[number], 0, index.storage.skip_errors
        fault = ""
        with index.storage.open(path) as file:
            try:
                for sample in stream_samples(file, name, shown(path)):
                    yield sample
                    count += 1
            except TornTar as error:
                if not skips:
                    raise
                fault = error.fault
        if count > index.sizes[number] or count < index.sizes[number] and not skips:
            raise UserError(f"{index.sizes[number]} samples were promised, the tar gave {count}; shard {shown(path)}; "
                            "it was cut or changed: write or copy it again")
        if count < index.sizes[number]:  # told once for all that is lost: a stream does not wait for it
            lost = fault or f"{index.sizes[number]} samples were promised, the tar gave {count}"
            yield lost_sample(name, count, lost)


def _explained(pipeline: Iterable[RawSample], rank: int, worker: int) -> Iterator[RawSample]:
    """Say in one line what webdataset raises while it reads."""
    try:
        yield from pipeline
    except UserError:
        raise
    except Exception as error:  # whatever a broken tar or a lost file makes of itself in there
        details = ", ".join(str(arg) for arg in error.args)[:300]
        raise UserError(f"a shard cannot be read ({type(error).__name__}: {details}); rank {rank}, worker {worker}; "
                        "python -m common.check_shards says what is wrong with it") from None


def _exhaust(items: Iterable) -> None:
    for _ in items:
        pass


class BatchDataset(IterableDataset):
    """Decodes the pieces of a source into a ring. Each loader worker iterates it, or without any the main process."""

    def __init__(self, source: Source, mixing: Mix, fields: Fields, transform: ImageTransform,
                 skip_errors: bool = False):
        super().__init__()
        self.source, self.mixing, self.fields = source, mixing, fields
        self.transform, self.skip_errors = transform, skip_errors
        self.ring: torch.Tensor = torch.empty(0)

    def __iter__(self) -> Iterator[Made]:
        """A worker's pieces, in its order; after an error the last one carries it, since a traceback is no message."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        made = None
        try:
            for number, (piece, samples) in enumerate(self.source.pieces(worker, num_workers, self.mixing)):
                made = Made(piece.number, piece.step, piece.number % num_workers)
                self._fill(made, piece, samples, worker, number)
                yield made
        except UserError as error:
            yield Made(-1, made.step if made else Step(0, 0, 0, 0, 0), worker, fatal=str(error))

    def _fill(self, made: Made, piece: Piece, samples: Iterable[Keyed], worker: int, number: int) -> None:
        """Decode each sample into its row of its batch."""
        images: dict[int, tuple[torch.Tensor, ...]] = {}  # by slot: made at once, since each view costs 4 µs
        slot, places = self._places(piece, worker, number)
        made.slots = [slot]
        with torch.inference_mode():
            for group in self._prepared(zip(places, samples, strict=False)):
                with remarks():  # around each image's own: see there
                    for ready in group:
                        if ready.slot not in images:
                            images[ready.slot] = as_images(self.ring[ready.slot]).unbind()
                        self._finish(made, ready, images[ready.slot][ready.row[1]])

    def _places(self, piece: Piece, worker: int, number: int) -> tuple[int, list[tuple[int, Row]]]:
        """The slot that the main process is told of, and for each sample the slot and the row to write to.

        With `queue` it is not known yet which batch the piece becomes a part of.
        """
        step = piece.step.global_step
        if self.mixing.kind == "queue":
            slot, first = self.mixing.queue_place(worker, number, len(self.ring))
            return slot, [(slot, (step, first + i)) for i in range(len(piece.rows))]
        return self.slot(step, worker, number), [(self.slot(row[0], worker, number), row) for row in piece.rows]

    def _prepared(self, wanted: Iterator[tuple[tuple[int, Row], Keyed]]) -> Iterator[list[Ready]]:
        """Read and label a few samples before their pixels are made: decoding leaves nothing of this code in the
        processor's caches, so that it would be several times slower image by image."""
        ready: list[Ready] = []
        for (slot, row), (key, sample) in wanted:
            prepared = None
            try:
                sample.check()
                label = self.fields.label(sample)
                prepared = self.transform.prepare(self.fields.image(sample), key)
                ready.append(Ready(slot, row, sample, label, prepared))
            except (SampleError, ValueError) as error:
                ready.append(Ready(slot, row, sample, -1, error))
            if len(ready) == NUM_VALID or prepared is not None and prepared.picture.is_decoded:  # a PNG: megabytes
                yield ready
                ready = []
        yield ready

    def _finish(self, made: Made, ready: Ready, out: torch.Tensor) -> None:
        """Write the pixels of one sample and note it, or note why it cannot be used."""
        sample, prepared = ready.sample, ready.prepared
        try:
            if isinstance(prepared, Exception):
                raise prepared
            self.transform.finish(prepared, out)
        except (SampleError, ValueError) as error:
            cause = getattr(error, "cause", "bad image")
            self._refuse(made, SkippedSample(cause, str(error), sample.shard, sample.count, sample.key))
            return
        made.rows.append(ready.row)
        made.label.append(ready.label)
        made.shard.append(sample.shard)
        made.count.append(sample.count)
        made.key.append(sample.key)

    def slot(self, global_step: int, worker: int, number: int) -> int:
        """Where in the ring a batch lies: where a batch is one worker's, that worker has slots of its own."""
        if self.mixing.has_own_slots:
            per_worker = len(self.ring) // self.mixing.num_workers
            return worker * per_worker + number % per_worker
        return global_step % len(self.ring)

    def _refuse(self, made: Made, bad: SkippedSample) -> None:
        if not self.skip_errors:
            is_name = bad.detail.endswith("_field")
            what = "name the field" if is_name else "mend the shard (python -m common.check_shards)"
            raise UserError(f"{bad.detail}; shard {bad.shard}, key {bad.key}, count {bad.count}; {what}, or leave such "
                            "samples out: --on_error skip")
        made.skipped.append(bad)
