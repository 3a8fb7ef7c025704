"""Images per second of the loader that the scripts use, by number of workers, and what limits it.

    python -m common.benchmark -s shards/train -w 1 2 4
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from common.assembly import open_shards, train_loader
from common.benchmarks.stages import STAGES, stage_seconds
from common.collate import Batch
from common.distributed import choose_devices, single_process
from common.fields import Fields
from common.loader import Loader, on_device
from common.plan import Plan
from common.processes import available_cpus
from common.sampling import Progress
from common.shards import ShardIndex
from common.trace import Trace
from common.transforms import ImageTransform

WARM_BYTES = 4 << 30  # of shards that are read over and over, so that the disk does not count
NUM_PASSES = 2
MANY_EPOCHS = 1 << 30


@dataclass(frozen=True)
class Input:
    """What is read, and how. Fields as in `TrainConfig`."""

    index: ShardIndex
    batch_size: int
    sampling: str = "exact"
    mix: str = "none"
    augment: str = "crop"
    image_size: int = 224
    shuffle: int = 5000
    seed: int = 0

    @classmethod
    def open(cls, patterns: Sequence[str], **settings: Any) -> Input:
        """The first shards of a data set, up to 4 GB, which are read once so that they lie in memory."""
        with single_process(torch.device("cpu")) as world:
            index = open_shards(world, patterns, Fields())
        total, kept = 0, 0
        for path in index.paths:
            if kept and total >= WARM_BYTES:
                break
            total, kept = total + _read_through(path), kept + 1
        first = dataclasses.replace(index, paths=index.paths[:kept], names=index.names[:kept], sizes=index.sizes[:kept])
        return cls(first, **settings)

    def loader(self, num_workers: int, transform: ImageTransform | None = None) -> Loader:
        """The scripts' loader for one rank, without an end. `transform` takes the place of the usual one."""
        plan = Plan.make(
            self.index, sampling=self.sampling, mix=self.mix, seed=self.seed, shuffle=self.shuffle, epoch_samples=None,
            batch_size=self.batch_size, world_size=1, num_workers=num_workers, num_epochs=MANY_EPOCHS, max_steps=None)
        transform = transform or ImageTransform(self.image_size, self.augment)
        return train_loader(plan, self.index, 0, Progress(), Fields(), transform)


def show_loader(data: Input, num_workers: Sequence[int], num_images: int, device_name: str,
                trace: bool) -> dict[str, Any]:
    """Time the loader with each number of workers; print and return images per second, shares and what limits."""
    device = choose_devices(device_name, None)[0]
    cores = available_cpus()
    print(f"{data.index.num_samples} images in {len(data.index.paths)} shards, batch {data.batch_size}, sampling "
          f"{data.sampling}, mix {data.mix}, augment {data.augment}, size {data.image_size}; {cores} cores, device "
          f"{device}, torch {torch.__version__}")
    rates = {number: images_per_second(data, number, num_images, device, trace) for number in num_workers}
    first = next(iter(rates))
    for number, rate in rates.items():
        print(f"{number:4d} workers {rate:8.0f} images/s   {rate / rates[first]:5.2f} × {first}")
    best = max(rates, key=lambda number: rates[number])
    transform = ImageTransform(data.image_size, data.augment, skip_rows=True)
    seconds = stage_seconds(data.loader, transform, min(num_images, 512), device)
    share = shares(seconds, best, rates[best])
    print(f"a worker's time with {best} workers, {best / rates[best] * 1e6:.0f} µs an image: "
          + ", ".join(f"{name} {value:.0%}" for name, value in share.items()))
    limit = what_limits(rates, share, cores)
    print(limit)
    return {"images_per_second": rates[best], "num_workers": best,
            "per_workers": {str(number): rate for number, rate in rates.items()}, "stage_seconds": seconds,
            "shares": share, "limit": limit}


def images_per_second(data: Input, num_workers: int, num_images: int, device: torch.device,
                      trace: bool = False) -> float:
    """The better of two passes of `num_images`, after the first batch, the workers running on."""
    best = 0.0
    with closing(on_device(iter(data.loader(num_workers)), device)) as batches, _recorder(trace) as record:
        record(next(batches))
        for _ in range(NUM_PASSES):
            count, start = 0, time.perf_counter()
            while count < num_images:
                batch = next(batches)
                record(batch)
                count += len(batch)
            best = max(best, count / (time.perf_counter() - start))
    return best


def shares(seconds: dict[str, float], num_workers: int, rate: float) -> dict[str, float]:
    """Each stage's share of a worker's time per image. `wait` is what their processor time leaves unexplained:
    the disk, a full queue, or cores that are busy with something else. The shares add up to 1."""
    total = max(num_workers / rate, sum(seconds.values()))
    share = {name: seconds[name] / total for name in STAGES}
    return share | {"wait": 1 - sum(share.values())}


def what_limits(rates: dict[int, float], share: dict[str, float], cores: int) -> str:
    """One sentence: what limits the fastest number of workers, and what to turn."""
    best = max(rates, key=lambda number: rates[number])
    if max(rates) == best and best < cores and share["wait"] < 0.5:
        return f"limit: {best} workers on {cores} cores; turn -w up to {cores}"
    stage = max(STAGES, key=lambda name: share[name])
    if share["wait"] > share[stage]:
        return (f"limit: {best} workers wait for one of {cores} cores, the disk or the main process; free the cores of "
                "other work, or use another -w")
    turn = {
        "read": "put the shards on a faster disk, or into --cache_dir, and make them larger",
        "decode": "write smaller images (python -m common.make_shards --resize 256), or give more cores and -w",
        "crop+resize": "lower --image_size, or give more cores and -w",
        "collate": "give more cores and -w",
        "transfer": "raise -b",
    }[stage]
    return f"limit: {stage} takes {share[stage]:.0%} of a worker's time; {turn}"


@contextmanager
def _recorder(trace: bool) -> Iterator[Any]:
    """What is done with each batch: nothing, or the row that --trace save writes."""
    if not trace:
        yield lambda batch: None
        return
    with tempfile.TemporaryDirectory() as folder:
        record = Trace(folder, attempt=0, rank=0, world_size=1)

        def save(batch: Batch) -> None:
            record.save(batch, "cpu", [0] * len(batch))

        yield save
        record.close()


def _read_through(path: str) -> int:
    """Read a file once; returns its bytes. One that cannot be read is for the loader to report."""
    try:
        with open(path, "rb", buffering=0) as file:
            return sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
