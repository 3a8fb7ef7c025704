"""Where a worker's time goes: the loader's own functions, timed while it runs in this process.

    seconds = stage_seconds(lambda workers, transform: loader, ImageTransform(224, skip_rows=True), 512, device)
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import patch

import torch

from common import loader, transforms
from common.collate import Batch
from common.dataset import Source
from common.images import jpeg
from common.images.decode import open_image
from common.loader import Loader
from common.mixing import Mix
from common.sampling import Step
from common.transforms import ImageTransform

STAGES = ("read", "decode", "crop+resize", "collate", "transfer")
DECODERS = ("decode_all", "decode_top", "decode_reduced")


class Clock:
    """Processor seconds by stage, so that a busy machine does not count. A stage within a stage counts for itself."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of stages within the current one

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `stage`."""

        def call(*args: Any, **options: Any) -> Any:
            before, self._inner, start = self._inner, 0.0, time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent = time.thread_time() - start
                self.seconds[stage] += spent - self._inner
                self._inner = before + spent

        return call


class _TimedSource:
    """A source whose reading is timed, sample by sample."""

    def __init__(self, source: Source, clock: Clock):
        self.source, self.plan, self.clock = source, source.plan, clock

    def steps(self) -> Iterator[Step]:
        return self.source.steps()

    def pieces(self, worker: int, num_workers: int, mixing: Mix) -> Iterator[tuple[Any, Iterable[Any]]]:
        pieces = self.source.pieces(worker, num_workers, mixing)
        ended = object()
        while (made := self.clock.timed("read", next)(pieces, ended)) is not ended:
            piece, samples = made
            yield piece, iter(self.clock.timed("read", samples.__next__), None)


def stage_seconds(make: Callable[[int, ImageTransform], Loader], transform: ImageTransform, num_images: int,
                  device: torch.device) -> dict[str, float]:
    """Processor seconds per image of each stage, on one thread. `collate` is what is no other stage."""
    clock, num_threads = Clock(), torch.get_num_threads()
    made = make(0, transform)
    made.dataset.source = _TimedSource(made.dataset.source, clock)
    torch.set_num_threads(1)  # as in a worker
    try:
        with ExitStack() as patches, closing(iter(made)) as batches:
            for name in DECODERS:
                patches.enter_context(patch.object(jpeg, name, clock.timed("decode", getattr(jpeg, name))))
            patches.enter_context(patch.object(transforms, "open_image", clock.timed("decode", open_image)))
            for name in ("prepare", "finish"):
                timed = clock.timed("crop+resize", getattr(ImageTransform, name))
                patches.enter_context(patch.object(ImageTransform, name, timed))
            patches.enter_context(patch.object(loader, "checked", clock.timed("transfer", _sent_through)))
            return _stages(clock, batches, num_images, device)
    finally:
        torch.set_num_threads(num_threads)


def _stages(clock: Clock, batches: Iterator[Batch], num_images: int, device: torch.device) -> dict[str, float]:
    for _ in range(2):
        next(batches)
    clock.seconds.clear()
    count = 0
    while count < num_images:
        batch = clock.timed("collate", next)(batches)
        clock.timed("transfer", _copied)(batch, device)
        count += len(batch)
    return {stage: clock.seconds[stage] / count for stage in STAGES}


def _sent_through(piece: Any) -> Any:
    """What a worker's pipe does to a piece."""
    return pickle.loads(pickle.dumps(piece))


def _copied(batch: Batch, device: torch.device) -> None:
    if device.type == "cuda":
        batch.image.to(device)
        torch.cuda.synchronize(device)
