"""The ring of shared batches: nothing is written over while it is in use, and nothing is lost on the way."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from common.assembly import classified, make_validation
from common.collate import Made, SkippedSample, assemble
from common.dataset import BatchDataset, EpochPlan, ExactSource, StreamSource
from common.distributed import World
from common.fields import Fields
from common.loader import Loader
from common.mixing import Mix
from common.sampling import Step
from common.shards import ShardIndex
from common.transforms import ImageTransform
from tests.helpers import write_shards


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ShardIndex:
    return ShardIndex.open([str(write_shards(tmp_path_factory.mktemp("shards"), (30, 42)))])


def pixels(batches, wait_seconds: float = 0.0) -> dict[tuple[str, int], bytes]:
    """Each sample's pixels as they are after a while, in which the workers run as far ahead as they may."""
    found = {}
    for batch in batches:
        time.sleep(wait_seconds)
        for row in range(len(batch)):
            found[batch.shard[row], batch.count[row]] = batch.image[row].numpy().tobytes()
    return found


@pytest.mark.parametrize(("ranks", "workers"), [(2, 2), (3, 1), (4, 3)])
def test_a_rank_that_skips_batches_keeps_those_in_use(index: ShardIndex, ranks: int, workers: int) -> None:
    """Validation gives every ranks-th batch to a rank: its slots must not be counted by the batches of all."""
    def read(rank: int, size: int, workers: int, wait_seconds: float) -> dict:
        world = World(rank, size, rank, torch.device("cpu"))
        return pixels(make_validation(index, 2, workers, world, Fields(), 32).batches(), wait_seconds)

    whole = read(0, 1, 0, 0.0)
    assert len(whole) == 72
    parts = [read(rank, ranks, workers, 0.03) for rank in range(ranks)]
    assert {key: value for part in parts for key, value in part.items()} == whole


@pytest.mark.parametrize("mix", ["none", "pooled", "shuffle", "queue"])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_way_of_mixing_writes_over_a_batch_in_use(index: ShardIndex, mix: str, workers: int) -> None:
    """What a batch shows after a pause is what its samples look like: the center crop has no randomness."""
    plan = EpochPlan(72, 2, 1, 0, 1, 0, -1)
    fields = classified(Fields(), index)
    alone = BatchDataset(ExactSource(index, plan), Mix("none", 2, 1, 0), fields, ImageTransform(32, "center"))
    expected = pixels(Loader(alone, 0))
    source = StreamSource(index, replace(plan, num_samples=64, drop_last=True), resampled=False)
    mixed = BatchDataset(source, Mix(mix, 2, workers, 0), fields, ImageTransform(32, "center"))
    found = pixels(Loader(mixed, workers), 0.02)
    assert len(found) >= 42 and all(expected[key] == value for key, value in found.items())


def test_what_a_queued_batch_left_out_is_counted() -> None:
    """With `queue` a batch is used at another step than the one that its worker made it for."""
    bad = SkippedSample("bad image", "cut", "s", 0, "k")
    made = Made(4, Step(0, 4, 4, 8, 10), 0, rows=[(4, 1)], label=[1], shard=["s"], count=[1], key=["l"], skipped=[bad])
    batch = assemble(Step(0, 2, 2, 4, 6), torch.zeros(2, 4, 4, 3, dtype=torch.uint8), [made])
    assert batch.skipped == [bad] and batch.key == ["l"]
