"""Decodes the samples of a source into the ring of shared memory, a piece of a batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from common.collate import MadePiece, SkippedSample, as_images
from common.dataset import Keyed, Source
from common.errors import UserError, printable
from common.fields import Fields, RawSample, SampleError
from common.images.remarks import remarks
from common.indexing.reader import NUM_VALID
from common.mixing import Mix, Piece, Row
from common.orders import Orders
from common.sampling import Step
from common.transforms import ImageTransform, Prepared


class Ready(NamedTuple):
    """A sample before its pixels are made, or why they cannot be, and where they go."""

    slot: int
    row: Row
    sample: RawSample
    label: int
    prepared: Prepared | Exception


class BatchDataset(IterableDataset[MadePiece]):
    """Decodes the pieces of a source into a ring. Each loader worker iterates it, or without any the main process."""

    kind: type[MadePiece] = MadePiece

    def __init__(self, source: Source, mixing: Mix, fields: Fields, transform: ImageTransform,
                 skip_errors: bool = False):
        super().__init__()
        self.source, self.mixing, self.fields = source, mixing, fields
        self.transform, self.skip_errors = transform, skip_errors
        self.ring: torch.Tensor = torch.empty(0)
        self.orders: Orders | None = None  # of `--mix queue`

    def __iter__(self) -> Iterator[MadePiece]:
        """A worker's pieces, in its order; after an error the last one carries it, since a traceback is no message."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        made = None
        try:
            for number, (piece, samples) in enumerate(self.source.pieces(worker, num_workers, self.mixing)):
                maker = piece.number % num_workers
                if self.orders is not None:
                    ordered = self.orders.next(piece.step.epoch)
                    if ordered is None:
                        return
                    piece = self.mixing.part(ordered, piece.step)
                made = self.kind(piece.number, piece.step, maker)
                self._fill(made, piece, samples, worker, number)
                yield made
        except UserError as error:
            yield MadePiece(-1, made.step if made else Step(0, 0, 0, 0, 0), worker, fatal=str(error))

    def _fill(self, made: MadePiece, piece: Piece, samples: Iterable[Keyed], worker: int, number: int) -> None:
        """Decode each sample into its row of its batch."""
        images: dict[int, tuple[torch.Tensor, ...]] = {}  # by slot: made at once, since each view costs 4 µs
        places = [(self.slot(row[0], worker, number), row) for row in piece.rows]
        made.slot = self.slot(piece.step.global_step, worker, number)
        with torch.inference_mode():
            for group in self._prepared(zip(places, samples, strict=False)):
                with remarks():  # an outer block saves the one of each image 25 µs
                    for ready in group:
                        if ready.slot not in images:
                            images[ready.slot] = as_images(self.ring[ready.slot]).unbind()
                        self._finish(made, ready, images[ready.slot][ready.row[1]])

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

    def _finish(self, made: MadePiece, ready: Ready, out: torch.Tensor) -> None:
        """Write the pixels of one sample and note it, or note why it cannot be used."""
        sample, prepared = ready.sample, ready.prepared
        try:
            if isinstance(prepared, Exception):
                raise prepared
            self.transform.finish(prepared, out)
        except (SampleError, ValueError) as error:
            cause = getattr(error, "cause", "bad image")
            bad = SkippedSample(cause, str(error), sample.shard, sample.count, sample.key)
            self._refuse(made, ready.row[0], bad)
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

    def _refuse(self, made: MadePiece, global_step: int, bad: SkippedSample) -> None:
        if not self.skip_errors:
            is_name = bad.detail.endswith("_field")
            what = "name the field" if is_name else "mend the shard (python -m common.check_shards)"
            place = f"shard {bad.shard}, key {printable(bad.key)}, count {bad.count}"
            raise UserError(f"{bad.detail}; {place}; {what}, or leave such samples out: --on_error skip")
        made.skipped.append((global_step, bad))
