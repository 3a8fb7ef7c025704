"""A data set to try things on, drawn on the spot: no download, the same images for the same seed.

    python -m common.demo_data demo/images

Six classes of patterns in random colours, sizes, tilts and light, with discs in front and noise: the pattern tells
the class, its colours do not. `--arch tiny` at 64 pixels learns them to 99 % in ten epochs; guessing gets 17 %.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from common.errors import UserError, one_line
from common.files import read_json, remedy, write_atomic
from common.processes import available_cpus, run_jobs
from common.sampling import hashed
from common.tool import run_tool

VERSION = 1  # of the drawings: another number, other images
MARKER = "demo.json"  # says what a complete folder holds
IMAGES_PER_JOB = 64
JPEG_QUALITY = 85

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (H, W) coordinates in periods -> (H, W), above 0 inside


def _wave(x: np.ndarray) -> np.ndarray:
    """A triangle wave of period 1 from 0 to 1: cheaper than a sine, and as good."""
    return np.abs(x - np.floor(x) - 0.5) * 2


PATTERNS: dict[str, Pattern] = {
    "bricks": lambda x, y: np.minimum(_wave(y), _wave(x / 2 + 0.5 * (np.floor(y + 0.5) % 2))) - 0.15,
    "checks": lambda x, y: (_wave(x) - 0.5) * (_wave(y) - 0.5) * 4,
    "dots": lambda x, y: 0.65 - np.hypot(_wave(x), _wave(y)),
    "rings": lambda x, y: _wave(np.hypot(x, y)) - 0.5,
    "stripes": lambda x, y: _wave(x) - 0.5,
    "zigzag": lambda x, y: _wave(x + 0.8 * _wave(y / 2)) - 0.5,
}
CLASSES = tuple(sorted(PATTERNS))


def draw(number: int, seed: int) -> Image.Image:
    """Image `number` of the data set, an RGB image of 256 to 320 pixels a side. Its class is number % 6."""
    random = np.random.Generator(np.random.PCG64(hashed(seed, VERSION, number)))
    height, width = random.integers(256, 321, 2).tolist()
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None]
    inside = _pattern(CLASSES[number % len(CLASSES)], x, y, random)
    first, second = _colours(random)
    pixels = inside[:, :, None] * (first - second)  # (H, W, 3) float32, from here on in place
    pixels += second
    for _ in range(random.integers(0, 4)):
        _paint_disc(pixels, x, y, random)
    light = 1 + random.uniform(-0.3, 0.3) * (x / width - 0.5) + random.uniform(-0.3, 0.3) * (y / height - 0.5)
    pixels *= light[:, :, None]
    noise = random.standard_normal((height, width, 1), dtype=np.float32)
    noise *= random.uniform(2, 8)
    pixels += noise
    return Image.fromarray(np.clip(pixels, 0, 255, out=pixels).astype(np.uint8))


def _pattern(name: str, x: np.ndarray, y: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The pattern, tilted, scaled and shifted at random: (H, W), 0 to 1, soft edges. `x` is a row, `y` a column."""
    angle, period = random.uniform(-0.35, 0.35), random.uniform(32, 64)
    x, y = x - random.uniform(0, x.size), y - random.uniform(0, y.size)
    cos, sin = math.cos(angle) / period, math.sin(angle) / period
    depth = PATTERNS[name](x * cos - y * sin, x * sin + y * cos)
    depth *= period / 3
    depth += 0.5
    return np.clip(depth, 0, 1, out=depth)


def _colours(random: np.random.Generator) -> np.ndarray:
    """Two colours of any hue, the first clearly brighter, (2, 3) in 0 to 255."""
    while True:
        colours = random.uniform(10, 245, (2, 3)).astype(np.float32)
        bright, dark = colours @ np.array([0.3, 0.6, 0.1], dtype=np.float32)
        if bright - dark > 80:
            return colours


def _paint_disc(pixels: np.ndarray, x: np.ndarray, y: np.ndarray, random: np.random.Generator) -> None:
    """Something in front of the pattern that says nothing about it."""
    radius = random.uniform(10, 40)
    x, y = x - random.uniform(0, x.size), (y - random.uniform(0, y.size)) * random.uniform(0.5, 2)
    pixels[x * x + y * y < radius * radius] = random.uniform(20, 235, 3)


@dataclass(frozen=True)
class _Job:
    """Some of the images, for one process."""

    folder: Path
    numbers: range
    seed: int


def _draw_some(job: _Job) -> int:
    for number in job.numbers:
        path = job.folder / CLASSES[number % len(CLASSES)] / f"{number:05d}.jpg"
        draw(number, job.seed).save(path, quality=JPEG_QUALITY)
    return len(job.numbers)


def make_demo_data(out: str | Path, num_images: int = 2000, seed: int = 0, num_workers: int = 1) -> bool:
    """Draw the images into out/CLASS/NUMBER.jpg. False where they were there already. Raises UserError.

    `out` appears when it is complete. Called by the command line, by the quick start and by tests.
    """
    out = Path(out)
    about = {"version": VERSION, "num_images": num_images, "seed": seed, "classes": list(CLASSES)}
    if out.is_dir() and any(out.iterdir()):
        if read_json(out / MARKER) != about:
            raise UserError(f"the folder holds something else; {out}; choose another OUT, or remove it")
        return False
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        for name in CLASSES:
            (unfinished / name).mkdir(parents=True)
        starts = range(0, num_images, IMAGES_PER_JOB)
        jobs = (_Job(unfinished, range(s, min(s + IMAGES_PER_JOB, num_images)), seed) for s in starts)
        with tqdm(total=num_images, unit=" images", disable=None) as bar:
            for num_drawn in run_jobs(_draw_some, jobs, num_workers):
                bar.update(num_drawn)
        write_atomic(unfinished / MARKER, json.dumps(about) + "\n")
        unfinished.replace(out)
    except OSError as error:
        raise UserError(f"cannot write the images ({error.strerror}); {out}; "
                        f"{remedy(error)}choose another OUT") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status: 0 the images are there, 1 an error in one line, 2 bad usage, 130 interrupted."""
    parser = argparse.ArgumentParser("python -m common.demo_data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="folder for the images, one subfolder per class")
    parser.add_argument("--images", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("-w", "--num_workers", "--num-workers", type=int, default=available_cpus(),
                        help="processes; the images do not depend on it (default: one for each core, here %(default)s)")
    args = parser.parse_args(arguments)
    if args.images < len(CLASSES):
        parser.error(f"--images {args.images}: there are {len(CLASSES)} classes, each needs an image")
    try:
        is_new = make_demo_data(args.out, args.images, args.seed, args.num_workers)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; {args.out}; give the same command again", file=sys.stderr)
        return 130
    print(f"{args.images} images of {len(CLASSES)} classes {'in' if is_new else 'were already in'} {args.out}")
    return 0


if __name__ == "__main__":
    run_tool(main)
