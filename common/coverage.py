"""Who reads which shard in `split`, and how many samples that misses and repeats in an epoch: from numbers alone.

`split` deals whole shards to ranks and then to workers, and cuts every rank at the same number of steps. Workers with
many samples leave some of them unread; workers with few read some twice. The start-up line says how many, and the
audit of a trace must find the same.

    >>> split_coverage([10, 3, 7], [0, 1, 2], world_size=2, num_workers=1, batch_size=4, steps=2)
    (9, 3)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.mixing import Mix
from common.sampling import SHARDS, deal, permutation


def split_order(shard_sizes: Sequence[int] | np.ndarray, window: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which `split` deals the shards of an epoch, the same on every rank: int64, empty shards left out.

    `window` is what `--shuffle` says: -1 keeps the shards' own order.
    """
    filled = np.flatnonzero(np.asarray(shard_sizes))
    return filled if window < 0 else filled[permutation(len(filled), seed, epoch, SHARDS)]


def split_deal(shard_order: Sequence[int] | np.ndarray, world_size: int, num_workers: int) -> list[list[list[int]]]:
    """The shards of each worker of each rank, in reading order: result[rank][worker] is a list of shard numbers.

    Rank r takes every `world_size`-th shard of the order from r on, worker w every W-th of those from w on, where
    W is `num_workers` but not more than the rank has shards (and at least 1: without workers the rank reads itself).
    """
    result = []
    for rank in range(world_size):
        shards = [int(shard) for shard in shard_order[rank::world_size]]
        active = max(1, min(num_workers, len(shards)))
        result.append([shards[worker::active] for worker in range(active)])
    return result


def split_coverage(shard_sizes: Sequence[int] | np.ndarray, shard_order: Sequence[int] | np.ndarray, world_size: int,
                   num_workers: int, batch_size: int, steps: int | range, mix: str = "none") -> tuple[int, int]:
    """(num_missed, num_repeated): samples that an epoch never uses, and samples that it uses more than once.

    `shard_order` is the epoch's order of shards, `batch_size` that of one rank. `steps` is the epoch's number of steps,
    or the range of the run's steps that they are: step t of a rank is made by its worker t % W, or with a `mix` that
    cuts batches into parts, part n of all by worker n % W. Raises ValueError where a worker would have nothing to read.

    With `--shuffle -1` this says which samples, too: the ends of some workers' shards are missed, the beginnings of
    others' repeated. A shuffle buffer changes which, but not how many, since each pass over a worker's shards empties
    it: a whole pass gives every sample once, and a pass cut short gives distinct ones.
    """
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    numbers = range(steps) if isinstance(steps, int) else steps
    num_missed = num_repeated = 0
    for rank, workers in enumerate(split_deal(shard_order, world_size, num_workers)):
        parts = Mix(mix, batch_size, len(workers), seed=0).pieces_per_step
        borders, pieces = deal(batch_size, parts), range(numbers.start * parts, numbers.stop * parts)
        for worker, shards in enumerate(workers):
            num_samples = int(sizes[shards].sum())
            size = borders[worker % parts + 1] - borders[worker % parts]
            num_reads = len(pieces[(worker - pieces.start) % len(workers) :: len(workers)]) * size
            if num_reads and not num_samples:
                raise ValueError(f"worker {worker} of rank {rank} has no samples to read")
            num_missed += max(num_samples - num_reads, 0)
            num_repeated += min(max(num_reads - num_samples, 0), num_samples)
    return num_missed, num_repeated
