"""Joining what several loader workers read into one batch: where each sample goes, as arithmetic. No torch.

A worker writes a sample straight into the row of the batch that it ends up in, so mixing copies nothing.

    --mix none      batch t is made by one worker, t % num_workers
    --mix pooled    every worker makes an equal part of every batch
    --mix shuffle   num_workers batches are made by as many workers, and their rows permuted among them
    --mix queue     as pooled, but the next part of a batch goes to the worker that is ready first
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
        """Parts that a batch is cut into. Those of `queue` are equal, so that it does not matter who makes which: as
        many as there are workers, or somewhat more."""
        if self.kind == "queue":
            most = self.batch_size
            return next(number for number in range(min(self.num_workers, most), most + 1) if most % number == 0)
        return self.num_workers if self.kind == "pooled" else 1

    @property
    def has_own_slots(self) -> bool:
        """Whether each worker fills whole batches of its own."""
        return self.kind == "none"

    def num_slots(self, prefetch: int) -> int:
        """Batches that may be in the making or in use at once, so that no worker writes into one still in use."""
        per_worker = prefetch + (2 if self.kind == "shuffle" else 1)
        return per_worker if self.kind in ("pooled", "queue") else per_worker * self.num_workers

    def groups(self, steps: Iterable[Step]) -> Iterator[list[Step]]:
        """Runs of steps that are made together. They begin anew with every epoch; `steps` may not begin within one."""
        size = self.num_workers if self.kind == "shuffle" else 1
        for _, group in groupby(steps, key=lambda step: (step.epoch, step.step // size)):
            yield list(group)

    def pieces(self, group: list[Step]) -> list[Piece]:
        """The pieces of a group, in the order of the workers that make them: piece n by worker n % num_workers."""
        if self.kind in ("pooled", "queue"):
            return [self.part(number, group[0]) for number in self.numbers(group[0])]
        rows = [(step.global_step, row) for step in group for row in range(self.batch_size)]
        if self.kind == "shuffle":
            order = permutation(len(rows), self.seed, group[0].epoch, BUFFER, group[0].step)
            rows = [rows[i] for i in order]
        size = self.batch_size
        return [Piece(step.global_step, step, rows[i * size : (i + 1) * size]) for i, step in enumerate(group)]

    def numbers(self, step: Step) -> range:
        """Of the pieces of a step where a batch is cut into parts."""
        return range(step.global_step * self.pieces_per_step, (step.global_step + 1) * self.pieces_per_step)

    def part(self, number: int, step: Step) -> Piece:
        """Piece `number` where a batch is cut into parts."""
        global_step, part = divmod(number, self.pieces_per_step)
        start, stop = list(pairwise(deal(self.batch_size, self.pieces_per_step)))[part]
        return Piece(number, step, [(global_step, row) for row in range(start, stop)])

    def group_start(self, step: int) -> int:
        """The first step of the group that `step` of an epoch belongs to."""
        return step - step % self.num_workers if self.kind == "shuffle" else step
