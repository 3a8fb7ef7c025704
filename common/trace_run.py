"""What a traced run promised and where each of its attempts began: config.json, status.json and errors.jsonl as objects.

    >>> run = Run.open("runs/ddp")
    >>> run.attempts[-1].place(epoch=0, step=12)          # Step(epoch=0, step=12, global_step=12, start=…, stop=…)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common import sampling
from common.errors import UserError
from common.sampling import Progress, Step
from common.trace_rows import rank_files, survey

MODES = ("exact", "split", "resampled")


@dataclass(frozen=True)
class Plan:
    """What one attempt set out to do; the fields of `plan` in config.json that the audit needs."""

    sampling: str
    seed: int
    shuffle: int
    epoch_samples: int
    global_batch: int
    world_size: int
    num_workers: int
    num_epochs: int
    max_steps: int | None = None

    @property
    def drop_last(self) -> bool:
        return self.sampling != "exact"


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `limit` is where the attempts after it took over, as (epoch, position); None: nowhere."""

    number: int
    plan: Plan
    begin: Progress
    limit: tuple[int, int] | None = None

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch when this attempt brings it to its end."""
        done = self.begin if epoch == self.begin.epoch else Progress(epoch)
        return done.step + sampling.num_steps(self.plan.epoch_samples - done.position, self.plan.global_batch, self.plan.drop_last)

    def place(self, epoch: int, step: int) -> Step:
        """Which samples of the epoch, and which step of the run, a step is. Past the end of the epoch it is empty."""
        begin, plan = self.begin, self.plan
        if epoch == begin.epoch:
            since, start = step - begin.step, begin.position
        else:
            whole = sampling.num_steps(plan.epoch_samples, plan.global_batch, plan.drop_last)
            since, start = step, 0
            step_before = self.num_steps(begin.epoch) - begin.step + (epoch - begin.epoch - 1) * whole
            begin = Progress(global_step=begin.global_step + step_before)
        start = min(start + since * plan.global_batch, plan.epoch_samples)
        return Step(epoch, step, begin.global_step + since, start, min(start + plan.global_batch, plan.epoch_samples))

    def step_at(self, epoch: int, position: int) -> int:
        """The step that holds a position of an epoch."""
        done = self.begin if epoch == self.begin.epoch else Progress(epoch)
        return done.step + (position - done.position) // self.plan.global_batch

    def is_before(self, epoch: int, step: int) -> bool:
        """Whether a step lies before this attempt began, so that it cannot be one of its."""
        return (epoch, step) < (self.begin.epoch, self.begin.step)

    def is_live(self, epoch: int, step: int) -> bool:
        """Whether the step counts: a later attempt replaces the same and later ones."""
        return self.limit is None or (epoch, self.place(epoch, step).start) < self.limit


@dataclass(frozen=True)
class Run:
    """A run's folder, read. Shards are known by name and size; `sizes_known` is False where they are only what was seen."""

    folder: Path
    attempts: list[Attempt]
    state: str | None
    shard_names: list[str]
    shard_sizes: np.ndarray
    sizes_known: bool = True
    classes: list[str] | None = None
    skipped: dict[int | None, np.ndarray] = field(default_factory=dict)  # epoch -> ids of samples; None: of every epoch

    @property
    def plan(self) -> Plan:
        """That of the last attempt."""
        return self.attempts[-1].plan

    @cached_property
    def offsets(self) -> np.ndarray:
        """The id of each shard's first sample: int64, (shards,). An id is a shard's offset and a sample's count."""
        return np.cumsum(self.shard_sizes) - self.shard_sizes

    def attempt_at(self, epoch: int, position: int) -> Attempt:
        """The attempt whose rows count at a position of an epoch."""
        begun = [a for a in self.attempts if (a.begin.epoch, a.begin.position) <= (epoch, position)]
        return next((a for a in begun if a.limit is None or (epoch, position) < a.limit), self.attempts[-1])

    def name(self, sample: int) -> str:
        """A sample in words. Its key is not known unless it was read."""
        shard = int(np.searchsorted(self.offsets + self.shard_sizes, sample, side="right"))
        return f"{self.shard_names[shard]} count {sample - self.offsets[shard]}"

    @classmethod
    def open(cls, folder: str | Path, shards: Sequence[str] | None = None) -> Run:
        """Read what the run left. Raises UserError for a folder without a trace or with files that contradict themselves."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder; {folder}; give the run's --output")
        if not rank_files(folder):
            raise UserError(f"no trace; {folder / 'trace'}; train with --trace save")
        config, status = _load(folder / "config.json"), _load(folder / "status.json", default={})
        plan = config.get("plan")
        if not isinstance(plan, dict):
            raise UserError(f"config.json has no plan; {folder}; it cannot be judged")
        names, sizes = plan.get("shard_names") or [], plan.get("shard_sizes") or []
        if shards:
            names, sizes = _compare(names, sizes, shards)
        known, begins = bool(names) and len(sizes) == len(names), status.get("attempts") or config.get("attempts")
        if not known and plan.get("sampling") == "exact":
            raise UserError(f"config.json has no sizes of shards; {folder}; name the shards with -s")
        firsts, seen = ({}, {}) if known and begins else survey(folder)
        if not known:
            names, sizes = list(seen), list(seen.values())
        run = cls(folder, _attempts(config, begins, firsts), status.get("state"), names,
                  np.asarray(sizes, dtype=np.int64), known, plan.get("classes"))
        if run.plan.sampling == "exact" and any(a.plan.epoch_samples > run.shard_sizes.sum() for a in run.attempts):
            raise UserError(f"the plan counts {run.plan.epoch_samples} samples, the shards hold {run.shard_sizes.sum()}; {folder}; it cannot be judged")
        run.skipped.update(_skipped(folder / "errors.jsonl", run))
        return run

    def skipped_in(self, epoch: int) -> np.ndarray:
        """Ids of the samples that `--on_error skip` left out in an epoch."""
        none = np.zeros(0, dtype=np.int64)
        return np.union1d(self.skipped.get(epoch, none), self.skipped.get(None, none))


def _load(path: Path, default: dict | None = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        if default is not None:
            return default
        raise UserError(f"no {path.name}; {path.parent}; give the run's --output") from None
    except (OSError, ValueError) as error:
        raise UserError(f"not readable ({error}); {path}; it cannot be judged") from None
    if not isinstance(value, dict):
        raise UserError(f"not an object; {path}; it cannot be judged")
    return value


def _compare(names: list[str], sizes: list[int], shards: Sequence[str]) -> tuple[list[str], list[int]]:
    from common.shards import ShardIndex  # loads torch

    index = ShardIndex.open(shards)
    found = dict(zip(index.names, index.sizes.tolist(), strict=True))
    planned = dict(zip(names, sizes, strict=False))
    for name in [name for name in {**planned, **found} if planned and found.get(name) != planned.get(name)]:
        raise UserError(f"the shards are not those of the run: {planned.get(name, 'no')} samples then, {found.get(name, 'none')} now; "
                        f"shard {name}; -s {shards[0]}")
    return (names, sizes) if planned else (list(found), list(found.values()))


def _plan(values: Any, number: int) -> Plan:
    if not isinstance(values, dict):
        raise UserError(f"config.json has no plan; attempt {number}; it cannot be judged")
    missing = [f.name for f in fields(Plan) if f.name != "max_steps" and not isinstance(values.get(f.name), (int, str))]
    if missing:
        raise UserError(f"the plan in config.json has no {missing[0]}; attempt {number}; it cannot be judged")
    plan = Plan(**{f.name: values.get(f.name) for f in fields(Plan)})
    if plan.sampling not in MODES or min(plan.global_batch, plan.world_size, plan.epoch_samples) < 1:
        raise UserError(f"the plan in config.json makes no sense; attempt {number}; it cannot be judged")
    return plan


def _attempts(config: dict, begins: Any, firsts: dict[int, tuple[int, int]]) -> list[Attempt]:
    """Every attempt with its plan and beginning; the latter from each one's first row where status.json has none."""
    plans = list(config.get("plans") or [])
    count = len(begins) if begins else max(firsts, default=0) + 1
    attempts: list[Attempt] = []
    for number in range(count):
        plan = _plan(plans[number] if number < len(plans) else config.get("plan"), number)
        try:
            begin = Progress(**{f.name: int(begins[number][f.name]) for f in fields(Progress)}) if begins else None
        except (KeyError, TypeError, ValueError):
            raise UserError(f"status.json does not say where attempt {number} began; it cannot be judged") from None
        attempts.append(Attempt(number, plan, begin or _derived(attempts, firsts)))
    return list(_with_limits(attempts))


