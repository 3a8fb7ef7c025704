"""What fits into a picture of a traced run: steps binned into columns, samples thinned to a few lines a cell.

It watches the audit go by, or is filled from a sample of the rows of a trace too long to read whole.
"""

from __future__ import annotations

import numpy as np

from common.sampling import Step
from common.tracing.promise import Found
from common.tracing.rows import last_row, rank_files, sampled_rows
from common.tracing.run import RecordedRun

NUM_COLUMNS = 400
NUM_LINES = 24  # samples that a cell shows; fewer where there are many ranks
MAX_LINES = 1200  # of all ranks together


class Canvas:
    """Takes rows in the order of steps. Its memory does not grow with the run.

    `shards` and `workers` are int32 (ranks, columns, lines): numbers, -1 where there is nothing. `uses`, `repeats` and
    `gaps` are int64 (ranks, columns): samples. A column is `width` steps; `epochs` and `starts` are steps of the run.
    """

    def __init__(self, run: RecordedRun, num_ranks: int, num_steps: int):
        self.run, self.num_steps = run, num_steps
        self.width = max(1, -(-num_steps // NUM_COLUMNS))
        shape = (num_ranks, -(-num_steps // self.width), max(4, min(NUM_LINES, MAX_LINES // num_ranks)))
        self.shards, self.workers = np.full((2, *shape), -1, dtype=np.int32)
        self.uses, self.repeats, self.gaps = np.zeros((3, *shape[:2]), dtype=np.int64)
        self.epochs: dict[int, int] = {}
        self.starts = [attempt.begin.global_step for attempt in run.attempts[1:]]
        self._open: dict[int, tuple[int, list[np.ndarray]]] = {}  # rank -> the column under way and its samples

    @classmethod
    def for_run(cls, run: RecordedRun) -> Canvas:
        """A canvas as wide as what was recorded; only the ends of the files are read."""
        last = [row for rank, path in rank_files(run.folder).items() if (row := last_row(path, rank))]
        num_steps = 1 + max((run.place_of(row).global_step for row in last), default=0)
        return cls(run, max(attempt.plan.world_size for attempt in run.attempts), num_steps)

    def use(self, found: Found, again: np.ndarray) -> None:
        """Draw a row of a rank of the world. `again` (n,) is true for a sample that the epoch had used before."""
        rank, column = found.row.file_rank, self._column(found.place)
        if rank >= len(self.shards):
            return
        if self._open.get(rank, (column,))[0] != column:
            self._draw(rank)
        samples = np.stack([found.shards, np.array(found.row.worker, dtype=np.int64)])
        self._open.setdefault(rank, (column, []))[1].append(samples)
        self.uses[rank, column] += len(again)
        self.repeats[rank, column] += int(again.sum())
        self.epochs.setdefault(found.place.epoch, found.place.global_step)

    def lose(self, place: Step, rank: int, num_samples: int) -> None:
        """Mark samples that were planned for a rank's step and are not there."""
        if rank < len(self.gaps):
            self.gaps[rank, self._column(place)] += num_samples

    def finish(self) -> None:
        """Draw the cells that are under way."""
        for rank in list(self._open):
            self._draw(rank)

    def fill_from_sample(self) -> None:
        """Draw a few rows of each column instead of all. Repeats and gaps stay unknown."""
        numbers = {name: i for i, name in enumerate(self.run.shard_names)}
        for rank, path in rank_files(self.run.folder).items():
            for row in sampled_rows(path, rank, 2 * NUM_COLUMNS):
                attempt, place = self.run.attempt_of(row), self.run.place_of(row)
                if attempt.is_live(row.epoch, row.step):
                    shards = np.array([numbers.get(name, -1) for name in row.shard], dtype=np.int64)
                    self.use(Found(attempt, place, row, shards, shards), shards < -1)

    def _column(self, place: Step) -> int:
        return min(place.global_step // self.width, self.shards.shape[1] - 1)

    def _draw(self, rank: int) -> None:
        column, parts = self._open.pop(rank)
        samples = np.concatenate(parts, axis=1)  # (2, n)
        if num_samples := samples.shape[1]:
            num_lines = self.shards.shape[2]
            shown = np.arange(num_lines) * num_samples // num_lines
            self.shards[rank, column], self.workers[rank, column] = samples[:, shown]
