"""The ring of shared batches: nothing is written over while it is in use, and nothing is lost on the way."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import loader
from common.assembly import classified, make_validation
from common.batch_dataset import BatchDataset
from common.collate import Batch, MadePiece, SkippedSample, assemble
from common.coverage import split_order
from common.dataset import EpochPlan, ExactSource, StreamSource
from common.distributed import World
from common.errors import UserError
from common.fields import Fields
from common.loader import Loader, on_device
from common.mixing import Mix
from common.pinned_ring import PinnedRing
from common.processes import let_threads_settle
from common.sampling import Progress, Step
from common.shards import ShardIndex
from common.transforms import ImageTransform
from tests.helpers import jpeg, write_shards
from tests.tars import write_tar, write_two_kinds


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


def test_workers_that_cannot_be_started(index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("common.loader.DataLoader.__iter__", refuse)
    validation = make_validation(index, 2, 3, World(0, 1, 0, torch.device("cpu")), Fields(), 32)
    with pytest.raises(UserError, match="3 loader workers cannot be started .Resource temporarily unavailable.; -w"):
        pixels(validation.batches())


def test_only_the_plan_warns_of_more_workers_than_cores(
        index: ShardIndex, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    world = World(0, 1, 0, torch.device("cpu"))
    assert len(pixels(make_validation(index, 36, 2, world, Fields(), 32).batches())) == 72
    assert not [warning for warning in recwarn if "worker" in str(warning.message)]


@pytest.mark.parametrize("mix", ["none", "pooled", "shuffle", "queue"])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_way_of_mixing_writes_over_a_batch_in_use(index: ShardIndex, mix: str, workers: int) -> None:
    """What a batch shows after a pause is what its samples look like: the center crop has no randomness."""
    plan = EpochPlan(72, 2, 1, 0, 1, 0, -1)
    fields = classified(Fields(), index)
    alone = BatchDataset(ExactSource(index, plan), Mix("none", 2, 1, 0), fields, ImageTransform(32, "center"))
    expected = pixels(Loader(alone, 0))
    source = StreamSource(index, replace(plan, epoch_samples=64, drop_last=True), resampled=False)
    mixed = BatchDataset(source, Mix(mix, 2, workers, 0), fields, ImageTransform(32, "center"))
    found = pixels(Loader(mixed, workers), 0.02)
    assert len(found) >= 42 and all(expected[key] == value for key, value in found.items())


def test_a_fork_waits_for_threads_that_run_and_for_no_others() -> None:
    """A child of CPython 3.11 hangs where a thread of C++ was just entering Python."""
    ended, left = threading.Event(), threading.Event()

    def work() -> None:
        for _ in range(20):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)  # without the GIL
        ended.set()

    threads = [threading.Thread(target=work), threading.Thread(target=left.wait)]
    for thread in threads:
        thread.start()
    let_threads_settle(60)
    assert ended.is_set() and not left.is_set()
    left.set()


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_whole_ring_is_pinned_once_and_unpinned(index: ShardIndex, workers: int, success: bool) -> None:
    """And a batch with gaps, which is a copy, pins nothing. Where it fails, nothing is unpinned."""
    dataset = BatchDataset(ExactSource(index, EpochPlan(72, 8, 1, 0, 1, 0, -1)), Mix("none", 8, max(workers, 1), 0),
                           classified(Fields(), index), ImageTransform(32))
    calls: list[tuple] = []
    cudart = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaHostUnregister=lambda *args: calls.append(args),
                             cudaHostRegister=lambda *args: calls.append(args) or int(not success))
    pinned = PinnedRing(cudart)
    for batch in Loader(dataset, workers):
        ring = dataset.ring
        pinned.pin(batch.image[torch.tensor([0])])
        pinned.pin(batch.image)
    pinned.release()
    pinned.release()
    assert calls == [(ring.data_ptr(), ring.numel(), 0), (ring.data_ptr(),)][: 1 + success]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: pinned memory and copying ahead need one")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_reach_a_gpu_as_they_are(index: ShardIndex, workers: int) -> None:
    """While the workers go on filling the ring. Pinning the same memory twice fails, and that goes unnoticed."""
    def batches() -> Iterator[Batch]:
        return iter(Loader(BatchDataset(ExactSource(index, plan), Mix("none", 4, max(workers, 1), 0), fields,
                                        ImageTransform(32, "center")), workers))

    plan, fields, device = EpochPlan(72, 4, 1, 0, 1, 0, -1), classified(Fields(), index), torch.device("cuda", 0)
    expected, found, pinned = pixels(batches()), {}, PinnedRing(torch.cuda.cudart())
    for batch in on_device(batches(), device):
        assert batch.image.is_cuda and batch.label.is_cuda
        torch.cuda._sleep(10_000_000)  # cycles that the GPU lags behind
        found.update(pixels([replace(batch, image=batch.image.clone().cpu())]))
    assert found == expected
    ring = torch.zeros(1 << 20, dtype=torch.uint8).share_memory_()
    pinned.pin(ring)
    other = PinnedRing(torch.cuda.cudart())
    other.pin(ring)
    assert pinned.pointer == ring.data_ptr() and not other.pointer and ring.is_pinned()
    assert torch.ones(2, device=device).sum().item() == 2
    pinned.release()
    assert not ring.is_pinned()


@pytest.mark.parametrize("sampling", ["exact", "split"])
def test_which_field_is_the_image_depends_on_the_first_sample_alone(tmp_path: Path, sampling: str) -> None:
    """Not on what a worker, a rank or a start happens to read first."""
    index = ShardIndex.open([str(write_two_kinds(tmp_path))], Fields())
    fields = classified(Fields(), index)
    assert index.first_image == "bmp"

    def read(workers: int, progress: Progress, rank: int = 0, ranks: int = 1) -> dict:
        plan = EpochPlan(12, 2 * ranks, 1, rank, ranks, 0, -1, progress=progress)
        source = ExactSource(index, plan) if sampling == "exact" else StreamSource(index, plan, False)
        dataset = BatchDataset(source, Mix("none", 2, max(workers, 1), 0), fields, ImageTransform(8, "center"))
        return {key: value[8 * 8] for key, value in pixels(Loader(dataset, workers)).items()}  # green

    expected = {(f"t-{number // 6}", number % 6): 200 if number % 4 == 1 else 0 for number in range(12)}
    for workers in (0, 1, 2):
        assert read(workers, Progress()) == expected
        assert read(workers, Progress(0, 2, 2, 4)).items() < expected.items()
    for rank in range(2):
        assert read(1, Progress(), rank, 2).items() < expected.items()


class Held:
    """A tensor that is on any device already."""

    def to(self, device: torch.device, non_blocking: bool) -> Held:
        return self

    def record_stream(self, stream: None) -> None: ...
    def is_shared(self) -> bool:
        return False


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_error_costs_no_batch_that_came_before_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a GPU has one ahead: an epoch's last step is not lost to the first bad sample of the next."""
    cuda = SimpleNamespace(
        Stream=lambda device: SimpleNamespace(synchronize=lambda: None), stream=lambda stream: nullcontext(),
        cudart=lambda: None, current_stream=lambda device: None)
    monkeypatch.setattr(loader, "torch", SimpleNamespace(cuda=cuda))

    def batches() -> Iterator[Any]:
        for step in range(3):
            yield Batch(Held(), Held(), Step(0, step, step, step, step + 1), [], [], [], [])  # type: ignore[arg-type]
        raise UserError("a bad sample")

    steps = []
    with pytest.raises(UserError, match="a bad sample"):
        for batch in loader.on_device(batches(), SimpleNamespace(type=kind)):  # type: ignore[arg-type]
            steps.append(batch.step.step)
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("sampling", ["split", "resampled"])
def test_mixing_joins_the_classes_of_shards_of_one_class_each(tmp_path: Path, sampling: str) -> None:
    """Eight workers, batches of eight, the shards' own order: half as many classes a batch, one without mixing."""
    for label in range(16):
        write_tar(tmp_path / f"t-{label:02d}.tar", [
            (f"{label:02d}{number:02d}.{name}", data) for number in range(16)
            for name, data in (("jpg", jpeg(0, number)), ("cls", b"%d" % label))])
    shards, mean = ShardIndex.open([str(tmp_path)]), {}
    source = StreamSource(shards, EpochPlan(256, 8, 1, 0, 1, 0, -1, drop_last=True), sampling == "resampled")
    for mix in ("none", "pooled", "shuffle", "queue"):
        mixed = BatchDataset(source, Mix(mix, 8, 8, 0), classified(Fields(), shards), ImageTransform(32))
        classes = []
        for batch in Loader(mixed, 8):
            time.sleep(0.02)  # a step, in which more gets ready
            classes.append(len(set(batch.label.tolist())))
            assert len(batch) == 8 and batch.label.tolist() == [int(shard[2:]) for shard in batch.shard]
        mean[mix] = sum(classes) / len(classes)
        assert len(classes) == 32
    assert mean["none"] == 1 and min(mean["pooled"], mean["shuffle"], mean["queue"]) >= 4, mean


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Worker 0 makes its first pieces slowly."""
    fill = BatchDataset._fill

    def slowly(self: BatchDataset, made: MadePiece, piece: Any, samples: Any, worker: int, number: int) -> None:
        time.sleep(seconds * (worker == 0 and number < 12))
        fill(self, made, piece, samples, worker, number)

    monkeypatch.setattr(BatchDataset, "_fill", slowly)


def test_a_queue_overwrites_nothing(index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some workers run ahead of a slow one as far as they may."""
    slowed(monkeypatch, 0.04)
    fields, center = classified(Fields(), index), ImageTransform(32, "center")
    alone = BatchDataset(ExactSource(index, EpochPlan(72, 2, 1, 0, 1, 0, -1)), Mix("none", 2, 1, 0), fields, center)
    expected = pixels(Loader(alone, 0))
    source = StreamSource(index, EpochPlan(144, 6, 1, 0, 1, 0, 10, drop_last=True), resampled=True)
    found = pixels(Loader(BatchDataset(source, Mix("queue", 6, 3, 0), fields, center), 3), 0.02)
    assert len(found) >= 18 and all(expected[key] == value for key, value in found.items())


