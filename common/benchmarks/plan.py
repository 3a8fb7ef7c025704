"""What the plan of exact sampling costs, and what it says: no data, no torch, any number of shards and ranks.

    python -m common.benchmark --plan --shards 1000000 --samples_per_shard 1000 --ranks 4096 --rank 7 --worker 3
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from common.sampling import EpochOrder, Progress, Step, num_steps, steps, worker_of


class Place(NamedTuple):
    """Which of a worker's batches is asked for: the first from `step` of the epoch on."""

    rank: int
    worker: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Job:
    """A data set of equal shards, and who reads it in which order. `batch_size` is that of one rank."""

    num_shards: int
    samples_per_shard: int
    batch_size: int
    num_ranks: int
    num_workers: int
    window: int
    seed: int

    @property
    def num_samples(self) -> int:
        return self.num_shards * self.samples_per_shard

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.num_ranks

    @property
    def steps_per_epoch(self) -> int:
        return num_steps(self.num_samples, self.global_batch)

    def samples(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Shard and sample at the positions [first, last) of an epoch: int64, (last - first, 2)."""
        sizes = np.full(self.num_shards, self.samples_per_shard)
        return EpochOrder(sizes, self.window, self.seed, epoch).locate(first, last)


def show_plan(job: Job, place: Place) -> dict[str, Any]:
    """Make the order of one epoch, look up one worker's batch; print and return what it is and what that cost."""
    rank, worker, epoch, _ = place
    if not (0 <= rank < job.num_ranks and 0 <= worker < job.num_workers and epoch >= 0):
        raise UserError(f"no rank {rank}, worker {worker}, epoch {epoch} among {job.num_ranks} ranks of "
                        f"{job.num_workers} workers; --rank, --worker, --epoch; count from 0")
    step = _own_step(job, place)
    first, last = step.part(rank, job.num_ranks)
    start = time.perf_counter()
    samples = job.samples(epoch, first, last)
    seconds = time.perf_counter() - start
    tracemalloc.start()  # a second time, since watching the memory takes longer than the work
    job.samples(epoch, first, last)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{job.num_shards} shards × {job.samples_per_shard} samples, global batch {job.global_batch} = "
          f"{job.batch_size} × {job.num_ranks} ranks, {job.steps_per_epoch} steps per epoch")
    print(f"the order of epoch {epoch} and its first positions: {seconds:.2f} s, {peak / 1e6:.0f} MB at most")
    print(f"rank {rank}, worker {worker}: step {step.step} of the epoch, positions {first} to {last - 1}, "
          "as shard/sample:")
    shown = " ".join(f"{shard}/{sample}" for shard, sample in samples[:16].tolist())
    print(shown + " …" * (len(samples) > 16))
    return {
        "plan_seconds": seconds,
        "plan_bytes": peak,
        "step": step.step,
        "global_step": step.global_step,
        "positions": [first, last],
        "samples": samples.tolist(),
    }


def _own_step(job: Job, place: Place) -> Step:
    """The first step of the epoch, from the asked one on, that falls to the worker: t % workers makes step t."""
    _, worker, epoch, number = place
    per_epoch, global_batch = job.steps_per_epoch, job.global_batch
    if not 0 <= number < per_epoch:
        raise UserError(f"no step {number} in an epoch of {per_epoch} steps; --step; count from 0")
    progress = Progress(epoch, number, epoch * per_epoch + number, number * global_batch)
    ahead = steps(job.num_samples, global_batch, epoch + 1, progress)
    for step in itertools.takewhile(lambda step: step.epoch == epoch, ahead):
        if worker_of(step.global_step, job.num_workers) == worker:
            return step
    raise UserError(f"worker {worker} makes no batch from step {number} to the epoch's last, {per_epoch - 1}; "
                    "--step; ask for an earlier one")
