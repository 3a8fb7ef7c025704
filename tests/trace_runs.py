"""Folders of traced runs without training: what each sampling mode writes, from arithmetic; tests then spoil it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.sampling import SHARDS, EpochOrder, Progress, Step, permutation, steps

Row = dict[str, Any]
Samples = list[tuple[int, int, int]]  # worker, shard, count


@dataclass
class Start:
    """One attempt: its world, how many steps it takes (None: to the end), after how many the next one goes on."""

    world_size: int = 2
    batch_size: int = 4
    num_steps: int | None = None
    saved: int | None = None


@dataclass
class TracedRun:
    """What `write` lays down. `rows` is by rank, in order."""

    folder: Path
    config: dict[str, Any]
    status: dict[str, Any]
    rows: dict[int, list[Row]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def write(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "trace").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "status.json").write_text(json.dumps(self.status))
        for rank, rows in self.rows.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.folder / "trace" / f"rank{rank:05d}.jsonl").write_text(text)
        if self.errors:
            (self.folder / "errors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.errors))
        return self.folder


def make_run(folder: Path, sampling: str = "exact", sizes: Sequence[int] = (10, 3, 7),
             starts: Sequence[Start] = (Start(),), *, num_workers: int = 2, num_epochs: int = 2, shuffle: int = 5,
             seed: int = 3, state: str = "complete", max_steps: int | None = None, mix: str = "none") -> TracedRun:
    """A clean run. A later start goes on where the one before was saved, in its own world."""
    total, drop_last = sum(sizes), sampling != "exact"
    plans, begins, rows = [], [], {}
    progress = Progress()
    for attempt, start in enumerate(starts):
        global_batch = start.world_size * start.batch_size
        plans.append({
            "sampling": sampling, "mix": mix, "seed": seed, "shuffle": shuffle, "num_samples": total,
            "epoch_samples": total, "global_batch": global_batch, "world_size": start.world_size,
            "num_workers": num_workers, "num_epochs": num_epochs, "max_steps": max_steps,
            "steps_per_epoch": total // global_batch if drop_last else -(-total // global_batch),
            "shard_names": [f"train-{i:04d}" for i in range(len(sizes))], "shard_sizes": list(sizes), "num_classes": 2,
            "classes": ["cat", "dog"], "data_digest": "0",
        })
        begins.append(asdict(progress))
        make = MAKERS[sampling](sizes, plans[-1])
        following = list(itertools.islice(steps(total, global_batch, num_epochs, progress, drop_last), start.num_steps))
        for step in following:
            for rank in range(start.world_size):
                rows.setdefault(rank, []).append(row_of(attempt, step, rank, start.world_size, make(step, rank), sizes))
        done = following[: len(following) if start.saved is None else start.saved]
        if done:
            progress = Progress(done[-1].epoch, done[-1].step + 1, done[-1].global_step + 1, done[-1].stop)
    config = {"script": "train_ddp", "config": {}, "plan": plans[-1], "plans": plans}
    status = {"state": state, "attempt": len(starts) - 1, "reason": None, "attempts": begins}
    return TracedRun(folder, config, status, rows)


def row_of(attempt: int, step: Step, rank: int, world_size: int, samples: Samples, sizes: Sequence[int]) -> Row:
    """The line of a trace."""
    offsets = np.cumsum(sizes) - sizes
    return {
        "attempt": attempt, "epoch": step.epoch, "step": step.step, "rank": rank, "world_size": world_size,
        "device": "cpu",
        "worker": [worker for worker, _, _ in samples], "shard": [f"train-{shard:04d}" for _, shard, _ in samples],
        "count": [count for _, _, count in samples],
        "key": [f"k{offsets[shard] + count:05d}" for _, shard, count in samples],
        "label": [int(offsets[shard] + count) % 2 for _, shard, count in samples], "replica": [0] * len(samples),
    }


Maker = Callable[[Step, int], Samples]


def exact(sizes: Sequence[int], plan: dict[str, Any]) -> Maker:
    def make(step: Step, rank: int) -> Samples:
        order = EpochOrder(sizes, plan["shuffle"], plan["seed"], step.epoch)
        worker = step.global_step % max(plan["num_workers"], 1)
        return [(worker, int(shard), int(count)) for shard, count in order.locate(*step.part(rank, plan["world_size"]))]

    return make


def split(sizes: Sequence[int], plan: dict[str, Any]) -> Maker:
    streams: dict[tuple[int, int, int], Iterator[tuple[int, int]]] = {}
    batch_size = plan["global_batch"] // plan["world_size"]

    def own(epoch: int, rank: int) -> list[int]:
        order = [i for i, size in enumerate(sizes) if size]
        if plan["shuffle"] >= 0:
            order = [order[i] for i in permutation(len(order), plan["seed"], epoch, SHARDS)]
        return order[rank :: plan["world_size"]]

    def make(step: Step, rank: int) -> Samples:
        shards = own(step.epoch, rank)
        active = max(1, min(plan["num_workers"], len(shards)))
        parts = [(worker, batch_size // active + (worker < batch_size % active)) for worker in range(active)]
        result: Samples = []
        for worker, part in parts if plan["mix"] == "pooled" else [(step.global_step % active, batch_size)]:
            key = (step.epoch, rank, worker)
            mine = shards[worker::active]
            if key not in streams:
                streams[key] = itertools.cycle([(shard, count) for shard in mine for count in range(sizes[shard])])
            result += [(worker, *sample) for sample in itertools.islice(streams[key], part)]
        return result

    return make


def resampled(sizes: Sequence[int], plan: dict[str, Any]) -> Maker:
    def make(step: Step, rank: int) -> Samples:
        draw = np.random.default_rng([plan["seed"], step.global_step, rank])
        shards = draw.choice(np.flatnonzero(sizes), plan["global_batch"] // plan["world_size"])
        worker = step.global_step % max(plan["num_workers"], 1)
        return [(worker, int(shard), int(draw.integers(sizes[shard]))) for shard in shards]

    return make


MAKERS = {"exact": exact, "split": split, "resampled": resampled}
