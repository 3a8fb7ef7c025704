"""The plan of a run, as numbers: what an epoch is for this data set and this world. Printed, saved and checked.

    >>> plan.global_batch, plan.steps_per_epoch, plan.workers_of(rank=0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import sampling
from common.coverage import split_coverage, split_deal, split_order
from common.errors import UserError
from common.processes import available_cpus
from common.sampling import Progress
from common.shards import ShardIndex

SAME_ALWAYS = ("sampling", "seed", "shuffle", "num_samples", "num_classes", "data_digest", "bytes_digest")
MAYBE_UNKNOWN = ("bytes_digest",)  # then nothing can be said of it
SAME_FOR_STREAMS = ("mix", "batch_size", "world_size", "num_workers", "epoch_samples")


@dataclass(frozen=True)
class Plan:
    """`num_samples` are in the shards, `epoch_samples` are what an epoch counts; `batch_size` is that of one rank."""

    sampling: str
    mix: str
    seed: int
    shuffle: int
    num_samples: int
    epoch_samples: int
    batch_size: int
    world_size: int
    num_workers: int
    num_epochs: int
    max_steps: int | None
    shard_names: tuple[str, ...]
    shard_sizes: tuple[int, ...]
    num_classes: int
    classes: tuple[str, ...] | None
    data_digest: str
    bytes_digest: str | None = None

    @classmethod
    def make(cls, index: ShardIndex, *, sampling: str, mix: str, seed: int, shuffle: int,
             epoch_samples: int | None, batch_size: int, world_size: int, num_workers: int, num_epochs: int,
             max_steps: int | None) -> Plan:
        """The plan for a data set. Raises UserError where an epoch would have no step, or a rank nothing to read."""
        plan = cls(sampling, mix, seed, shuffle, index.num_samples, epoch_samples or index.num_samples, batch_size,
                   world_size, num_workers, num_epochs, max_steps, index.names, tuple(index.sizes.tolist()),
                   index.num_classes, index.classes, index.digest, index.bytes_digest)
        if not plan.steps_per_epoch:
            raise UserError(f"an epoch of {plan.epoch_samples} samples has no full batch of {plan.global_batch} "
                            f"(-b {batch_size} × {world_size} ranks); --sampling {sampling}; "
                            "lower -b, raise --epoch_samples, or use --sampling exact")
        if plan.deals_shards and plan.num_full_shards < world_size:
            raise UserError(f"more ranks than shards: shards={plan.num_full_shards}, ranks={world_size}, "
                            f"workers={num_workers}; --sampling {sampling}; "
                            "use --sampling exact, or make more and smaller shards")
        return plan

    @property
    def global_batch(self) -> int:
        """Samples per optimiser step over all ranks."""
        return self.batch_size * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return sampling.num_steps(self.epoch_samples, self.global_batch, self.drop_last)

    def total_steps(self, progress: Progress) -> int:
        """Optimiser steps of all epochs, as seen from `progress`: a batch of another size changes what is left."""
        left = sampling.num_steps(self.epoch_samples - progress.position, self.global_batch, self.drop_last)
        return progress.global_step + left + (self.num_epochs - progress.epoch - 1) * self.steps_per_epoch

    def end_step(self, progress: Progress) -> int:
        """The optimiser step at which the run ends: the last one, or that of --max_steps."""
        total = self.total_steps(progress)
        return total if self.max_steps is None else min(total, self.max_steps)

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with its last full batch."""
        return self.sampling != "exact"

    @property
    def deals_shards(self) -> bool:
        """Whether each shard belongs to one worker of one rank within an epoch."""
        return self.sampling == "split" or (self.sampling == "resampled" and self.shuffle < 0)

    @property
    def num_full_shards(self) -> int:
        return sum(size > 0 for size in self.shard_sizes)

    def workers_of(self, rank: int) -> int:
        """Loader workers that `rank` can feed: where shards are dealt, none without a shard."""
        if not self.deals_shards:
            return self.num_workers
        return min(self.num_workers, len(range(rank, self.num_full_shards, self.world_size)))

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for config.json and checkpoints."""
        fields = dataclasses.asdict(self) | {"global_batch": self.global_batch, "steps_per_epoch": self.steps_per_epoch}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def check_resumed(self, saved: dict[str, Any]) -> None:
        """Raise UserError for the first field in which a run to be continued differs and must not."""
        current = self.as_dict()
        names = SAME_ALWAYS + (SAME_FOR_STREAMS if self.sampling != "exact" else ())
        pairs = [(name, saved[name], current[name]) for name in names if name in saved]
        classes = zip(saved.get("classes") or (), self.classes or (), strict=False)
        pairs += [(f"class {number}", *both) for number, both in enumerate(classes)]
        for name, before, now in pairs:
            if before == now or name in MAYBE_UNKNOWN and None in (before, now):
                continue
            what = "other shards under the same names: " if name in MAYBE_UNKNOWN else ""
            raise UserError(f"{what}the run to be continued had {name} {before}, this one has {now}; "
                            "--resume; give the old value, or start another run with --weights FILE")

    def lines(self, local_ranks: int = 1) -> Iterator[str]:
        """What the start-up says."""
        mixed = f", mix {self.mix}" if self.mix != "none" else ""
        yield (f"data: {self.num_samples} samples, {len(self.shard_names)} shards, {self.num_classes} classes; "
               f"sampling {self.sampling}{mixed}, shuffle {self.shuffle}, seed {self.seed}")
        yield (f"plan: global batch {self.global_batch} = {self.batch_size} × {self.world_size} ranks, "
               f"{self.steps_per_epoch} steps per epoch on every rank, {self.num_epochs} epochs")
        empty = len(self.shard_names) - self.num_full_shards
        if empty:
            yield f"warning: {empty} shards are empty, such as {self.shard_names[self.shard_sizes.index(0)]}"
        if self.deals_shards:
            yield self._dealt()
        elif self.sampling == "resampled":
            yield ("sampling with replacement: an epoch repeats some samples and misses others "
                   "(--sampling exact does neither)")
        cores, readers = available_cpus(), self.num_workers * local_ranks
        if readers > cores:
            yield (f"warning: {self.num_workers} loader workers × {local_ranks} ranks on this node are more than its "
                   f"{cores} cores; lower -w")

    def _dealt(self) -> str:
        order = split_order(self.shard_sizes, self.shuffle, self.seed, 0)
        missed, repeated = split_coverage(self.shard_sizes, order, self.world_size, self.num_workers, self.batch_size,
                                          self.steps_per_epoch, mix=self.mix)
        shares = ["/".join(str(len(shards)) for shards in workers)
                  for workers in split_deal(order, self.world_size, self.num_workers)]
        shown = ", ".join(shares[:8]) + (", …" if len(shares) > 8 else "")
        return (f"shards per worker, rank by rank: {shown}; the first epoch misses {missed} samples and repeats "
                f"{repeated} (--sampling exact does neither)")
