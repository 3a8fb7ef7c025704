"""What each worker of each rank reads, without processes where that is possible; then with them: mixing, start
methods, memory."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.access.storage import Storage
from common.batch_dataset import BatchDataset
from common.check_shards import main as check_shards
from common.dataset import EpochPlan, ExactSource, Source, StreamSource
from common.errors import UserError
from common.fields import Fields
from common.loader import Loader
from common.mixing import Mix
from common.sampling import num_steps
from common.shards import ShardIndex
from common.transforms import ImageTransform
from tests.helpers import jpeg, write_shards
from tests.tars import files, index_of, write_tar

SIZES = (10, 3, 7)
BATCH = 2


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> ShardIndex:
    return ShardIndex.open([str(write_shards(tmp_path_factory.mktemp("data"), SIZES))])


def make_source(index: ShardIndex, kind: str, rank: int = 0, ranks: int = 1, epochs: int = 1, window: int = 5000,
                batch: int = BATCH) -> Source:
    plan = EpochPlan(index.num_samples, batch * ranks, epochs, rank, ranks, seed=3, window=window,
                     drop_last=kind != "exact")
    return ExactSource(index, plan) if kind == "exact" else StreamSource(index, plan, kind == "resampled")


def steps_read(source: Source, workers: int, batch: int = BATCH) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(epoch, step) -> what one rank reads, all its workers run one after the other."""
    found = {}
    for worker in range(workers):
        for piece, samples in source.pieces(worker, workers, Mix("none", batch, workers, 3)):
            found[piece.step.epoch, piece.step.step] = [(sample.shard, sample.count) for _, sample in samples]
    return dict(sorted(found.items()))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 3)])
def test_exact_reads_every_sample_once(index: ShardIndex, ranks: int, workers: int) -> None:
    read = [steps_read(make_source(index, "exact", rank, ranks, epochs=2), workers) for rank in range(ranks)]
    steps = num_steps(20, BATCH * ranks)
    assert all(list(found) == [(epoch, step) for epoch in range(2) for step in range(steps)] for found in read)
    everything = {(name, count) for name, size in zip(index.names, SIZES, strict=True) for count in range(size)}
    for epoch in range(2):
        used = [sample for found in read for (e, _), batch in found.items() if e == epoch for sample in batch]
        assert len(used) == 20 and set(used) == everything
    alone = steps_read(make_source(index, "exact", epochs=2, batch=BATCH * ranks), 1)
    for place, batch in alone.items():
        assert [sample for found in read for sample in found[place]] == batch
    assert {place[1]: batch for place, batch in alone.items() if place[0] == 0} != {
        place[1]: batch for place, batch in alone.items() if place[0] == 1}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 1), (3, 1)])
@pytest.mark.parametrize("window", [-1, 0, 8])
def test_split_deals_shards(index: ShardIndex, ranks: int, workers: int, window: int) -> None:
    """Per epoch the ranks' shards are disjoint; equal steps; the order of shards is another in every epoch, the same
    in every run."""
    read = [steps_read(make_source(index, "split", rank, ranks, epochs=3, window=window), workers)
            for rank in range(ranks)]
    again = [steps_read(make_source(index, "split", rank, ranks, epochs=3, window=window), workers)
             for rank in range(ranks)]
    assert read == again
    steps = 20 // (BATCH * ranks)
    for found in read:
        assert list(found) == [(epoch, step) for epoch in range(3) for step in range(steps)]
        assert all(len(batch) == BATCH for batch in found.values())
    for epoch in range(3):
        shards = [{shard for (e, _), batch in found.items() if e == epoch for shard, _ in batch} for found in read]
        assert sum(map(len, shards)) == len(set().union(*shards))
    by_epoch = [[found[epoch, step] for found in read for step in range(steps)] for epoch in range(3)]
    if workers == 1:  # more of them take turns that run on across epochs
        assert (by_epoch[0] == by_epoch[1] == by_epoch[2]) == (window < 0)


@pytest.mark.parametrize("workers", [1, 3])
def test_resampled_draws_with_replacement(index: ShardIndex, workers: int) -> None:
    read = [steps_read(make_source(index, "resampled", rank, 2, epochs=2), workers) for rank in range(2)]
    for found in read:
        assert list(found) == [(epoch, step) for epoch in range(2) for step in range(5)]
        assert all(len(batch) == BATCH for batch in found.values())
    assert read[0] != read[1]
    assert read[0] == steps_read(make_source(index, "resampled", 0, 2, epochs=2), workers)
    assert [read[0][0, step] for step in range(5)] != [read[0][1, step] for step in range(5)]


