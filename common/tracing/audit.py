"""Holds a traced run against what its sampling mode promises: coverage per epoch, equal steps, order, batches.

One pass over the ranks' files, merged step by step. Memory is one byte per sample and a row per rank, whatever the
length of the trace; a million samples take a few seconds.

    >>> report = audit(RecordedRun.open("runs/ddp"))
    >>> report.kept, report.epochs[0].missing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from common.errors import UserError
from common.sampling import Step
from common.tracing.attempt import Attempt
from common.tracing.epoch import EpochCount
from common.tracing.promise import Exact, Found, Resampled, Split
from common.tracing.report import AuditReport, Faults
from common.tracing.rows import Row, merged
from common.tracing.run import RecordedRun

T = TypeVar("T")


class Watcher(Protocol):
    """Who wants to see each row as it is judged: the plot."""

    def use(self, found: Found, again: np.ndarray) -> None:
        """A row. `again` (n,) is true for a sample that the epoch had used before."""

    def lose(self, place: Step, rank: int, num_samples: int) -> None:
        """Samples that were planned for a rank's step and are not there."""


def audit(run: RecordedRun, watcher: Watcher | None = None) -> AuditReport:
    """Judge a run. Its faults are in the report, samples named. A row that cannot be read raises UserError."""
    faults = Faults()
    promise = {"exact": Exact, "split": Split, "resampled": Resampled}[run.plan.sampling](run, faults)
    return _Auditor(run, promise, watcher).audit()


