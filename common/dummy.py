"""`--dummy`: synthetic data without shards, to see what DP and DDP do with a batch, and what the input pipeline costs.

    python train_dp.py -g 0 1 2 --dummy --epoch_samples 42 -b 14 --trace print

Pixels and labels are fixed by (seed, epoch, position), as the order and the augmentation of real data are. An image
takes a tenth of the time of a decoded one, so the images per second of such a run are what no input can exceed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from common.dataset import ExactSource, Keyed
from common.fields import Fields, RawSample
from common.images.decode import Data, Picture
from common.indexing.reader import ShardReader
from common.sampling import AUGMENT, EpochOrder, deal, hashed
from common.shards import ShardIndex
from common.transforms import ImageTransform, Prepared

NUM_CLASSES = 10
SHARD_SAMPLES, MAX_SHARDS = 1000, 1000
FIELDS = Fields("noise", "cls", NUM_CLASSES)


def dummy_index(num_samples: int) -> ShardIndex:
    """A data set of `num_samples` that no file holds, in shards of about a thousand."""
    borders = np.array(deal(num_samples, min(-(-num_samples // SHARD_SAMPLES), MAX_SHARDS)), dtype=np.int64)
    names = tuple(f"dummy-{number:04d}" for number in range(len(borders) - 1))
    return ShardIndex((), names, np.diff(borders), NUM_CLASSES)


class DummySource(ExactSource):
    """The order of exact sampling, over samples that are made up."""

    def _read(self, reader: ShardReader, order: EpochOrder, start: int, stop: int) -> Iterator[Keyed]:
        for position, (shard, place) in zip(range(start, stop), order.locate(start, stop).tolist(), strict=True):
            key = hashed(self.plan.seed, order.epoch, position, AUGMENT)
            fields = {"noise": b"", "cls": str(hashed(key) % NUM_CLASSES).encode()}
            yield key, RawSample(self.index.names[shard], place, f"{place:06d}", fields)


class Noise(ImageTransform):
    """Fills a slot of a batch with random pixels: 0.1 ms for 224 × 224."""

    def prepare(self, data: Data, key: int) -> Prepared:
        return Prepared(Picture(self.size, self.size, orientation=1), random.Random(key))

    def finish(self, prepared: Prepared, out: Tensor) -> None:
        rng = np.random.Generator(np.random.SFC64(prepared.rng.getrandbits(64)))
        pixels = out.permute(1, 2, 0).numpy()  # (size, size, 3): as it lies in the ring
        pixels[...] = np.frombuffer(rng.bytes(pixels.size), dtype=np.uint8).reshape(pixels.shape)
