"""What images of every format share: the error for unusable ones, the size limit, and which way is up.

A camera stores its rows as the sensor gives them and notes in EXIF how to turn them. Boxes are cut
before the pixels are turned, so only what a crop needs is ever moved:

    >>> stored_box(Box(0, 10, 0, 20), orientation=6, height=100, width=50)    # turned by a quarter
    Box(top=30, bottom=50, left=0, right=10)
"""

from __future__ import annotations

import io
import struct
import warnings
from functools import lru_cache
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

MAX_PIXELS = 178_956_970  # 13 377 squared, 512 MiB as RGB; a few bytes can claim more, so headers are checked first

# EXIF orientation: (swap rows and columns, then reverse the rows, then reverse the columns)
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


class DecodeError(ValueError):
    """An image that cannot be used. `cause` is one of a few fixed words, to count by; `detail` says more.

    Causes: "not an image", "unsupported", "truncated", "corrupt", "damaged image" (decoded, but a part is missing),
    "too large".
    """

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(cause, detail)  # both, so that the error survives pickling on its way out of a worker
        self.cause, self.detail = cause, detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


def check_size(height: int, width: int) -> None:
    """Refuse an image whose header claims more than MAX_PIXELS, before any memory is taken for it."""
    if height * width > MAX_PIXELS:
        raise DecodeError("too large", f"{width} x {height} pixels, at most {MAX_PIXELS} are decoded")


def open_with_pillow(data: bytes | bytearray | memoryview, name: str) -> Image.Image:
    """Read the header of a file of the one format `name`; raises whatever Pillow raises."""
    _mute_pillow()
    return Image.open(io.BytesIO(data), formats=(name,))


@lru_cache(maxsize=1)
def _mute_pillow() -> None:
    """What Pillow says about odd metadata and large images would fill the log, and nothing is decided by it here."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right); whole pixels, or fractions where a function says so."""

    top: float
    bottom: float
    left: float
    right: float


def exif_orientation(block: bytes | memoryview) -> int:
    """The orientation (1 to 8) that an EXIF block gives; 1 where it gives none or makes no sense.

    Own twenty lines, because the general parsers read, warn about and stumble over tags that nobody needs here.
    """
    block = bytes(block[6:] if bytes(block[:6]) == b"Exif\0\0" else block)
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        (first,) = struct.unpack_from(f"{order}I", block, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", block, first)
        for entry in range(first + 2, first + 2 + 12 * num_tags, 12):
            tag, kind, count = struct.unpack_from(f"{order}HHI", block, entry)
            if tag == 0x0112:
                (value,) = struct.unpack_from(f"{order}{'I' if kind == 4 else 'H'}", block, entry + 8)
                return value if count == 1 and value in _TURNS else 1
    except struct.error:  # the block ends early, or an offset points beyond it
        pass
    return 1


def is_sideways(orientation: int) -> bool:
    """Whether the stored height is the width of the upright image."""
    return _TURNS[orientation][0]


def stored_box(box: Box, orientation: int, height: int, width: int) -> Box:
    """Where the pixels of `box`, a part of the upright (height, width) image, are in the stored one."""
    swap, reverse_rows, reverse_columns = _TURNS[orientation]
    top, bottom, left, right = box
    if reverse_rows:
        top, bottom = height - bottom, height - top
    if reverse_columns:
        left, right = width - right, width - left
    return Box(left, right, top, bottom) if swap else Box(top, bottom, left, right)


def upright(pixels: Tensor, orientation: int = 1) -> Tensor:
    """Turn a stored part (3, h, w) upright: a channels-last copy in one pass; where it is upright, `pixels` itself."""
    swap, reverse_rows, reverse_columns = _TURNS[orientation]
    if swap:
        pixels = pixels.transpose(1, 2)
    reversed_dims = [dim for dim, on in ((1, reverse_rows), (2, reverse_columns)) if on]
    if reversed_dims:
        pixels = pixels.flip(reversed_dims)  # keeps the order of the strides
    if not swap:
        return pixels
    rows = torch.empty((pixels.shape[1], pixels.shape[2], 3), dtype=torch.uint8)
    return rows.permute(2, 0, 1).copy_(pixels)
