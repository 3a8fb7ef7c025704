"""Which sample goes to which epoch, step, rank and worker: pure arithmetic, no torch, no files.

`exact` sampling is a function of numbers: the seed and the epoch fix one global order of all
samples, whatever the world; ranks and workers only take parts of it. So a place in an epoch is
one integer, resuming needs no replay, and every promise can be tested without starting a process.

    >>> order = EpochOrder(shard_sizes=[10, 3, 7], window=5000, seed=0, epoch=0)
    >>> order.locate(0, 4).shape                # (shard, sample within it) of the first four positions
    (4, 2)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def hashed(*numbers: int) -> int:
    """Fold integers into one 64-bit hash. Equal numbers in another order give another hash.

    The finaliser is that of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014). Own arithmetic and not a library generator, because the order of a run
    must outlive releases of NumPy and Python.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size) fixed by `key`: int64, shape (size,). Sorts a hash of each index."""
    with np.errstate(over="ignore"):
        state = np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(hashed(*key))
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return np.argsort(state, kind="stable")


# What a hash is for. Two uses may meet in one hash where they have it in different places of the key; each makes
# something else of it (a permutation, a random.Random, torch's seed).
SHARDS, SAMPLES, AUGMENT, BUFFER, STEP = range(5)


class EpochOrder:
    """The global order of one epoch: O(shards) memory, windows permuted when they are reached.

    Shards are permuted; consecutive ones are joined into windows of at least `window` samples; samples
    are permuted within their window. A window never reaches into another epoch. `window` -1 keeps the
    shards' own order, 0 permutes the shards alone. This is a block shuffle, the idea of "py1b" in
    mosaicml/streaming, without its canonical nodes: the order here does not depend on the world at all.
    """

    def __init__(self, shard_sizes: Sequence[int] | np.ndarray, window: int, seed: int, epoch: int):
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.window, self.seed, self.epoch = window, seed, epoch
        self.shards = np.arange(len(sizes)) if window < 0 else permutation(len(sizes), seed, epoch, SHARDS)
        self.starts = np.concatenate([[0], np.cumsum(sizes[self.shards])])  # (shards + 1,): position where each begins
        self.num_samples = int(self.starts[-1])
        self.window_starts = _window_starts(self.starts, window)  # (windows + 1,)
        self._permuted_window = lru_cache(maxsize=2)(self._permute_window)

    def _permute_window(self, index: int) -> np.ndarray:
        start, stop = self.window_starts[index], self.window_starts[index + 1]
        return start + permutation(int(stop - start), self.seed, self.epoch, SAMPLES, index)

    def _places(self, start: int, stop: int) -> np.ndarray:
        """Where the samples at positions [start, stop) stand among the permuted shards, read front to back."""
        if self.window <= 0:
            return np.arange(start, stop)
        parts = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            index = int(np.searchsorted(self.window_starts, start, side="right")) - 1
            first, last = self.window_starts[index], min(self.window_starts[index + 1], stop)
            parts.append(self._permuted_window(index)[start - first : last - first])
            start = int(last)
        return np.concatenate(parts)

    def locate(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions [start, stop): int64, shape (stop - start, 2), columns shard and place in it."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"positions [{start}, {stop}) outside an epoch of {self.num_samples}")
        places = self._places(start, stop)
        rows = np.searchsorted(self.starts, places, side="right") - 1
        return np.stack([self.shards[rows], places - self.starts[rows]], axis=1)


def _window_starts(starts: np.ndarray, window: int) -> np.ndarray:
    """Cut the epoch at shard borders into windows of at least `window` samples (the last may be shorter)."""
    if window <= 0:
        return starts[[0, -1]]
    # The border that follows each border, for all of them at once; then the chain from 0 is walked.
    following = np.searchsorted(starts, starts + window).clip(max=len(starts) - 1).data
    borders = array("q", [0])
    while borders[-1] < len(starts) - 1:
        borders.append(following[borders[-1]])
    return starts[np.frombuffer(borders, dtype=np.int64)]


def deal(num_samples: int, num_parts: int) -> list[int]:
    """Borders that cut `num_samples` into `num_parts` runs that differ by at most one, the longer first."""
    base, extra = divmod(num_samples, num_parts)
    return [part * base + min(part, extra) for part in range(num_parts + 1)]


@dataclass(frozen=True)
class Step:
    """One global batch: positions [start, stop) of an epoch. `step` counts in the epoch, `global_step` in the run."""

    epoch: int
    step: int
    global_step: int
    start: int
    stop: int
    last: bool = False  # of its epoch

    @property
    def size(self) -> int:
        return self.stop - self.start

    def part(self, rank: int, world_size: int) -> tuple[int, int]:
        """The positions [start, stop) of one rank."""
        borders = deal(self.size, world_size)
        return self.start + borders[rank], self.start + borders[rank + 1]


@dataclass(frozen=True)
class Progress:
    """Where a run stands: what has been done, so also what comes next. All a checkpoint needs to go on reading.

    `step` and `position` count optimiser steps and samples within `epoch`; `global_step` counts steps since the start.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    position: int = 0


def num_steps(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Optimiser steps of a pass over `num_samples`."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def steps(num_samples: int, global_batch: int, num_epochs: int, progress: Progress,
          drop_last: bool = False) -> Iterator[Step]:
    """Every step from `progress` to the end of the last epoch. A batch of another size begins where the last ended."""
    epoch, step, global_step, position = progress.epoch, progress.step, progress.global_step, progress.position
    while epoch < num_epochs:
        end = num_samples - (num_samples - position) % global_batch if drop_last else num_samples
        while position < end:
            stop = min(position + global_batch, num_samples)
            yield Step(epoch, step, global_step, position, stop, last=stop >= end)
            step, global_step, position = step + 1, global_step + 1, stop
        epoch, step, position = epoch + 1, 0, 0


def worker_of(global_step: int, num_workers: int) -> int:
    """The number of the loader worker that makes a batch: it follows the run's step, so a restart keeps it."""
    return global_step % max(num_workers, 1)
