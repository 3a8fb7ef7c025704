"""What one epoch of a traced run has shown: each sample's uses, each rank's steps, what is in a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from common.sampling import deal
from common.tracing.promise import Exact, Found
from common.tracing.report import NUM_LISTED, EpochReport, Faults
from common.tracing.run import RecordedRun

CHUNK = 1 << 16


class EpochCount:
    """Counts of one epoch: one byte per sample of the shards. Judged from `position` on, up to where the rows came."""

    def __init__(self, number: int, run: RecordedRun, position: int = 0, step: int = 0):
        self.number, self.run = number, run
        self.first_position = self.position = position
        self.first_step = self.next_step = step
        self.seen = np.zeros(int(run.shard_sizes.sum()), dtype=np.uint8)  # 0: not, 1: once, 2: more often
        self.steps: list[tuple[int, list[int]]] = []  # world size, steps of each rank; for each world in turn
        self.num_reads = self.num_batches = self.num_shards = self.num_workers = self.num_classes = 0
        self.labels: Counter[int] = Counter()

    def add_step(self, world_size: int, ranks: Iterable[int]) -> None:
        """Count a step for the ranks that took it."""
        if not self.steps or self.steps[-1][0] != world_size:
            self.steps.append((world_size, [0] * world_size))
        for rank in ranks:
            if rank < world_size:
                self.steps[-1][1][rank] += 1

    def add_row(self, found: Found) -> np.ndarray:
        """Count a row. bool, (n,): whether each sample had been used in this epoch before."""
        row, known = found.row, found.ids >= 0
        self.num_reads += len(row.key)
        self.labels.update(row.label)
        if row.key:
            self.num_batches += 1
            self.num_shards += len(set(row.shard))
            self.num_workers += len(set(row.worker))
            self.num_classes += len(set(row.label))
        again = np.zeros(len(known), dtype=bool)
        again[known] = self._use(found.ids[known])
        return again

    def _use(self, ids: np.ndarray) -> np.ndarray:
        before = self.seen[ids]
        self.seen[ids] = np.minimum(before + 1, 2)
        if len(set(ids.tolist())) == len(ids):
            return before > 0
        again = np.ones(len(ids), dtype=bool)
        again[np.unique(ids, return_index=True)[1]] = False
        self.seen[ids[again]] = 2
        return again | (before > 0)

    def report(self, complete: bool, order_kept: bool | None, exact: Exact | None, faults: Faults) -> EpochReport:
        """Close the epoch. In exact sampling, what is missing from the part that was to be read is a fault."""
        skipped = np.zeros(len(self.seen), dtype=bool)
        skipped[self.run.skipped_in(self.number)] = True
        unused = self.seen == 0
        skipped &= unused
        missing = unused & ~skipped
        num_unused = int(missing.sum())
        if exact:
            missing &= self._expected(exact, complete)
            self._tell_missing(exact, missing, faults)
        whole = complete and self.first_position == 0
        num_missing = int(missing.sum()) if exact or whole else 0
        once, repeated = int((self.seen == 1).sum()), int((self.seen == 2).sum())
        return EpochReport(
            epoch=self.number, complete=complete, steps=self.steps, reads=self.num_reads, total=len(self.seen),
            distinct=once + repeated, once=once, repeated=repeated, skipped=int(skipped.sum()),
            missing=num_missing if self.run.sizes_known else None, not_reached=num_unused - num_missing,
            equal_steps=all(len(set(counts)) == 1 for _, counts in self.steps), order_kept=order_kept,
            shards_per_batch=self.num_shards / max(self.num_batches, 1),
            workers_per_batch=self.num_workers / max(self.num_batches, 1),
            classes_per_batch=self.num_classes / max(self.num_batches, 1), labels=self._named_labels())

    def _expected(self, exact: Exact, complete: bool) -> np.ndarray:
        """Which samples the part of the epoch that is judged should have used: bool, (samples,)."""
        stop = self.run.plan.epoch_samples if complete else self.position
        if (self.first_position, stop) == (0, len(self.seen)):
            return np.ones(len(self.seen), dtype=bool)
        expected = np.zeros(len(self.seen), dtype=bool)
        for _, ids in self._planned(exact, self.first_position, stop):
            expected[ids] = True
        return expected

    def _planned(self, exact: Exact, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        for position in range(start, stop, CHUNK):
            yield position, exact.planned(self.run.plan, self.number, position, min(position + CHUNK, stop))

    def _tell_missing(self, exact: Exact, missing: np.ndarray, faults: Faults) -> None:
        """Name the missing samples that were to come first, with the step and rank that each was planned for."""
        texts: list[str] = []
        for position, ids in self._planned(exact, 0, self.run.plan.epoch_samples) if missing.any() else ():
            for i in np.flatnonzero(missing[ids])[: NUM_LISTED - len(texts)].tolist():
                attempt = self.run.attempt_at(self.number, position + i)
                place = attempt.place(self.number, attempt.step_at(self.number, position + i))
                rank = bisect_right(deal(place.size, attempt.plan.world_size), position + i - place.start) - 1
                texts.append(f"epoch {self.number} step {place.step} rank {rank}: {self.run.name(ids[i])}")
            if len(texts) == NUM_LISTED:
                break
        faults.add("missing", *texts, count=int(missing.sum()))

    def _named_labels(self) -> dict[str, int]:
        names = dict(enumerate(self.run.classes or []))
        return {names.get(label, str(label)): self.labels[label] for label in sorted(self.labels)}
