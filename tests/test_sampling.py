"""The arithmetic of sampling: every sample once, whatever the world, and the same global batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import (
    EpochOrder,
    Progress,
    Step,
    deal,
    hashed,
    num_steps,
    permutation,
    steps,
    worker_of,
)

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12)
WINDOWS = st.sampled_from([-1, 0, 1, 5, 17, 5000])


def everything(sizes: list[int]) -> list[tuple[int, int]]:
    return [(shard, place) for shard, size in enumerate(sizes) for place in range(size)]


def located(order: EpochOrder, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    return [tuple(row) for row in order.locate(start, order.num_samples if stop is None else stop).tolist()]


def test_the_hash_is_fixed_for_good() -> None:
    """Orders of old runs must come out of new releases too: these numbers never change."""
    assert hashed() == 0
    assert hashed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0
    assert hashed(1, 2) != hashed(2, 1)
    assert hashed(1, 2) == 13608149317741381227
    assert permutation(5, 3, 1, 4).tolist() == [4, 0, 1, 2, 3]


@given(SIZES, WINDOWS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_an_epoch_has_every_sample_once(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    assert sorted(located(EpochOrder(sizes, window, seed, epoch))) == everything(sizes)


@given(SIZES, WINDOWS, st.integers(0, 99), st.data())
def test_any_part_of_the_order_is_the_same_as_in_the_whole(sizes: list[int], window: int, seed: int,
                                                           data: st.DataObject) -> None:
    whole = located(EpochOrder(sizes, window, seed, 1))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert located(EpochOrder(sizes, window, seed, 1), start, stop) == whole[start:stop]


@given(SIZES, st.integers(1, 60), st.integers(0, 99))
def test_samples_stay_within_windows_of_whole_shards(sizes: list[int], window: int, seed: int) -> None:
    """Each window is the fewest consecutive shards of the epoch's order that hold `window` samples."""
    order, start = EpochOrder(sizes, window, seed, 0), 0
    shards = [int(shard) for shard in order.shards]
    while shards:
        taken = [shards.pop(0)]
        while shards and sum(sizes[shard] for shard in taken) < window:
            taken.append(shards.pop(0))
        stop = start + sum(sizes[shard] for shard in taken)
        assert sorted(located(order, start, stop)) == sorted(pair for pair in everything(sizes) if pair[0] in taken)
        start = stop
    assert start == sum(sizes)


def test_minus_one_keeps_the_shards_own_order_and_zero_their_samples() -> None:
    assert located(EpochOrder([3, 0, 2], -1, 5, 7)) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    order = EpochOrder([4] * 6, 0, 5, 7)
    shards = [shard for shard, _ in located(order)]
    assert shards[::4] == order.shards.tolist() != list(range(6))
    assert [place for _, place in located(order)] == [0, 1, 2, 3] * 6


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(located(EpochOrder([10, 3, 7], 5000, seed, epoch))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_a_fair_shuffle() -> None:
    """Over many seeds each sample of a window comes first about equally often."""
    first = np.bincount([located(EpochOrder([5, 5], 100, seed, 0), 0, 1)[0][1] for seed in range(4000)], minlength=5)
    assert first.min() > 700 and first.max() < 900  # 800 expected, standard deviation 25


def test_positions_outside_the_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        EpochOrder([3], 5, 0, 0).locate(2, 4)


@given(st.integers(0, 200), st.integers(1, 17))
def test_deal_cuts_into_parts_that_differ_by_at_most_one(num_samples: int, num_parts: int) -> None:
    borders = deal(num_samples, num_parts)
    sizes = np.diff(borders)
    assert borders[0] == 0 and borders[-1] == num_samples and len(sizes) == num_parts
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(sizes) <= 0).all()  # the longer ones first: rank 0 has a sample if any rank has


