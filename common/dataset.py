"""The data sets of the three sampling modes: what each loader worker reads, step by step.

`exact` reads by position from the index; `split` and `resampled` are webdataset pipelines. Both hand
compressed samples to the same decoding, which writes pixels into the shared ring.

    >>> plan = EpochPlan(index.num_samples, global_batch=64, num_epochs=1, rank=0, world_size=1, seed=0, window=5000)
    >>> source = ExactSource(index, plan)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import webdataset as wds

from common import sampling
from common.access.urls import shown
from common.coverage import split_deal, split_order
from common.errors import UserError
from common.fields import RawSample, lost_sample
from common.indexing.reader import ShardReader
from common.mixing import Mix, Piece
from common.sampling import AUGMENT, BUFFER, Progress, Step, hashed
from common.shards import ShardIndex
from common.tars.samples import TornTar
from common.tars.stream import stream_samples

Keyed = tuple[int, RawSample]  # the hash that all randomness of this sample's augmentation comes from, and the sample


@dataclass(frozen=True)
class EpochPlan:
    """Which steps there are and which part of them is this rank's. `window` is what --shuffle says, in samples."""

    epoch_samples: int
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
        return sampling.steps(self.epoch_samples, self.global_batch, self.num_epochs, self.progress, self.drop_last)


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
        with closing(reader):
            for step in itertools.islice(self.steps(), worker, None, num_workers):
                if order is None or order.epoch != step.epoch:
                    order = sampling.EpochOrder(self.index.sizes, plan.window, plan.seed, step.epoch)
                start, stop = (step.start, step.stop) if self.whole_batches else step.part(plan.rank, plan.world_size)
                rows = [(step.global_step, row) for row in range(stop - start)]
                yield Piece(step.global_step, step, rows), self._read(reader, order, start, stop)

    def _read(self, reader: ShardReader, order: sampling.EpochOrder, start: int, stop: int) -> Iterator[Keyed]:
        for position, (shard, place) in zip(range(start, stop), order.locate(start, stop).tolist(), strict=True):
            yield hashed(self.plan.seed, order.epoch, position, AUGMENT), reader.read(shard, place)


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
        seed = hashed(plan.seed, epoch, BUFFER, plan.rank, worker)
        if self.resampled and plan.window >= 0:
            filled = [str(number) for number in np.flatnonzero(self.index.sizes)]
            shards = wds.ResampledShards(filled, deterministic=True, worker_seed=partial(int, seed))
        else:
            order = split_order(self.index.sizes, plan.window, plan.seed, epoch)
            workers = split_deal(order, plan.world_size, num_workers)[plan.rank]
            mine = [{"url": number} for number in (workers[worker] if worker < len(workers) else [])]
            shards = partial(iter, mine)
        read = partial(_read_shards, index=self.index)
        pipeline = wds.DataPipeline(shards, read, _buffer(plan.window, seed)).repeat()
        for number, sample in enumerate(_explained(pipeline, plan.rank, worker)):
            yield hashed(seed, number, AUGMENT), sample

    def _complete(self, samples: Iterator[Keyed], size: int) -> Iterator[Keyed]:
        missing = size
        for sample in samples:
            missing -= 1
            yield sample
        if missing:
            raise UserError(f"a loader worker of rank {self.plan.rank} has no samples; {len(self.index.paths)} shards; "
                            "use fewer workers or --sampling exact")


def _buffer(window: int, seed: int) -> Any:
    """webdataset's shuffle of compressed samples, `window` wide; nothing where samples keep their order."""
    return wds.shuffle(window, initial=min(window, 1000), rng=random.Random(seed)) if window > 0 else None


def _read_shards(shards: Iterable[dict[str, Any]], index: ShardIndex) -> Iterator[RawSample]:
    """The samples of shards that webdataset gives out by number: it would take some names for patterns or schemes."""
    for shard in shards:
        number = int(shard["url"])
        path, name, count, fault = index.paths[number], index.names[number], 0, ""
        with index.storage.open(path) as file:
            try:
                for sample in stream_samples(file, name, shown(path)):
                    yield sample
                    count += 1
            except TornTar as error:
                if not index.storage.skip_errors:
                    raise
                fault = error.fault
        lost = index.check_count(number, count, fault)
        if count < index.sizes[number]:  # told once for all that is lost: a stream does not wait for it
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


def _exhaust(items: Iterable[Any]) -> None:
    for _ in items:
        pass
