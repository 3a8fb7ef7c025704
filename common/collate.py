"""Samples to `Batch`: pixels in a ring of shared memory, everything else in small lists.

The ring is made before the workers start. A worker decodes straight into it and sends the main process
only who and what is in it, so a batch crosses no pipe and no page is touched for the first time twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from common.errors import UserError
from common.sampling import Step


@dataclass
class SkippedSample:
    """A sample that could not be used, and why; kept when errors are skipped."""

    cause: str
    detail: str
    shard: str
    count: int
    key: str


@dataclass
class Batch:
    """What one rank trains on in a step. `image` lies in a ring: it is overwritten once the next batch is asked for."""

    image: torch.Tensor  # uint8, (n, 3, size, size), channels-last
    label: torch.Tensor  # int64, (n,)
    step: Step
    worker: list[int]  # (n,) each: the loader worker, the shard's name, the sample's place in it, its key
    shard: list[str]
    count: list[int]
    key: list[str]
    skipped: list[SkippedSample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.key)


@dataclass
class MadePiece:
    """What a worker tells of a piece it has made: for each usable sample the row, label, shard, place and key."""

    number: int
    step: Step
    worker: int
    slot: int = 0  # of the ring, where all of its rows are of one batch
    rows: list[tuple[int, int]] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    shard: list[str] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    key: list[str] = field(default_factory=list)
    skipped: list[tuple[int, SkippedSample]] = field(default_factory=list)  # with the global step that it is missing in
    fatal: str | None = None


def shared_ring(num_slots: int, batch_size: int, image_size: int) -> torch.Tensor:
    """uint8, (num_slots, batch_size, image_size, image_size, 3) in shared memory. Called before the workers start."""
    num_bytes = num_slots * batch_size * image_size * image_size * 3
    try:
        status = os.statvfs("/dev/shm")
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = num_bytes  # no such file system: let the allocation say
    if free < num_bytes:
        raise UserError(f"not enough shared memory: the loader needs {num_bytes >> 20} MB, {free >> 20} MB are free; "
                        "/dev/shm; lower -b, -w or --image_size, or give the container more (docker: --shm-size)")
    return torch.empty((num_slots, batch_size, image_size, image_size, 3), dtype=torch.uint8).share_memory_()


def as_images(slot: torch.Tensor) -> torch.Tensor:
    """(n, H, W, 3) -> the same memory as (n, 3, H, W), channels-last."""
    return slot.permute(0, 3, 1, 2)


def assemble(step: Step, ring_slot: torch.Tensor, pieces: list[MadePiece]) -> Batch:
    """The batch of `step` from the pieces that hold its rows. Rows that were skipped close up."""
    if len(pieces) == 1:
        found = [(row, pieces[0], i) for i, (_, row) in enumerate(pieces[0].rows)]
    else:
        found = sorted(((row, piece, i) for piece in pieces for i, (owner, row) in enumerate(piece.rows)
                        if owner == step.global_step), key=lambda place: place[0])
    rows = [row for row, _, _ in found]
    image = as_images(ring_slot)
    image = image[: len(rows)] if rows == list(range(len(rows))) else image[torch.tensor(rows, dtype=torch.int64)]
    return Batch(
        image=image,
        label=torch.tensor([piece.label[i] for _, piece, i in found], dtype=torch.int64),
        step=step,
        worker=[piece.worker for _, piece, _ in found],
        shard=[piece.shard[i] for _, piece, i in found],
        count=[piece.count[i] for _, piece, i in found],
        key=[piece.key[i] for _, piece, i in found],
        skipped=[bad for piece in pieces for owner, bad in piece.skipped if owner == step.global_step],
    )
