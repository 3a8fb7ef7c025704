"""Where the time of one image goes, in one process on one thread: every row in one run, so only ratios matter.

Each image counts with the fastest of its rounds, so that a busy machine does not decide.

    python tests/benchmarks/bench_transform.py shards/train-0000.tar [--images 128] [--size 224] [--rounds 9]
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.images import jpeg
from common.images.decode import open_image
from common.images.picture import Box
from common.transforms import ImageTransform, random_crop, resize


def photos(path: str, num_images: int) -> list[bytes]:
    """The encoded images of a tar; without one, noisy photographs of 500 x 375 pixels made up on the spot."""
    if path:
        with tarfile.open(path) as tar:
            images = (tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg"))  # type: ignore[union-attr]
            return list(itertools.islice(images, num_images))
    made, state = [], np.random.RandomState(0)
    for _ in range(num_images):
        coarse = Image.fromarray(state.randint(0, 255, (24, 32, 3), dtype=np.uint8))
        noisy = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)) + state.randn(375, 500, 1) * 4
        made.append(io.BytesIO())
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(made[-1], "JPEG", quality=92)
    return [file.getvalue() for file in made]


def rows_of(images: list[bytes], size: int) -> dict[str, Callable[[int], object]]:
    """What is measured, by name: each a function of the image's number."""
    batch = torch.empty((2, size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    encoded = [torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in images]
    pictures = [open_image(image) for image in images]
    decoded = [picture.pixels(Box(0, picture.height, 0, picture.width)) for picture in pictures[:32]]
    crops = [random_crop(picture.height, picture.width, random.Random(i)) for i, picture in enumerate(pictures)]
    cut = [pictures[i].pixels(crops[i]) for i in range(len(decoded))]
    reference = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    headers = [jpeg.read_header(memoryview(image)) for image in images]
    native = torch.ops.image.decode_jpeg.default

    def through(augment: str, skip_rows: bool) -> Callable[[int], object]:
        transform = ImageTransform(size, augment, skip_rows)
        return lambda i: transform(images[i], i, batch[i % 2])

    return {
        "libjpeg alone (torchvision decode)": lambda i: native(encoded[i], 3),
        "header": lambda i: jpeg.read_header(memoryview(images[i])),
        "decode, rows of the crop": lambda i: jpeg.decode_top(memoryview(images[i]), headers[i], int(crops[i].bottom)),
        "flip": lambda i: batch[0].copy_(batch[0].flip(2)),
        "resize": lambda i: resize(cut[i % len(cut)], (size, size), None, batch[0]),
        "whole transform, crop, rows skipped": through("crop", True),
        "whole transform, crop": through("crop", False),
        "whole transform, center, rows skipped": through("center", True),
        "whole transform, center": through("center", False),
        "torchvision v2 on tensors, crop": lambda i: batch[i % 2].copy_(reference(native(encoded[i], 3))),
        "torchvision v2 on Pillow images, crop": lambda i: reference(Image.open(io.BytesIO(images[i])).convert("RGB")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tar", nargs="?", default="", help="shard to take JPEGs from (default: made-up photographs)")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = photos(args.tar, args.images)
    rows = rows_of(images, args.size)
    fastest = {name: [float("inf")] * len(images) for name in rows}
    for _ in range(args.rounds):
        for name, function in rows.items():
            for i in range(len(images)):
                start = time.perf_counter()
                function(i)
                fastest[name][i] = min(fastest[name][i], time.perf_counter() - start)
    print(f"{len(images)} images of {sum(map(len, images)) // len(images)} bytes, size {args.size}, fastest of "
          f"{args.rounds} rounds; torch {torch.__version__}, torchvision {torchvision.__version__}")
    base = sum(next(iter(fastest.values())))
    print(f"{'':40}{'µs/image':>10}{'images/s':>10}{'of libjpeg':>12}")
    for name, seconds in fastest.items():
        total = sum(seconds)
        print(f"{name:40}{total / len(images) * 1e6:10.1f}{len(images) / total:10.0f}{total / base:12.2f}")


if __name__ == "__main__":
    main()
