"""What one start of a traced run set out to do, and where it stands in the run: arithmetic on its plan.

    >>> attempt.place(epoch=0, step=12)          # Step(epoch=0, step=12, global_step=12, start=…, stop=…)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from common import sampling
from common.errors import UserError
from common.sampling import Progress, Step

MODES = ("exact", "split", "resampled")


@dataclass(frozen=True)
class RecordedPlan:
    """The fields of a plan in config.json that the audit needs."""

    sampling: str
    seed: int
    shuffle: int
    epoch_samples: int
    global_batch: int
    world_size: int
    num_workers: int
    num_epochs: int
    max_steps: int | None = None
    mix: str = "none"
    traced: bool = True

    @property
    def drop_last(self) -> bool:
        return self.sampling != "exact"

    @classmethod
    def from_dict(cls, values: Any, number: int) -> RecordedPlan:
        """Take the fields from the JSON object of attempt `number`. Raises UserError where one is missing or absurd."""
        end = f"; attempt {number}; it cannot be judged"
        if not isinstance(values, dict):
            raise UserError(f"config.json has no plan{end}")
        for field in fields(cls):
            value, default = values.get(field.name, field.default), field.default
            kind = {"str": str, "bool": bool}.get(str(field.type), int)
            if type(value) is not kind and (default is MISSING or value != default):
                raise UserError(f"the plan in config.json has no {field.name}{end}")
        plan = cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
        if plan.sampling not in MODES or min(plan.global_batch, plan.world_size, plan.epoch_samples) < 1:
            raise UserError(f"the plan in config.json makes no sense{end}")
        return plan


@dataclass(frozen=True)
class Attempt:
    """One start of the run. `limit` is where the attempts after it took over, as (epoch, position); None: nowhere."""

    number: int
    plan: RecordedPlan
    begin: Progress
    limit: tuple[int, int] | None = None

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch when this attempt brings it to its end."""
        plan, done = self.plan, self._done(epoch)
        left = plan.epoch_samples - done.position
        return done.step + sampling.num_steps(left, plan.global_batch, plan.drop_last)

    def place(self, epoch: int, step: int) -> Step:
        """Which samples of the epoch, and which step of the run, a step is. Past the end of the epoch it is empty."""
        plan, done = self.plan, self._done(epoch)
        start = min(max(done.position + (step - done.step) * plan.global_batch, 0), plan.epoch_samples)
        stop = min(start + plan.global_batch, plan.epoch_samples)
        return Step(epoch, step, done.global_step + step - done.step, start, stop)

    def step_at(self, epoch: int, position: int) -> int:
        """The step that holds a position of an epoch."""
        done = self._done(epoch)
        return done.step + (position - done.position) // self.plan.global_batch

    def has_begun(self, epoch: int, position: int) -> bool:
        """Whether the attempt began at a position of an epoch, or before it."""
        return (self.begin.epoch, self.begin.position) <= (epoch, position)

    def holds(self, epoch: int, position: int) -> bool:
        """Whether no later attempt replaces what this one did at a position of an epoch."""
        return self.limit is None or (epoch, position) < self.limit

    def is_live(self, epoch: int, step: int) -> bool:
        """Whether a row of this attempt counts."""
        return self.limit is None or self.holds(epoch, self.place(epoch, step).start)

    def _done(self, epoch: int) -> Progress:
        """Where this attempt takes up an epoch."""
        begin, plan = self.begin, self.plan
        if epoch == begin.epoch:
            return begin
        whole = sampling.num_steps(plan.epoch_samples, plan.global_batch, plan.drop_last)
        first = self.num_steps(begin.epoch) - begin.step
        return Progress(epoch, global_step=begin.global_step + first + (epoch - begin.epoch - 1) * whole)


def with_limits(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts with their limits: what a later one did replaces the same and later steps of those before it."""
    limit: tuple[int, int] | None = None
    result = []
    for attempt in reversed(attempts):
        result.append(replace(attempt, limit=limit))
        begin = (attempt.begin.epoch, attempt.begin.position)
        limit = begin if limit is None else min(limit, begin)
    return result[::-1]


def begin_from_rows(earlier: Sequence[Attempt], firsts: dict[int, tuple[int, int]]) -> Progress:
    """Where the attempt after `earlier` began, from `firsts`, the (epoch, step) of each attempt's first row.

    It is counted on from the attempt that brought the run there. One that came to no row takes the place of the next.
    """
    if not earlier:
        return Progress()
    first = next(firsts[number] for number in sorted(firsts) if number >= len(earlier))
    begun = [attempt for attempt in earlier if (attempt.begin.epoch, attempt.begin.step) <= first]
    place = (begun[-1] if begun else earlier[0]).place(*first)
    return Progress(place.epoch, place.step, place.global_step, place.start)
