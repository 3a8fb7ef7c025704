"""The plan of a run: steps, what differs after a restart, what is said before it starts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.plan import Plan
from common.sampling import Progress, steps
from common.shards import ShardIndex


def make(sizes: tuple[int, ...] = (10, 3, 7), sampling: str = "exact", batch_size: int = 2, world_size: int = 1,
         **changes: object) -> Plan:
    index = ShardIndex(tuple(f"s{i}.tar" for i in range(len(sizes))), tuple(f"s{i}" for i in range(len(sizes))),
                       np.array(sizes), num_classes=2)
    values = {"mix": "none", "seed": 0, "shuffle": -1, "epoch_samples": None, "num_workers": 2, "num_epochs": 2,
              "max_steps": None, "sampling": sampling, "batch_size": batch_size, "world_size": world_size}
    return Plan.make(index, **(values | changes))  # type: ignore[arg-type]


def test_steps_per_epoch() -> None:
    assert make(batch_size=3, world_size=2).steps_per_epoch == 4  # ceil(20 / 6)
    assert make(sampling="split", batch_size=3, world_size=2).steps_per_epoch == 3  # 20 // 6
    assert make(sampling="resampled", batch_size=3, world_size=2, epoch_samples=60).steps_per_epoch == 10


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_a_run_whose_batch_changes_ends_with_its_data(total: int, before: int, after: int, exact: bool,
                                                      data: st.DataObject) -> None:
    before = min(before, total)
    first = make((total,), "exact" if exact else "split", before, num_epochs=3)
    plan = list(steps(total, before, 3, Progress(), drop_last=not exact))
    assert first.total_steps(Progress()) == len(plan)
    done = data.draw(st.sampled_from(plan))
    at = Progress(done.epoch, done.step + 1, done.global_step + 1, done.stop)
    second = make((total,), "exact" if exact else "split", after if exact else before, num_epochs=3)
    left = list(steps(total, second.global_batch, 3, at, drop_last=not exact))
    assert second.total_steps(at) == at.global_step + len(left)


def test_max_steps_ends_a_run_early_but_not_late() -> None:
    assert make(max_steps=3).end_step(Progress()) == 3
    assert make(max_steps=300).end_step(Progress()) == 20
    assert make(max_steps=3).total_steps(Progress()) == 20  # the schedule's end


def test_an_epoch_without_a_step_or_a_rank_without_a_shard_is_refused() -> None:
    with pytest.raises(UserError, match="no full batch of 21"):
        make(sampling="split", batch_size=21)
    with pytest.raises(UserError, match="shards=3, ranks=4, workers=2"):
        make(sampling="split", batch_size=2, world_size=4)
    assert make(batch_size=2, world_size=30).steps_per_epoch == 1  # exact: more ranks than samples


def test_no_worker_is_without_a_shard_where_shards_are_dealt() -> None:
    plan = make((5, 0, 5, 5), "split", world_size=2, num_workers=3)
    assert [plan.workers_of(rank) for rank in range(2)] == [2, 1]
    assert [make(sampling="exact", world_size=2, num_workers=3).workers_of(rank) for rank in range(2)] == [3, 3]


def test_what_must_stay_the_same_after_a_restart() -> None:
    saved = make().as_dict()
    make(batch_size=4, world_size=3, num_workers=0).check_resumed(saved)  # exact goes on in any world
    for field, plan in (("seed", make(seed=1)), ("shuffle", make(shuffle=5)), ("num_samples", make((10, 3, 8)))):
        with pytest.raises(UserError, match=f"had {field} .*this one has"):
            plan.check_resumed(saved)
    split = make(sampling="split").as_dict()
    with pytest.raises(UserError, match="had batch_size 2, this one has 4"):
        make(sampling="split", batch_size=4).check_resumed(split)


def test_split_says_what_it_misses_and_repeats() -> None:
    (line,) = [line for line in make(sampling="split", world_size=2, batch_size=2).lines() if "misses" in line]
    # rank 0 reads shards 0 and 2, rank 1 shard 1: 5 steps of 2 each, so worker 0 makes 6 and worker 1 makes 4
    assert line.startswith("shards per worker, rank by rank: 1/1, 1; the first epoch misses 7 samples and repeats 3 ")
    assert any("is empty" in line or "are empty" in line for line in make((5, 0)).lines())