def _derived(earlier: list[Attempt], firsts: dict[int, tuple[int, int]]) -> Progress:
    """Where the attempt after `earlier` began, from its first row: counted on from the attempt that brought the run there.

    One that came to no row takes the place of the next that did.
    """
    if not earlier:
        return Progress()
    first = next(firsts[number] for number in sorted(firsts) if number >= len(earlier))
    origin = next((a for a in reversed(earlier) if not a.is_before(*first)), earlier[0])
    place = origin.place(*first)
    return Progress(place.epoch, place.step, place.global_step, place.start)


def _with_limits(attempts: list[Attempt]) -> Iterator[Attempt]:
    limits: list[tuple[int, int] | None] = [None]
    for _, later in reversed(list(pairwise(attempts))):
        begin = (later.begin.epoch, later.begin.position)
        limits.append(begin if limits[-1] is None else min(begin, limits[-1]))
    for attempt, limit in zip(attempts, reversed(limits), strict=True):
        yield Attempt(attempt.number, attempt.plan, attempt.begin, limit)


def _skipped(path: Path, run: Run) -> dict[int | None, np.ndarray]:
    """The lines of errors.jsonl by epoch, as ids."""
    offsets = dict(zip(run.shard_names, run.offsets.tolist(), strict=True))
    found: dict[int | None, set[int]] = {}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            shard, count, epoch = entry["shard"], entry.get("count"), entry.get("epoch")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"not a skipped sample; {path} line {number}; it cannot be judged") from None
        if shard in offsets and isinstance(count, int):
            found.setdefault(epoch, set()).add(offsets[shard] + count)
    return {epoch: np.array(sorted(ids), dtype=np.int64) for epoch, ids in found.items()}
