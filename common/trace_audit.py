"""Holds a traced run against what its sampling mode promises: coverage per epoch, equal steps, order, batches.

One pass over the ranks' files, merged step by step. Memory is one byte per sample and a row per rank, whatever the
length of the trace.

    >>> report = audit(Run.open("runs/ddp"))
    >>> report.kept, report.epochs[0].missing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from common.errors import UserError
from common.sampling import Step
from common.trace_promise import Exact, Found, Resampled, Split
from common.trace_report import NUM_LISTED, EpochReport, Faults, Report
from common.trace_rows import Row, merged
from common.trace_run import Attempt, Run

T = TypeVar("T")
CHUNK = 1 << 16
NUM_KEPT = 1000  # planned places of missing samples that are remembered, to name them


class Watcher(Protocol):
    """Who wants to see each row as it is judged: the plot."""

    def add(self, found: Found, repeated: np.ndarray, num_lacking: int) -> None:
        """`repeated` (n,) is true for a sample that the epoch has used before; `num_lacking` were planned and are not there."""


def audit(run: Run, watcher: Watcher | None = None) -> Report:
    """Judge a run. Raises UserError where a row cannot be read. Faults are in the report, by kind, with samples named."""
    faults = Faults()
    promise = {"exact": Exact, "split": Split, "resampled": Resampled}[run.plan.sampling](run, faults)
    return _Auditor(run, promise, watcher).audit()


class _Epoch:
    """What one epoch has shown so far."""

    def __init__(self, number: int, num_samples: int, position: int = 0, step: int = 0):
        self.number = number
        self.seen = np.zeros(num_samples, dtype=np.uint8)  # 0: not, 1: once, 2: more often
        self.first_position = self.position = position  # the part of the epoch that is judged
        self.next_step = step
        self.steps: list[tuple[int, list[int]]] = []
        self.reads = self.num_batches = self.num_shards = self.num_workers = 0
        self.labels: Counter[int] = Counter()
        self.planned: dict[int, str] = {}  # id of a sample that is not where it was planned -> where that was

    def count(self, ids: np.ndarray) -> np.ndarray:
        """Note the use of samples; bool, (n,): whether the epoch had used each before."""
        before = self.seen[ids]
        if len(set(ids.tolist())) == len(ids):
            self.seen[ids] = np.minimum(before + 1, 2)
            return before > 0
        first = np.zeros(len(ids), dtype=bool)
        first[np.unique(ids, return_index=True)[1]] = True
        self.seen[ids] = np.minimum(before + 1, 2)
        self.seen[ids[~first]] = 2
        return (before > 0) | ~first

    def add_step(self, world_size: int, ranks: Iterable[int]) -> None:
        """Count a step for the ranks that took it. Ranks outside the world count for nothing."""
        if not self.steps or self.steps[-1][0] != world_size:
            self.steps.append((world_size, [0] * world_size))
        for rank in ranks:
            if rank < world_size:
                self.steps[-1][1][rank] += 1


class _Auditor:
    def __init__(self, run: Run, promise: Resampled, watcher: Watcher | None):
        self.run, self.promise, self.faults, self.watcher = run, promise, promise.faults, watcher
        self.numbers = {name: i for i, name in enumerate(run.shard_names)}
        self.exact = promise if isinstance(promise, Exact) else None
        self.report = Report(str(run.folder), run.plan.sampling, promise.promise, run.state, len(run.attempts),
                             int(run.shard_sizes.sum()), self.faults)
        self.epoch: _Epoch | None = None
        self.first_attempt = len(run.attempts)
        self.last: dict[int, tuple[int, int, int]] = {}  # file -> when its last row was

    def audit(self) -> Report:
        place = None
        for rows, is_last in _marked_last(merged(self.run.folder, self._is_live)):
            attempt = self.run.attempts[rows[0].attempt]
            if is_last and self._is_unfinished(attempt, rows):
                continue
            place = attempt.place(rows[0].epoch, rows[0].step)
            self._step(attempt, place, rows)
        if place is None:
            raise UserError(f"no trace: its files hold no row; {self.run.folder / 'trace'}; train with --trace save")
        self._finish(attempt, place)
        if not self.run.sizes_known:
            self.report.notes.append("the sizes of the shards are not known (-s names them): what is missing cannot be told")
        return self.report

    def _is_live(self, row: Row) -> bool:
        if row.attempt >= len(self.run.attempts):
            raise UserError(f"a row of attempt {row.attempt}, status.json knows {len(self.run.attempts)}; {self.run.folder}; it cannot be judged")
        self.first_attempt = min(self.first_attempt, row.attempt)
        return self.run.attempts[row.attempt].is_live(row.epoch, row.step)

    def _is_unfinished(self, attempt: Attempt, rows: list[Row]) -> bool:
        """Whether the last step was under way on some ranks when the run died, or is now."""
        if self.run.state not in ("running", "failed", None) or len(rows) >= attempt.plan.world_size:
            return False
        self.report.notes.append(f"epoch {rows[0].epoch} step {rows[0].step} is recorded by {len(rows)} of {attempt.plan.world_size} ranks: left out")
        return True

    def _step(self, attempt: Attempt, place: Step, rows: list[Row]) -> None:
        epoch = self._open_epoch(attempt, place)
        if epoch is None:
            self.faults.add("steps", *(f"epoch {r.epoch} step {r.step} is recorded by rank {r.file_rank} after a later epoch" for r in rows))
            return
        self._check_turn(epoch, attempt, place, rows)
        epoch.next_step = max(epoch.next_step, place.step + 1)
        epoch.position = max(epoch.position, place.stop)
        epoch.add_step(attempt.plan.world_size, (row.file_rank for row in rows))
        for row in rows:
            self._row(epoch, attempt, place, row)

    def _check_turn(self, epoch: _Epoch, attempt: Attempt, place: Step, rows: list[Row]) -> None:
        """Whether this is the step that comes next, recorded once by each rank of the world."""
        name, world_size = f"epoch {place.epoch} step {place.step}", attempt.plan.world_size
        for step in range(epoch.next_step, place.step):
            self._lose_step(epoch, attempt, step, range(world_size))
        ranks = Counter(row.file_rank for row in rows)
        if place.step < epoch.next_step:
            self.faults.add("steps", *(f"{name} is recorded again by rank {rank}" for rank in ranks))
            return
        self.faults.add("steps", *(f"{name} is recorded {ranks[rank]} times by rank {rank}" for rank in ranks if ranks[rank] > 1))
        if attempt.is_before(place.epoch, place.step) or place.step >= attempt.num_steps(place.epoch):
            self.faults.add("steps", f"{name} is no step of attempt {attempt.number}, which began at epoch {attempt.begin.epoch} "
                                     f"step {attempt.begin.step} and has {attempt.num_steps(place.epoch)} steps in this epoch")
        lost = [rank for rank in range(world_size) if rank not in ranks]
        if lost:
            self._lose_step(epoch, attempt, place.step, lost)
        for row in rows:
            if (row.rank, row.world_size) != (row.file_rank, world_size) or row.file_rank >= world_size:
                self.faults.add("foreign", f"{name}: a row of rank {row.rank} of {row.world_size} in the file of rank {row.file_rank} of {world_size}: "
                                           + ", ".join(Found(attempt, place, row, NONE, NONE).sample(i) for i in range(min(len(row.key), 2))))
            if self.last.get(row.file_rank, row.when) > row.when:
                self.faults.add("steps", f"{name} is recorded by rank {row.file_rank} after epoch {self.last[row.file_rank][1]} step {self.last[row.file_rank][2]}")
            self.last[row.file_rank] = row.when

    def _lose_step(self, epoch: _Epoch, attempt: Attempt, step: int, ranks: Iterable[int]) -> None:
        """Note a step that some ranks have not recorded, and the samples that it should have had."""
        place = attempt.place(epoch.number, step)
        for rank in ranks:
            self.faults.add("steps", f"epoch {epoch.number} step {step} is not recorded by rank {rank}")
            if self.exact and len(epoch.planned) < NUM_KEPT:
                start, stop = place.part(rank, attempt.plan.world_size)
                ids = self.exact.planned(attempt.number, epoch.number, start, stop)
                epoch.planned.update(dict.fromkeys(ids.tolist(), f"step {step} rank {rank}"))

    def _row(self, epoch: _Epoch, attempt: Attempt, place: Step, row: Row) -> None:
        found = self._find(attempt, place, row)
        known = found.ids >= 0
        for i in np.flatnonzero(~known):
            self.faults.add("unknown", f"{found.where()}: {found.sample(i)}")
        repeated = np.zeros(len(known), dtype=bool)
        repeated[known] = epoch.count(found.ids[known])
        num_lacking = self.promise.check(found)
        if self.exact:
            for i in np.flatnonzero(repeated):
                self.faults.add("repeated", f"{found.where()}: {found.sample(i)}")
            if num_lacking and len(epoch.planned) < NUM_KEPT:
                ids = np.setdiff1d(self.exact.planned_for(found), found.ids)
                epoch.planned.update(dict.fromkeys(ids.tolist(), f"step {place.step} rank {row.file_rank}"))
        epoch.reads += len(row.key)
        epoch.labels.update(row.label)
        if row.key:
            epoch.num_batches += 1
            epoch.num_shards += len(set(row.shard))
            epoch.num_workers += len(set(row.worker))
        if self.watcher is not None:
            self.watcher.add(found, repeated, num_lacking)

    def _find(self, attempt: Attempt, place: Step, row: Row) -> Found:
        """The row's samples as numbers."""
        try:
            shards = np.array([self.numbers.get(name, -1) for name in row.shard], dtype=np.int64)
            counts = np.array(row.count, dtype=np.int64)
            known = (shards >= 0) & (counts >= 0) & (counts < self.run.shard_sizes[shards])
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"not a row of a trace; {self.run.folder}, rank {row.file_rank}, epoch {row.epoch} step {row.step}; "
                            "it was changed or damaged and cannot be judged") from None
        return Found(attempt, place, row, shards, np.where(known, self.run.offsets[shards] + counts, -1))
