"""Encoded image -> pixels in the batch: decode, crop, flip and resize in as few passes as possible.

    >>> transform = ImageTransform(size=224, augment="crop")
    >>> transform(data, key=hashed(seed, epoch, position, AUGMENT), out=batch[i])

Pixels stay uint8 and channels-last from the decoder to the device; the resized crop is written straight
into its place in the batch. All randomness comes from the key, so it does not depend on the process.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.images.decode import Data, Picture, open_image
from common.images.picture import Box

# A JPEG is decoded at 1/2, 1/4 or 1/8 where the crop is then still this many times the wanted size on both sides.
# Against whole decoding, over 1000 crops of 70 photographs: median 52 dB, worst 39.7 dB (with 1.5: 50 and 37 dB).
REDUCTION_MARGIN = 2.0


class Prepared(NamedTuple):
    """An image that is known but, if a JPEG, not decoded. `box` is the crop to be scaled; None for the centre."""

    picture: Picture
    rng: random.Random
    box: Box | None = None
    mirror: bool = False


@dataclass(frozen=True)
class ImageTransform:
    """Decode an image and write a square of it into a slot of a batch. Made once, called for every sample.

    augment "crop", for training: 8 to 100 % of the area in a ratio of 3:4 to 4:3, mirrored half of the time.
    augment "center", for validation: the shorter side to size * 256 / 224, then the square in the middle.
    Both give what torchvision's transforms of the same crop give, within one level of 255, but for large JPEGs,
    which are decoded at a reduced size.

    skip_rows: do not decode the rows of a JPEG below the crop: neither their pixels nor damage in them matters.

    An augmentation of your own goes into a subclass; `rng` is a random.Random seeded for this sample and epoch:

        class Jitter(ImageTransform):
            def after_crop(self, image, rng):                # uint8 (3, size, size) -> the same
                return torchvision.transforms.v2.functional.adjust_brightness(image, rng.uniform(0.6, 1.4))
    """

    size: int = 224
    augment: str = "crop"
    skip_rows: bool = True

    def __post_init__(self) -> None:
        if self.augment not in ("crop", "center"):
            raise ValueError(f"augment is {self.augment!r}; 'crop' or 'center'")
        if self.size < 1:
            raise ValueError(f"size is {self.size}; at least 1 pixel")

    def __call__(self, data: Data, key: int, out: Tensor) -> None:
        """Write the sample into `out`, uint8 (3, size, size), best with channels-last strides. Raises DecodeError.

        data: the encoded file. key: 64 bits that stand for (seed, epoch, position). `out` is undefined after an error.
        """
        if not torch.is_inference_mode_enabled():  # a loader enters it once for a whole batch
            with torch.inference_mode():
                return self(data, key, out)
        self.finish(self.prepare(data, key), out)

    def prepare(self, data: Data, key: int) -> Prepared:
        """The first half of a call: all that needs no pixels. Raises DecodeError. `data` must stay until `finish`."""
        rng, picture = random.Random(key), open_image(data)
        if self.augment == "center":
            return Prepared(picture, rng)
        return Prepared(picture, rng, random_crop(picture.height, picture.width, rng), rng.random() < 0.5)

    def finish(self, prepared: Prepared, out: Tensor) -> None:
        """The second half: decode, crop and resize into `out`. Raises DecodeError."""
        if prepared.box is None:
            self._center(prepared.picture, out)
        else:
            self._crop(prepared.picture, prepared.box, prepared.mirror, out)
        image = self.after_crop(out, prepared.rng)
        if image is not out:
            out.copy_(image)

    def after_crop(self, image: Tensor, rng: random.Random) -> Tensor:
        """For subclasses: change the finished image, uint8 (3, size, size). All randomness must come from `rng`."""
        return image

    def _crop(self, picture: Picture, box: Box, mirror: bool, out: Tensor) -> None:
        factor = _reduction(picture, box, self.size)
        if factor > 1:
            out.copy_(picture.scaled(box, self.size, factor))
        else:
            resize(picture.pixels(box, self.skip_rows), (self.size, self.size), None, out)
        if mirror:
            out.copy_(out.flip(2))  # after the resize there is less to turn: 17 µs instead of 70, and the same pixels

    def _center(self, picture: Picture, out: Tensor) -> None:
        height, width = picture.height, picture.width
        shorter, short_side = int(self.size * 256 / 224), min(height, width)
        rows = _middle(height, int(shorter * height / short_side), self.size)
        columns = _middle(width, int(shorter * width / short_side), self.size)
        box = Box(*rows.wanted(self.size), *columns.wanted(self.size))
        factor = _reduction(picture, box, self.size)
        if factor > 1:
            out.copy_(picture.scaled(box, self.size, factor))
            return
        pixels = picture.pixels(Box(rows.first, rows.last, columns.first, columns.last), self.skip_rows)
        shape = rows.skip + self.size, columns.skip + self.size
        resized = torch.empty((*shape, 3), dtype=torch.uint8).permute(2, 0, 1)
        resize(pixels, shape, (1 / rows.scale, 1 / columns.scale), resized)
        out.copy_(resized[:, rows.skip :, columns.skip :])


def random_crop(height: int, width: int, rng: random.Random) -> Box:
    """A box of 8 to 100 % of the area with sides in a ratio of 3:4 to 4:3, as torchvision's RandomResizedCrop draws it.

    An image too narrow for ten tries gives the largest box of an allowed ratio in its middle.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = height * width * (0.08 + 0.92 * rng.random())
        ratio = math.exp(low + (high - low) * rng.random())
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.random() * (height - h + 1)), int(rng.random() * (width - w + 1))
            return Box(top, top + h, left, left + w)
    h, w = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    top, left = (height - h) // 2, (width - w) // 2
    return Box(top, top + h, left, left + w)