@pytest.mark.parametrize("batch_size", [6, 7])
def test_workers_of_a_queue_wait_for_each_other_at_an_epochs_end_alone(
        index: ShardIndex, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """A batch is made by whoever is ready, of samples of its own epoch; each worker reads its share of that."""
    slowed(monkeypatch, 0.03)
    num_epochs, steps = 3, 72 // batch_size
    plan = EpochPlan(steps * batch_size, batch_size, num_epochs, 0, 1, 0, 10, drop_last=True)
    dataset = BatchDataset(StreamSource(index, plan, False), Mix("queue", batch_size, 2, 0),
                           classified(Fields(), index), ImageTransform(32))
    batches = list(Loader(dataset, 2))
    assert [batch.step.global_step for batch in batches] == list(range(num_epochs * steps))
    assert all(len(batch) == batch_size for batch in batches)
    assert any(len(set(batch.worker)) == 1 for batch in batches)  # worker 1 did not wait for the slow one
    for epoch in range(num_epochs):
        workers = Counter(worker for batch in batches if batch.step.epoch == epoch for worker in batch.worker)
        assert max(workers.values()) - min(workers.values()) <= steps * batch_size % 2, workers
        order = split_order(index.sizes, 10, 0, epoch)
        owners = {index.names[number]: worker for worker, number in enumerate(order)}
        assert all(owners[shard] == worker for batch in batches if batch.step.epoch == epoch
                   for shard, worker in zip(batch.shard, batch.worker, strict=True))


@pytest.mark.parametrize("mix", ["none", "pooled", "shuffle", "queue"])
def test_a_loader_that_is_left_early_ends_its_workers_at_once(
        index: ShardIndex, monkeypatch: pytest.MonkeyPatch, mix: str) -> None:
    """Those that wait for a place in the ring, too: torch would wait for them for five seconds each."""
    slowed(monkeypatch, 0.3)  # the first batch comes when a faster worker has made all that there is room for
    plan = EpochPlan(72, 6, 1, 0, 1, 0, 10, drop_last=True)
    dataset = BatchDataset(StreamSource(index, plan, True), Mix(mix, 6, 2, 0), classified(Fields(), index),
                           ImageTransform(32))
    batches = iter(Loader(dataset, 2))
    next(batches)
    children = [child for child in multiprocessing.active_children() if child.is_alive()]
    assert len(children) >= 2
    batches.close()
    assert all(child.exitcode == 0 for child in children), [child.exitcode for child in children]  # none was killed


def test_a_skipped_sample_is_counted_in_the_batch_that_lacks_it() -> None:
    bad = SkippedSample("bad image", "cut", "s", 0, "k")
    made = MadePiece(4, Step(0, 2, 2, 4, 6), 0, rows=[(2, 1)], label=[1], shard=["s"], count=[1], key=["l"],
                skipped=[(2, bad), (3, bad)])
    other = MadePiece(5, Step(0, 3, 3, 6, 8), 1, rows=[(3, 0), (2, 0)], label=[0, 1], shard=["t", "t"], count=[2, 3],
                 key=["m", "n"])
    batch = assemble(Step(0, 2, 2, 4, 6), torch.zeros(2, 4, 4, 3, dtype=torch.uint8), [made, other])
    assert batch.skipped == [bad] and batch.key == ["n", "l"]
