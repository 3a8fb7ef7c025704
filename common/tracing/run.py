"""The folder of a traced run as an object: its attempts, its shards, what it skipped, how it ended.

    >>> run = RecordedRun.open("runs/ddp")
    >>> run.state, len(run.attempts), run.plan.sampling
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.sampling import Progress, Step
from common.tracing.attempt import Attempt, RecordedPlan, begin_from_rows, with_limits
from common.tracing.rows import BEYOND, Row, rank_files, survey


@dataclass(frozen=True)
class RecordedRun:
    """What config.json, status.json and errors.jsonl say. `sizes_known` is False where sizes are what rows showed.

    A sample's id is its number in all shards, in the shards' own order. `skipped` holds, by epoch, the ids of samples
    that `--on_error skip` left out.
    """

    folder: Path
    attempts: list[Attempt]
    state: str | None
    shard_names: list[str]
    shard_sizes: np.ndarray
    sizes_known: bool = True
    classes: list[str] | None = None
    skipped: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path, shards: Sequence[str] | None = None) -> RecordedRun:
        """Read a run's folder. Raises UserError for one without a trace, or with files that contradict each other."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder; {folder}; give the run's --output")
        if not rank_files(folder):
            raise UserError(f"no trace; {folder / 'trace'}; train with --trace save")
        config, status = _load(folder / "config.json"), _load(folder / "status.json", default={})
        plan = config.get("plan")
        if not isinstance(plan, dict):
            raise UserError(f"config.json has no plan; {folder}; it cannot be judged")
        names, sizes = _listed(plan, "shard_names", str), _listed(plan, "shard_sizes", int)
        if shards:
            names, sizes = _compare(names, sizes, shards)
        if not all(0 <= size < BEYOND for size in sizes):
            raise UserError(f"config.json has absurd sizes of shards; {folder}; it cannot be judged")
        known, begins = len(sizes) == len(names) > 0, _listed(status, "attempts", dict)
        begins = begins or _listed(config, "attempts", dict)
        if not known and plan.get("sampling") == "exact":
            raise UserError(f"config.json has no sizes of shards; {folder}; name the shards with -s")
        firsts, seen = ({}, {}) if known and begins else survey(folder)
        if not known:
            names, sizes = list(seen), list(seen.values())
        run = cls(folder, _attempts(config, begins, firsts), status.get("state"), names,
                  np.asarray(sizes, dtype=np.int64), known, _listed(plan, "classes", str) or None)
        run._check_sizes()
        run.skipped.update(_skipped(run))
        return run

    @property
    def plan(self) -> RecordedPlan:
        """That of the last attempt."""
        return self.attempts[-1].plan

    @cached_property
    def offsets(self) -> np.ndarray:
        """The id of each shard's first sample: int64, (shards,)."""
        return np.cumsum(self.shard_sizes) - self.shard_sizes

    def attempt_at(self, epoch: int, position: int) -> Attempt:
        """The attempt whose rows count at a position of an epoch."""
        found = [a for a in self.attempts if a.has_begun(epoch, position) and a.holds(epoch, position)]
        return found[0] if found else self.attempts[-1]

    def attempt_of(self, row: Row) -> Attempt:
        """The attempt that recorded a row. Raises UserError for one that no file knows of."""
        if not 0 <= row.attempt < len(self.attempts):
            raise UserError(f"a row of attempt {row.attempt}, status.json knows {len(self.attempts)}; {self.folder}; "
                            "it cannot be judged")
        return self.attempts[row.attempt]

    def place_of(self, row: Row) -> Step:
        """The step of a row."""
        return self.attempt_of(row).place(row.epoch, row.step)

    def skipped_in(self, epoch: int) -> np.ndarray:
        """Ids of the samples that were left out of an epoch."""
        return self.skipped.get(epoch, np.zeros(0, dtype=np.int64))

    def name(self, sample: int) -> str:
        """A sample in words, from its id. Its key is not known unless it was read."""
        shard = int(np.searchsorted(self.offsets + self.shard_sizes, sample, side="right"))
        return f"{self.shard_names[shard]} count {sample - self.offsets[shard]}"

    def _check_sizes(self) -> None:
        total, planned = int(self.shard_sizes.sum()), max(a.plan.epoch_samples for a in self.attempts)
        if self.plan.sampling == "exact" and planned > total:
            raise UserError(f"the plan counts {planned} samples, the shards hold {total}; {self.folder}; "
                            "it cannot be judged")


def _load(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        if default is not None:
            return default
        raise UserError(f"no {path.name}; {path.parent}; give the run's --output") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not readable ({error}); {path}; it cannot be judged") from None
    if not isinstance(value, dict):
        raise UserError(f"not an object; {path}; it cannot be judged")
    return value


def _listed(values: dict[str, Any], name: str, kind: type) -> list[Any]:
    """A list of a run's files, empty where there is none. Raises UserError for one of something else."""
    items = values.get(name) or []
    if type(items) is not list or not all(type(item) is kind for item in items):
        raise UserError(f"{name} in config.json or status.json holds something else; it cannot be judged")
    return items


def _compare(names: list[str], sizes: list[int], shards: Sequence[str]) -> tuple[list[str], list[int]]:
    """Hold the plan's shards against those that -s names; where the plan has none, take these."""
    from common.shards import ShardIndex  # loads torch

    index = ShardIndex.open(shards)
    found = dict(zip(index.names, index.sizes.tolist(), strict=True))
    planned = dict(zip(names, sizes, strict=False)) or found
    for name in {**planned, **found}:
        then, now = planned.get(name, "no"), found.get(name, "no")
        if then != now:
            raise UserError(f"the shards are not those of the run ({then} samples then, {now} now); shard {name}; "
                            f"correct -s {shards[0]}")
    return list(planned), list(planned.values())


def _attempts(config: dict[str, Any], begins: list[Any], firsts: dict[int, tuple[int, int]]) -> list[Attempt]:
    """Every attempt with its plan and beginning; the latter from each one's first row where no file has it."""
    plans = _listed(config, "plans", dict)
    attempts: list[Attempt] = []
    for number in range(len(begins) if begins else max(firsts, default=0) + 1):
        plan = RecordedPlan.from_dict(plans[number] if number < len(plans) else config.get("plan"), number)
        begin = _progress(begins[number], number) if begins else begin_from_rows(attempts, firsts)
        attempts.append(Attempt(number, plan, begin))
    return with_limits(attempts)


def _progress(values: Any, number: int) -> Progress:
    try:
        return Progress(**{f.name: operator.index(values[f.name]) for f in fields(Progress)})
    except (KeyError, TypeError):
        raise UserError(f"status.json does not say where attempt {number} began; it cannot be judged") from None


def _skipped(run: RecordedRun) -> dict[int, np.ndarray]:
    """The samples in errors.jsonl, by epoch, as ids, those of shards that are known. A torn last line is left out."""
    path, numbers = run.folder / "errors.jsonl", {name: number for number, name in enumerate(run.shard_names)}
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: dict[int, set[int]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            shard, count, epoch = numbers.get(entry["shard"]), operator.index(entry["count"]), entry["epoch"]
            ids = found.setdefault(epoch, set()) if entry.get("kind", "train") == "train" else set()
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"not a skipped sample; {path} line {number}; it cannot be judged") from None
        if shard is not None and 0 <= count < run.shard_sizes[shard]:
            ids.add(int(run.offsets[shard]) + count)
    return {epoch: np.array(sorted(ids), dtype=np.int64) for epoch, ids in found.items()}