def test_the_order_of_the_article(index: ShardIndex) -> None:
    """Without shuffling each worker reads its own shards front to back, and workers take turns; who has less begins
    again."""
    read = steps_read(make_source(index, "split", window=-1, batch=4), 2, batch=4)
    first = [("test-0000", count) for count in range(10)] + [("test-0002", count) for count in range(7)]
    second = [("test-0001", count) for count in range(3)] * 3
    assert list(read.values()) == [first[0:4], second[0:4], first[4:8], second[4:8], first[8:12]]
    ranks = [steps_read(make_source(index, "split", rank, 3, window=-1), 1) for rank in range(3)]
    assert [batch[0, 0][0][0] for batch in ranks] == ["test-0000", "test-0001", "test-0002"]


def test_two_data_sets_are_mixed(tmp_path: Path) -> None:
    """Two patterns in one run: both are in the first batches, in every mode."""
    one, two = write_shards(tmp_path / "a", (20,) * 4, name="one"), write_shards(tmp_path / "b", (20,) * 4, name="two")
    index = ShardIndex.open([f"{one}/*.tar", f"{two}/*.tar"])
    for kind in ("exact", "split", "resampled"):
        read = itertools.islice(steps_read(make_source(index, kind, window=160), 1).values(), 20)
        assert {shard[:3] for batch in read for shard, _ in batch} == {"one", "two"}


def test_a_worker_without_samples_does_not_spin(tmp_path: Path) -> None:
    """Three workers and two shards: the third has nothing, and says so at once."""
    index = ShardIndex.open([str(write_shards(tmp_path, (4, 4)))])
    pieces = make_source(index, "split").pieces(2, 3, Mix("none", BATCH, 3, 3))
    with pytest.raises(UserError, match="has no samples; 2 shards; use fewer workers or --sampling exact"):
        next(list(samples) for _, samples in pieces)


@pytest.mark.parametrize("kind", ["exact", "split", "resampled"])
def test_a_shard_that_changed(tmp_path: Path, kind: str) -> None:
    """More or fewer samples than were counted, or gone: an error that names it."""
    tar = write_tar(tmp_path / "a.tar", files("abcdef"))
    for size in (5, 7):
        with pytest.raises(UserError, match=rf"{size} samples were promised, the tar \w+ 6; shard .*a\.tar;"):
            steps_read(make_source(index_of(tar, sizes=[size]), kind, epochs=4), 1)
    tar.unlink()
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory\).*a\.tar"):
        steps_read(make_source(index_of(tar, sizes=[6]), kind), 1)


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("kind", ["exact", "split", "resampled"])
def test_nothing_in_a_shard_is_executed(tmp_path: Path, kind: str) -> None:
    """Pickles under every name that some decoder would load: read, checked, counted, and never run."""
    canary = tmp_path / "canary"
    bad = pickle.dumps(Canary(canary))
    members = [(f"{key}.{name}", bad) for key in "abcd"
               for name in ("pkl", "pyd", "pth", "pickle", "pt", "npy", "cls.pkl", "json.pkl")]
    members += files("abcd")
    members.sort(key=lambda member: member[0].partition(".")[0])
    write_tar(tmp_path / "s" / "t.tar", members)
    index = ShardIndex.open([str(tmp_path / "s")])
    dataset = make_dataset(make_source(index, kind), 0)
    assert sum(len(batch) for batch in Loader(dataset, 0)) == 4
    assert check_shards([str(tmp_path / "s"), "-w", "0"]) == 0
    assert not canary.exists()
    pickle.loads(bad)
    assert canary.exists()


def make_dataset(source: Source, num_workers: int, mix: str = "none", batch: int = BATCH,
                 fields: Fields | None = None) -> BatchDataset:
    return BatchDataset(source, Mix(mix, batch, max(num_workers, 1), 3), fields or Fields(num_classes=2),
                        ImageTransform(16, "crop"))


def batches(index: ShardIndex, kind: str, mix: str, workers: int, batch: int = 4, **options: Any) -> list[Any]:
    source = make_source(index, kind, batch=batch, **options)
    return [(b.step.step, b.worker, b.label.tolist(), b.shard, b.count)
            for b in Loader(make_dataset(source, workers, mix, batch), workers)]


