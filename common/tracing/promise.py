"""What each sampling mode promises of a batch, and whether a row of a trace keeps it.

The audit counts samples and steps alike in every mode; here is what differs: which samples a rank's batch must hold.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.coverage import split_deal, split_order
from common.sampling import EpochOrder, Step, deal, worker_of
from common.tracing.attempt import Attempt, RecordedPlan
from common.tracing.report import Faults
from common.tracing.rows import Row
from common.tracing.run import RecordedRun


class Found(NamedTuple):
    """A row as the audit has read it: where it belongs, and its samples as numbers (-1: unknown)."""

    attempt: Attempt
    place: Step
    row: Row
    shards: np.ndarray  # int64, (n,)
    ids: np.ndarray  # int64, (n,): number of the sample in all shards, in the shards' own order

    def where(self) -> str:
        return f"epoch {self.place.epoch} step {self.place.step} rank {self.row.file_rank}"

    def sample(self, i: int) -> str:
        """Sample i of the row in words."""
        return f"{self.row.shard[i]} count {self.row.counts[i]} key {self.row.key[i]}"


class Resampled:
    """Equal steps with equal batches, drawn from the shards with replacement."""

    promise = "equal steps with equal batches on all ranks; samples are drawn with replacement"

    def __init__(self, run: RecordedRun, faults: Faults):
        self.run, self.faults = run, faults

    def check(self, found: Found) -> int:
        """Hold a row against the promise. Returns how many samples that were planned for it are not there."""
        size, plan = len(found.ids), found.attempt.plan
        expected = plan.global_batch // plan.world_size
        fewer = size < expected and found.place.epoch in self.run.skipped
        if size != expected and not fewer:
            self.faults.add("size", f"{found.where()}: {size} samples, planned {expected}")
        return max(expected - size, 0)


class Split(Resampled):
    """Shards dealt to ranks and workers anew in each epoch; each reads only its own."""

    promise = ("equal steps with equal batches on all ranks, each reading only its own shards; "
               "repeats and misses are allowed")

    def __init__(self, run: RecordedRun, faults: Faults):
        super().__init__(run, faults)
        self._owners = lru_cache(maxsize=3)(self._find_owners)

    def check(self, found: Found) -> int:
        """Hold the rank and worker of each sample against the deal, too."""
        row = found.row
        ranks, workers = self._owners(found.attempt.plan, found.place.epoch)[:, found.shards]
        own = (ranks == row.file_rank) & (workers == row.worker)
        for i in np.flatnonzero((found.shards >= 0) & ~own).tolist():
            to_worker = f"dealt to worker {workers[i]}, read by worker {row.worker[i]}"
            told = to_worker if ranks[i] == row.file_rank else f"dealt to rank {ranks[i]}"
            self.faults.add("deal", f"{found.where()}: {found.sample(i)}, {told}")
        return super().check(found)

    def _find_owners(self, plan: RecordedPlan, epoch: int) -> np.ndarray:
        """The rank and the worker of each shard: int64, (2, shards)."""
        owners = np.full((2, len(self.run.shard_sizes)), -1)
        order = split_order(self.run.shard_sizes, plan.shuffle, plan.seed, epoch)
        for rank, workers in enumerate(split_deal(order, plan.world_size, plan.num_workers)):
            for worker, shards in enumerate(workers):
                owners[0, shards], owners[1, shards] = rank, worker
        return owners


class Exact(Resampled):
    """Every sample once per epoch, in one order whatever the world."""

    promise = "every sample once per epoch, in the planned order, dealt evenly to all ranks in equal steps"

    def __init__(self, run: RecordedRun, faults: Faults):
        super().__init__(run, faults)
        self._order = lru_cache(maxsize=1)(self._make_order)
        self._step = lru_cache(maxsize=1)(self.planned)

    def check(self, found: Found) -> int:
        """Hold the samples, their order and the worker against the plan. Skipped samples may be left out."""
        mine = self._planned_for(found)
        worker = worker_of(found.place.global_step, found.attempt.plan.num_workers)
        if set(found.row.worker) - {worker}:
            told = ", ".join(map(str, sorted(set(found.row.worker))))
            self.faults.add("worker", f"{found.where()}: worker {told}, planned {worker}")
        if np.array_equal(found.ids, mine):
            return 0
        lacking = np.setdiff1d(mine, found.ids)
        skipped = np.intersect1d(lacking, self.run.skipped_in(found.place.epoch))
        mine = mine[~np.isin(mine, skipped)]
        if len(found.ids) != len(mine):
            self.faults.add("size", f"{found.where()}: {len(found.ids)} samples, planned {len(mine)}")
        if not np.array_equal(found.ids, mine):
            self._tell_order(found, mine)
        return len(lacking) - len(skipped)

    def planned(self, plan: RecordedPlan, epoch: int, start: int, stop: int) -> np.ndarray:
        """The ids of the samples at positions [start, stop) of an epoch: int64, (stop - start,)."""
        located = self._order(plan.shuffle, plan.seed, epoch).locate(start, stop)
        return self.run.offsets[located[:, 0]] + located[:, 1]

    def _planned_for(self, found: Found) -> np.ndarray:
        place, world_size = found.place, found.attempt.plan.world_size
        if found.row.file_rank >= world_size:
            return np.zeros(0, dtype=np.int64)
        start, stop = place.part(found.row.file_rank, world_size)
        step = self._step(found.attempt.plan, place.epoch, place.start, place.stop)
        return step[start - place.start : stop - place.start]

    def _make_order(self, window: int, seed: int, epoch: int) -> EpochOrder:
        return EpochOrder(self.run.shard_sizes, window, seed, epoch)

    def _tell_order(self, found: Found, mine: np.ndarray) -> None:
        """Name the first sample of a row that is not the planned one, and whose it is."""
        size = min(len(found.ids), len(mine))
        i = int(np.argmin(np.append(found.ids[:size] == mine[:size], False)))
        is_ = found.sample(i) + self._whose(found, found.ids[i]) if i < len(found.ids) else "nothing"
        planned = self.run.name(mine[i]) if i < len(mine) else "nothing"
        self.faults.add("order", f"{found.where()} row {i}: {is_}, planned {planned}")

    def _whose(self, found: Found, sample: int) -> str:
        place, world_size = found.place, found.attempt.plan.world_size
        at = np.flatnonzero(self._step(found.attempt.plan, place.epoch, place.start, place.stop) == sample)
        ranks = np.searchsorted(deal(place.size, world_size), at, side="right") - 1
        return f" (rank {ranks[0]}'s)" if len(ranks) and ranks[0] != found.row.file_rank else ""