class _Span(NamedTuple):
    """One axis of "scale, then keep the middle", without what the middle does not need.

    Source pixels [first, last), scaled at `scale` source pixels for each output; the first `skip` outputs are dropped.
    """

    first: int
    last: int
    scale: float
    skip: int

    def wanted(self, size: int) -> tuple[float, float]:
        """The source pixels, with fractions, that the kept outputs cover."""
        return self.first + self.skip * self.scale, self.first + (self.skip + size) * self.scale


def _middle(length: int, scaled: int, size: int) -> _Span:
    """Plan one axis: `length` pixels scaled to `scaled`, of which the middle `size` are kept."""
    scale = length / scaled
    start = round((scaled - size) / 2)
    reach = max(scale, 1.0)  # how far, in source pixels, an output's weights go to either side
    last = min(length, math.ceil((start + size) * scale + reach) + 1)
    margin = math.ceil(reach / scale) + 1
    origin = 0
    if start > 2 * margin + 512:
        # A strip (3 x 60000 pixels) would become gigabytes. Begin where an output's edge falls on, or within 1/500 of,
        # an edge between source pixels: one of 512 in a row always does.
        nearby = range(start - margin - 512, start - margin)
        origin = min(nearby, key=lambda output: abs(output * scale - round(output * scale)))
    return _Span(round(origin * scale), last, scale, start - origin)


def _reduction(picture: Picture, box: Box, size: int) -> int:
    """By how much a JPEG may be reduced in decoding: 1, 2, 4 or 8."""
    side = min(box.bottom - box.top, box.right - box.left)
    if side < REDUCTION_MARGIN * size * 2:
        return 1
    return next((factor for factor in picture.reductions() if side >= REDUCTION_MARGIN * size * factor), 1)


def resize(pixels: Tensor, shape: tuple[int, int], scales: tuple[float, float] | None, out: Tensor) -> None:
    """Antialiased bilinear resize of uint8 (3, h, w) to `shape`, into `out` (3, *shape); `scales`: outputs per pixel.

    The kernel behind torch.nn.functional.interpolate(antialias=True), called by its own name for the sake of `out`.
    """
    kernel = torch.ops.aten._upsample_bilinear2d_aa.out
    kernel(pixels[None], list(shape), False, *(scales or (None, None)), out=out[None])