@pytest.mark.parametrize("mix", ["none", "pooled", "shuffle", "queue"])
def test_what_mixing_promises(tmp_path: Path, mix: str) -> None:
    """Shards of one class each, two workers: how many workers and classes are in a batch."""
    for label in range(2):
        write_tar(tmp_path / f"t-{label}.tar", [member for number in range(24) for member in (
            (f"{number:02d}.jpg", jpeg(label, number)), (f"{number:02d}.json", json.dumps({"label": label}).encode()))])
    index = ShardIndex.open([str(tmp_path)])
    found = batches(index, "split", mix, 2, window=-1)
    assert len(found) == 12 and all(len(labels) == 4 for _, _, labels, _, _ in found)
    for _, workers, labels, shards, _ in found:
        assert [f"t-{label}" for label in labels] == shards
        if mix == "pooled":
            assert Counter(workers) == {0: 2, 1: 2} and Counter(labels) == {0: 2, 1: 2}
        elif mix == "none":
            assert len(set(workers)) == len(set(labels)) == 1
    used = Counter((shard, count) for *_, shards, counts in found for shard, count in zip(shards, counts, strict=True))
    if mix == "shuffle":
        assert sum(len(set(labels)) == 2 for _, _, labels, _, _ in found) >= 6
    if mix != "queue":
        assert found == batches(index, "split", mix, 2, window=-1)
        assert used == Counter({(f"t-{label}", count): 1 for label in range(2) for count in range(24)})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(index: ShardIndex, method: str) -> None:
    """Whatever workers are started by, the same batches; and the data set pickles."""
    for kind in ("exact", "split"):
        dataset = make_dataset(make_source(index, kind), 2)
        copy = pickle.loads(pickle.dumps(dataset)).source
        assert copy.plan == dataset.source.plan and copy.index.digest == index.digest
    forked = [batch.key for batch in Loader(make_dataset(make_source(index, "split"), 2), 2)]
    assert [batch.key for batch in Loader(dataset, 2, start_method=method)] == forked


def test_descriptors_stay_flat(index: ShardIndex) -> None:
    """With at most 256 of them: many epochs of one loader, and a loader anew for every validation."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))  # also what other tests of this process have not let go of
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 240, limits[1]))
    try:
        counts = []
        for kind in ("split", "exact"):
            for batch in Loader(make_dataset(make_source(index, kind, epochs=40, batch=10), 2, batch=10), 2):
                counts.append((batch.step.epoch, len(os.listdir("/proc/self/fd"))))
            assert counts[-1][0] == 39 and counts[-1][1] <= dict(counts)[1]
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(12):
            assert len(list(Loader(make_dataset(make_source(index, "exact", batch=10), 2, batch=10), 2))) == 2
        deadline = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.05)  # a queue's thread closes its end when it comes to it
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_iteration_without_workers_leaves_nothing_open(index: ShardIndex) -> None:
    """Neither the shards' files nor the ring: in the main process nobody else closes them."""
    loader = Loader(make_dataset(make_source(index, "exact", batch=10), 1, batch=10), 0)
    list(loader)  # the first image of a process opens the file that catches remarks, for good
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(list(loader)) == 2 and not loader.dataset.ring.numel()
        assert len(os.listdir("/proc/self/fd")) == before
    batches = iter(loader)
    next(batches)
    batches.close()
    assert len(os.listdir("/proc/self/fd")) == before


@dataclass(frozen=True)
class OneTar(Storage):
    """Every shard is the same file."""

    real: str = ""

    def open(self, path: str) -> Any:
        return super().open(self.real)

    def acquire(self, path: str) -> tuple[str, int]:
        return super().acquire(self.real)


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def read_some(source: Source, sent: Any) -> None:
    before = private_bytes()
    for _, samples in itertools.islice(source.pieces(0, 4, Mix("none", BATCH, 4, 3)), 30):
        list(samples)
    sent.send(private_bytes() - before)


@pytest.mark.parametrize("kind", ["exact", "split", "resampled"])
def test_memory_of_100_000_names(tmp_path: Path, kind: str) -> None:
    """A forked worker writes to none of the pages that hold the names, and makes few of its own."""
    tar = write_tar(tmp_path / "t.tar", files("abcdef"))
    number = 100_000
    paths = tuple(f"/a/folder/somewhere/on/a/file/system/train-{i:06d}.tar" for i in range(number))
    names = tuple(f"train-{i:06d}" for i in range(number))
    index = ShardIndex(paths, names, np.full(number, 6), 2, None, OneTar(real=str(tar)))
    received, sent = multiprocessing.get_context("fork").Pipe()
    worker = multiprocessing.get_context("fork").Process(target=read_some,
                                                         args=(make_source(index, kind, window=100), sent))
    worker.start()
    assert received.poll(60)
    used = received.recv()
    worker.join()
    assert used < 50e6, f"{used / 1e6:.0f} MB"
