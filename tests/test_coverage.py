"""What `split` misses and repeats, against a plain simulation of the streams, also with a shuffle buffer."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.coverage import split_coverage, split_deal, split_order
from common.sampling import SHARDS, permutation


def test_known_numbers():
    assert split_coverage([10, 3, 7], [0, 1, 2], 2, 1, 4, 2) == (9, 3)  # ranks read 8 of 17, and 3 nearly three times
    assert split_coverage([8, 8], [0, 1], 2, 2, 4, 2) == (0, 0)
    assert split_coverage([8, 8], [0, 1], 2, 2, 4, 3) == (0, 8)
    assert split_coverage([8, 8], [0, 1], 1, 2, 4, 3) == (4, 0)  # worker 0 makes two batches, worker 1 one
    assert split_coverage([8, 8], [0, 1], 1, 2, 4, range(1, 4)) == (4, 0)
    assert split_coverage([4, 8], [0, 1], 1, 2, 4, range(3)) == (4, 4)
    assert split_coverage([4, 8], [0, 1], 1, 2, 4, range(1, 4)) == (0, 0)
    assert split_coverage([8, 8], [0, 1], 1, 2, 5, 2, mix="pooled") == (16 - 10, 0)


def test_no_worker_is_left_without_a_shard():
    assert split_deal([4, 2, 0, 1, 3], 2, 8) == [[[4], [0], [3]], [[2], [1]]]
    assert split_deal([4, 2, 0, 1, 3], 1, 2) == [[[4, 0, 3], [2, 1]]]
    assert split_deal([4, 2, 0], 1, 0) == [[[4, 2, 0]]]


def test_the_order_leaves_out_empty_shards_and_changes_with_the_epoch():
    sizes = [3, 0, 2, 5, 0, 1]
    assert split_order(sizes, -1, 0, 0).tolist() == [0, 2, 3, 5]
    assert split_order(sizes, 0, 7, 2).tolist() == [[0, 2, 3, 5][i] for i in permutation(4, 7, 2, SHARDS)]
    assert len({tuple(split_order(np.ones(20), 5, 0, epoch)) for epoch in range(5)}) == 5


def test_a_rank_without_a_shard_is_an_error():
    with pytest.raises(ValueError, match="worker 0 of rank 1"):
        split_coverage([10], [0], 2, 1, 4, 1)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=4, max_size=9), world_size=st.integers(1, 4),
       num_workers=st.integers(0, 3), batch_size=st.integers(1, 7), first=st.integers(0, 5),
       num_steps=st.integers(0, 9), mix=st.sampled_from(["none", "pooled", "shuffle", "queue"]),
       buffer=st.integers(1, 6))
def test_it_is_what_a_simulation_counts(sizes, world_size, num_workers, batch_size, first, num_steps, mix, buffer):
    """Each worker shuffles in a buffer that every pass empties: the numbers do not depend on it."""
    order, uses = list(range(len(sizes))), np.zeros((len(sizes), 12), dtype=int)
    for rank in range(world_size):
        shards = order[rank::world_size]
        active = max(1, min(num_workers, len(shards)))
        streams = [passes([(s, i) for s in shards[w::active] for i in range(sizes[s])], buffer) for w in range(active)]
        for step in range(first, first + num_steps):
            parts = [batch_size * (step % active == worker) for worker in range(active)]
            if mix == "pooled":
                parts = [len(part) for part in np.array_split(np.arange(batch_size), active)]
            elif mix == "queue":  # the fewest equal parts of which each worker can make one, in turn
                number = next(n for n in range(min(active, batch_size), batch_size + 1) if batch_size % n == 0)
                turns = Counter(n % active for n in range(step * number, (step + 1) * number))
                parts = [turns[worker] * (batch_size // number) for worker in range(active)]
            for stream, part in zip(streams, parts, strict=True):
                for shard, count in itertools.islice(stream, part):
                    uses[shard, count] += 1
    missed = sum(sizes) - int((uses > 0).sum())
    said = split_coverage(sizes, order, world_size, num_workers, batch_size, range(first, first + num_steps), mix)
    assert said == (missed, int((uses > 1).sum()))


def passes(samples, buffer):
    """An endless stream of passes, each through a shuffle buffer of its own."""
    draw = random.Random(0)
    while True:
        held: list = []
        for sample in samples:
            held.append(sample)
            if len(held) >= buffer:
                yield held.pop(draw.randrange(len(held)))
        draw.shuffle(held)
        yield from held
