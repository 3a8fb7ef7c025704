"""What the plan of exact sampling costs, and what it says: no data, no torch, any number of shards and ranks.

python -m common.benchmark --plan --shards 1000000 --samples_per_shard 1000 --ranks 4096 --rank 7 --worker 3 --step 5
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np

from common.errors import UserError
from common.sampling import EpochOrder, Progress, Step, num_steps, steps, worker_of

Place = tuple[int, int, int, int]  # rank, worker, epoch, step: which of a worker's batches is asked for


def show_plan(
    num_shards: int,
    samples_per_shard: int,
    batch_size: int,
    num_ranks: int,
    num_workers: int,
    window: int,
    seed: int,
    place: Place,
) -> dict[str, Any]:
    """Make the order of one epoch, look up one worker's batch; print and return what it is and what that cost."""
    rank, worker, epoch, step_number = place
    if not (0 <= rank < num_ranks and 0 <= worker < num_workers and epoch >= 0):
        raise UserError(
            f"no rank {rank}, worker {worker}, epoch {epoch} among {num_ranks} ranks of {num_workers} workers; "
            "--rank, --worker, --epoch; count from 0"
        )
    global_batch = batch_size * num_ranks
    num_samples = num_shards * samples_per_shard
    step = _own_step(num_samples, global_batch, place, num_workers)
    first, last = step.part(rank, num_ranks)
    sizes = np.full(num_shards, samples_per_shard)
    start = time.perf_counter()
    samples = EpochOrder(sizes, window, seed, epoch).locate(first, last)
    seconds = time.perf_counter() - start
    tracemalloc.start()  # a second time, since watching the memory takes longer than the work
    EpochOrder(sizes, window, seed, epoch).locate(first, last)
    peak = sizes.nbytes + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(
        f"{num_shards} shards × {samples_per_shard} samples, "
        f"global batch {global_batch} = {batch_size} × {num_ranks} ranks, "
        f"{num_steps(num_samples, global_batch)} steps per epoch"
    )
    print(f"the order of epoch {epoch} and its first positions: {seconds:.2f} s, {peak / 1e6:.0f} MB at most")
    print(
        f"rank {rank}, worker {worker}: step {step.step} of the epoch, "
        f"positions {first} to {last - 1}, as shard/sample:"
    )
    print(
        " ".join(f"{shard}/{sample}" for shard, sample in samples[:16].tolist()) + (" …" if len(samples) > 16 else "")
    )
    return {
        "plan_seconds": seconds,
        "plan_bytes": peak,
        "step": step.step,
        "global_step": step.global_step,
        "positions": [first, last],
        "samples": samples.tolist(),
    }


def _own_step(num_samples: int, global_batch: int, place: Place, num_workers: int) -> Step:
    """The first step of the epoch, from the asked one on, that falls to the worker: t % workers makes step t."""
    _, worker, epoch, number = place
    per_epoch = num_steps(num_samples, global_batch)
    if not 0 <= number < per_epoch:
        raise UserError(f"no step {number} in an epoch of {per_epoch} steps; --step; count from 0")
    progress = Progress(epoch, number, epoch * per_epoch + number, number * global_batch)
    ahead = itertools.takewhile(lambda step: step.epoch == epoch, steps(num_samples, global_batch, epoch + 1, progress))
    for step in ahead:
        if worker_of(step.global_step, num_workers) == worker:
            return step
    raise UserError(
        f"worker {worker} makes no batch from step {number} to the epoch's last, {per_epoch - 1}; "
        "--step; ask for an earlier one"
    )