class _Auditor:
    def __init__(self, run: RecordedRun, promise: Resampled, watcher: Watcher | None):
        self.run, self.promise, self.faults, self.watcher = run, promise, promise.faults, watcher
        self.exact = promise if isinstance(promise, Exact) else None
        self.numbers = {name: i for i, name in enumerate(run.shard_names)}
        self.report = AuditReport(str(run.folder), run.plan.sampling, promise.promise, run.state, len(run.attempts),
                             promise.faults)
        self.epoch = EpochCount(0, run)
        self.num_disordered = 0  # batches out of order, before this epoch
        self.first_attempt = len(run.attempts)
        self.all_traced = all(attempt.plan.traced for attempt in run.attempts)

    def audit(self) -> AuditReport:
        place = None
        for rows, is_last in _marked_last(merged(self.run.folder, self._is_live)):
            attempt = self.run.attempt_of(rows[0])
            if is_last and self._is_unfinished(attempt, rows):
                continue
            if place is None:
                self._begin(attempt)
            place = self.run.place_of(rows[0])
            self._step(attempt, place, rows)
        if place is None:
            raise UserError(f"no trace: its files hold no row; {self.run.folder / 'trace'}; train with --trace save")
        self._finish(place)
        return self.report

    def _is_live(self, row: Row) -> bool:
        """Whether a row counts. Called for every row of every file."""
        self.first_attempt = min(self.first_attempt, row.attempt)
        return self.run.attempt_of(row).is_live(row.epoch, row.step)

    def _is_unfinished(self, attempt: Attempt, rows: list[Row]) -> bool:
        """Whether the last step was under way on some ranks when the run died, or is now."""
        if self.run.state not in ("running", "failed", None) or len(rows) >= attempt.plan.world_size:
            return False
        name = f"epoch {rows[0].epoch} step {rows[0].step}"
        self._note(f"{name} is recorded by {len(rows)} of {attempt.plan.world_size} ranks: left out")
        return True

    def _begin(self, attempt: Attempt) -> None:
        """What came before the first attempt that was traced at all, or before this folder, cannot be judged."""
        begin = attempt.begin
        if attempt.number == self.first_attempt and (begin.epoch, begin.position) > (0, 0):
            self.epoch = EpochCount(begin.epoch, self.run, begin.position, begin.step)
            self._note(f"nothing is recorded before epoch {begin.epoch} step {begin.step}: judged from there")

    def _step(self, attempt: Attempt, place: Step, rows: list[Row]) -> None:
        name = f"epoch {place.epoch} step {place.step}"
        if not self.epoch.number <= place.epoch < attempt.plan.num_epochs:
            why = "after a later epoch" if place.epoch < self.epoch.number else "past the last epoch"
            self.faults.add("steps", *(f"{name} is recorded by rank {row.file_rank} {why}" for row in rows))
            return
        while self.epoch.number < place.epoch or self._is_untraced(attempt):
            if self._is_untraced(attempt):
                self._leave_out(attempt)
            else:
                self._close_epoch(complete=True)
        begin, end = attempt.begin, attempt.num_steps(place.epoch)
        if (place.epoch, place.step) < (begin.epoch, begin.step) or place.step >= end:
            span = f"which began with epoch {begin.epoch} step {begin.step} and has {end} steps in this epoch"
            self.faults.add("steps", f"{name} is no step of attempt {attempt.number}, {span}")
        elif place.step < self.epoch.next_step:
            again = f"{name} is recorded again, or too late, by rank"
            self.faults.add("steps", *(f"{again} {row.file_rank}" for row in rows))
        else:
            self._check_turn(attempt, place, rows, name)
            self.epoch.next_step = place.step + 1
        self.epoch.position = max(self.epoch.position, place.stop)
        self.epoch.add_step(attempt.plan.world_size, (row.file_rank for row in rows))
        for row in rows:
            self._row(attempt, place, row)

    def _is_untraced(self, until: Attempt | None = None) -> bool:
        """Whether an attempt that recorded nothing brought the run on from here, to where `until` took over."""
        here = (self.epoch.number, self.epoch.position)
        if self.all_traced or until and until.has_begun(*here):
            return False
        return not self.run.attempt_at(*here).plan.traced

    def _leave_out(self, attempt: Attempt | None) -> None:
        """Judge again from where `attempt` began; None: no more."""
        epoch, step = self.epoch, self.epoch.next_step
        end = f" to epoch {attempt.begin.epoch} step {attempt.begin.step}" if attempt else " on"
        self._note(f"nothing is recorded from epoch {epoch.number} step {step}{end}: not judged")
        if step > epoch.first_step:
            self._close_epoch(complete=False)
        if attempt:
            begin = attempt.begin
            self.epoch = EpochCount(begin.epoch, self.run, begin.position, begin.step)

    def _check_turn(self, attempt: Attempt, place: Step, rows: list[Row], name: str) -> None:
        """Whether this is the step that comes next, recorded once by each rank of the world."""
        world_size = attempt.plan.world_size
        for step in range(self.epoch.next_step, place.step):
            self._lose_step(attempt, step, range(world_size))
        ranks = Counter(row.file_rank for row in rows)
        self._lose_step(attempt, place.step, [rank for rank in range(world_size) if rank not in ranks])
        twice = [rank for rank in ranks if ranks[rank] > 1]
        self.faults.add("steps", *(f"{name} is recorded {ranks[rank]} times by rank {rank}" for rank in twice))

    def _lose_step(self, attempt: Attempt, step: int, ranks: Iterable[int]) -> None:
        place = attempt.place(self.epoch.number, step)
        for rank in ranks:
            self.faults.add("steps", f"epoch {place.epoch} step {step} is not recorded by rank {rank}")
            if self.watcher is not None:
                start, stop = place.part(rank, attempt.plan.world_size)
                self.watcher.lose(place, rank, stop - start)

    def _row(self, attempt: Attempt, place: Step, row: Row) -> None:
        found, where = self._find(attempt, place, row), f"epoch {row.epoch} step {row.step} rank {row.file_rank}"
        was, planned = (row.rank, row.world_size), (row.file_rank, attempt.plan.world_size)
        if was != planned or row.rank >= row.world_size:
            samples = "".join(f", {found.sample(i)}" for i in range(min(len(row.key), 2)))
            told = f"recorded as rank {was[0]} of {was[1]}, not {planned[0]} of {planned[1]}"
            self.faults.add("foreign", f"{where}: {told}{samples}")
        again = self.epoch.add_row(found)
        self.faults.add("unknown", *(f"{where}: {found.sample(i)}" for i in np.flatnonzero(found.ids < 0).tolist()))
        if self.exact:
            self.faults.add("repeated", *(f"{where}: {found.sample(i)}" for i in np.flatnonzero(again).tolist()))
        num_lacking = self.promise.check(found)
        if self.watcher is not None:
            self.watcher.use(found, again)
            self.watcher.lose(place, row.file_rank, num_lacking)

    def _find(self, attempt: Attempt, place: Step, row: Row) -> Found:
        """The row's samples as numbers."""
        shards = np.array([self.numbers.get(name, -1) for name in row.shard], dtype=np.int64)
        counts = np.array(row.counts, dtype=np.int64)
        known = (shards >= 0) & (counts >= 0) & (counts < self.run.shard_sizes[shards])
        return Found(attempt, place, row, shards, np.where(known, self.run.offsets[shards] + counts, -1))

    def _finish(self, place: Step) -> None:
        """Close what is open: all epochs of a complete run, else the last one as far as it came."""
        plan = self.run.plan
        if self.run.state == "complete" and (plan.max_steps is None or place.global_step + 1 < plan.max_steps):
            while self.epoch.number < max(plan.num_epochs, place.epoch + 1):  # a later start may have asked for fewer
                if self._is_untraced():
                    return self._leave_out(None)
                self._close_epoch(complete=True)
        else:
            attempt = self.run.attempt_at(place.epoch, place.start)
            complete = self.epoch.next_step >= attempt.num_steps(self.epoch.number)
            if not complete:
                self._note(f"epoch {self.epoch.number} is not finished (state {self.run.state or 'unknown'}): "
                           f"judged up to step {self.epoch.next_step - 1}")
            self._close_epoch(complete)
        if not self.run.sizes_known:
            self._note("the sizes of the shards are not known (-s names them): what is missing cannot be told")

    def _close_epoch(self, complete: bool) -> None:
        epoch = self.epoch
        if complete:
            attempt = self.run.attempt_at(epoch.number, int(self.run.plan.epoch_samples) - 1)
            for step in range(epoch.next_step, attempt.num_steps(epoch.number)):
                self._lose_step(attempt, step, range(attempt.plan.world_size))
        num_disordered = self.faults.counts["order"] + self.faults.counts["size"]
        order_kept = num_disordered == self.num_disordered if self.exact else None
        self.report.epochs.append(epoch.report(complete, order_kept, self.exact, self.faults))
        self.num_disordered = num_disordered
        self.epoch = EpochCount(epoch.number + 1, self.run)

    def _note(self, text: str) -> None:
        self.report.notes.append(text)


def _marked_last(items: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    held: list[T] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    for item in held:
        yield item, True