@settings(deadline=None)
@given(SIZES.filter(any), st.integers(1, 9), st.integers(0, 5), st.integers(1, 9), WINDOWS, st.integers(0, 3),
       st.data())
def test_ranks_and_workers_together_read_the_epoch_once(sizes: list[int], ranks: int, workers: int, batch: int,
                                                        window: int, epoch: int, data: st.DataObject) -> None:
    """The grid: ranks in step, sizes within one, every sample once from any start position on, worker after worker."""
    total, global_batch = sum(sizes), batch * ranks
    start = data.draw(st.integers(0, total - 1))
    plan = list(steps(total, global_batch, epoch + 1, Progress(epoch, 3, 17, start)))
    order = EpochOrder(sizes, window, 0, epoch)
    read = []
    for number, step in enumerate(plan):
        parts = [step.part(rank, ranks) for rank in range(ranks)]
        lengths = [stop - begin for begin, stop in parts]
        assert max(lengths) - min(lengths) <= 1 and max(lengths) <= batch
        assert step.size == global_batch or step.last
        assert (step.step, step.global_step) == (3 + number, 17 + number)
        assert worker_of(step.global_step, workers) == (17 + number) % max(workers, 1)
        for begin, stop in parts:
            read += located(order, begin, stop)
    assert read == located(order, start)
    assert len(plan) == num_steps(total - start, global_batch)


@given(SIZES.filter(any), st.integers(1, 24), st.integers(0, 99))
def test_equal_global_batches_hold_the_same_samples(sizes: list[int], global_batch: int, seed: int) -> None:
    plan = list(steps(sum(sizes), global_batch, 2, Progress()))
    for step in plan:
        order = EpochOrder(sizes, 20, seed, step.epoch)
        whole = located(order, step.start, step.stop)
        for ranks in (divisor for divisor in range(1, 10) if global_batch % divisor == 0):
            assert [pair for rank in range(ranks) for pair in located(order, *step.part(rank, ranks))] == whole


def test_steps_count_within_the_epoch_and_within_the_run() -> None:
    assert list(steps(5, 2, 2, Progress())) == [
        Step(0, 0, 0, 0, 2), Step(0, 1, 1, 2, 4), Step(0, 2, 2, 4, 5, last=True),
        Step(1, 0, 3, 0, 2), Step(1, 1, 4, 2, 4), Step(1, 2, 5, 4, 5, last=True),
    ]
    assert [step.stop for step in steps(5, 2, 1, Progress(), drop_last=True)] == [2, 4]
    assert list(steps(1, 2, 3, Progress(), drop_last=True)) == []


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_a_run_goes_on_where_it_stopped(total: int, before: int, after: int, drop_last: bool,
                                        data: st.DataObject) -> None:
    """Stopped after any step and continued with any other batch, an exact epoch still has each position once."""
    plan = list(steps(total, before, 2, Progress(), drop_last))
    if not plan:
        return
    done = plan[: data.draw(st.integers(1, len(plan)))]
    last = done[-1]
    size = before if drop_last else after
    rest = list(steps(total, size, 2, Progress(last.epoch, last.step + 1, last.global_step + 1, last.stop), drop_last))
    if size == before:
        assert done + rest == plan
    positions = [(step.epoch, position) for step in done + rest for position in range(step.start, step.stop)]
    if not drop_last:
        assert positions == [(epoch, position) for epoch in range(2) for position in range(total)]


def test_a_million_shards_fit() -> None:
    """First positions of a plan of 10^9 samples, anywhere in the epoch, in O(shards) memory."""
    import tracemalloc

    tracemalloc.start()
    order = EpochOrder(np.full(1_000_000, 1000), 5000, 0, 3)
    rows = order.locate(987_654_321, 987_654_321 + 64)
    assert tracemalloc.get_traced_memory()[1] < 64e6
    tracemalloc.stop()
    assert len({tuple(row) for row in rows.tolist()}) == 64 and rows[:, 1].max() < 1000
