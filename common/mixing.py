"""Joining what several loader workers read into one batch: where each sample goes, as arithmetic. No torch.

A worker writes a sample straight into the row of the batch that it ends up in, so mixing copies nothing (but queue).

    --mix none      batch t is made by one worker, t % num_workers
    --mix pooled    every worker makes an equal part of every batch
    --mix shuffle   num_workers batches are made by as many workers, and their rows permuted among them
    --mix queue     every worker makes equal parts of batches; a batch is made of those that are ready first
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from common.sampling import BUFFER, Step, deal, permutation

Row = tuple[int, int]  # global step, row in its batch


@dataclass(frozen=True)
class Piece:
    """What one worker makes at a time: the rows that its samples go to. `number` counts pieces."""

    number: int
    step: Step
    rows: list[Row]


@dataclass(frozen=True)
class Mix:
    """How the steps of one rank are cut into pieces. `batch_size` is that of the rank."""

    kind: str
    batch_size: int
    num_workers: int  # at least one: the main process reads where there are no workers
    seed: int

    @property
    def pieces_per_step(self) -> int:
        if self.kind == "queue":  # equal parts, so that any of them make a batch: for each worker one, or somewhat more
            most = self.batch_size
            return next(number for number in range(min(self.num_workers, most), most + 1) if most % number == 0)
        return self.num_workers if self.kind == "pooled" else 1

    @property
    def has_own_slots(self) -> bool:
        """Whether each worker fills whole batches of its own."""
        return self.kind == "none"

    def num_slots(self, prefetch: int) -> int:
        """Batches that may be in the making or in use at once, so that no worker writes into one still in use."""
        if self.kind == "queue":  # the last worker to end is asked for the pieces of all; a slot for the batch
            places = self.num_workers * (prefetch * self.num_workers + 1)
            return -(-places // self.pieces_per_step) + 1
        per_worker = prefetch + (2 if self.kind == "shuffle" else 1)
        return per_worker if self.kind == "pooled" else per_worker * self.num_workers

    def queue_place(self, worker: int, number: int, num_slots: int) -> Row:
        """Slot and first row where a worker writes its piece `number`, until the main process has copied it."""
        places = (num_slots - 1) * self.pieces_per_step // self.num_workers
        slot, part = divmod(worker * places + number % places, self.pieces_per_step)
        return slot, part * (self.batch_size // self.pieces_per_step)

    def groups(self, steps: Iterable[Step]) -> Iterator[list[Step]]:
        """Runs of steps that are made together. They begin anew with every epoch; `steps` may not begin within one."""
        size = self.num_workers if self.kind == "shuffle" else 1
        for _, group in groupby(steps, key=lambda step: (step.epoch, step.step // size)):
            yield list(group)

    def pieces(self, group: list[Step]) -> list[Piece]:
        """The pieces of a group, in the order of the workers that make them: piece n by worker n % num_workers."""
        if self.kind in ("pooled", "queue"):
            step, size = group[0], self.pieces_per_step
            return [Piece(step.global_step * size + part, step, [(step.global_step, row) for row in range(start, stop)])
                    for part, (start, stop) in enumerate(pairwise(deal(self.batch_size, size)))]
        rows = [(step.global_step, row) for step in group for row in range(self.batch_size)]
        if self.kind == "shuffle":
            order = permutation(len(rows), self.seed, group[0].epoch, BUFFER, group[0].step)
            rows = [rows[i] for i in order]
        size = self.batch_size
        return [Piece(step.global_step, step, rows[i * size : (i + 1) * size]) for i, step in enumerate(group)]

    def group_start(self, step: int) -> int:
        """The first step of the group that `step` of an epoch belongs to."""
        return step - step % self.num_workers if self.kind == "shuffle" else step
