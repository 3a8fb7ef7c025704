"""Bytes -> uint8 RGB image: the format by content, never by name; upright; anything unusable is a DecodeError.

    >>> decode_image(open("photo.jpg", "rb").read()).shape
    torch.Size([3, 375, 500])

JPEG, PNG, WebP, BMP, GIF and TIFF (the first frame of those that have several). Gray becomes RGB, CMYK is
converted, 16 bits are scaled by 1/257, transparent pixels are laid over white.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.images import jpeg
from common.images.picture import (
    Box,
    DecodeError,
    check_size,
    exif_orientation,
    is_sideways,
    open_with_pillow,
    stored_box,
    upright,
)

__all__ = ["BACKGROUND", "DecodeError", "Picture", "check_image", "decode_image", "open_image"]

BACKGROUND = (255, 255, 255)  # what shows through transparent pixels
Data = bytes | bytearray | memoryview | Tensor

_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
}
_UNSUPPORTED = {4: {b"ftyp": "AVIF or HEIC", b"JXL ": "JPEG XL", b"jP  ": "JPEG 2000"}, 0: {b"8BPS": "Photoshop"}}


def decode_image(data: Data) -> Tensor:
    """The whole image, upright: uint8 (3, H, W), channels-last, RGB. Raises DecodeError. For checks and examples;
    training goes through common.transforms, which decodes no more than it crops."""
    picture = open_image(data)
    return picture.pixels(Box(0, picture.height, 0, picture.width))


def check_image(data: bytes) -> None:
    """Decode the whole image. Raises DecodeError for what training refuses, and for a JPEG with bytes that nothing
    needs. The one rule of `make_shards --verify full` and check_shards."""
    if data.startswith(b"\xff\xd8\xff"):
        jpeg.check(memoryview(data))
    else:
        decode_image(data)


def open_image(data: Data) -> Picture:
    """Find the format and the size; a JPEG's pixels are decoded when asked for, others' at once. Raises DecodeError."""
    buffer: Any = data.numpy() if isinstance(data, Tensor) else data
    view = memoryview(buffer).cast("B")
    name = _format_of(bytes(view[:16]))
    return _JpegPicture(view, jpeg.read_header(view)) if name == "JPEG" else _RasterPicture(view, name)


class Picture:
    """An image whose size is known: `height` and `width` upright, and any part of its pixels on demand."""

    is_decoded = False  # whether the pixels are in memory already

    def __init__(self, height: int, width: int, orientation: int):
        self.orientation = orientation
        self.height, self.width = (width, height) if is_sideways(orientation) else (height, width)

    def pixels(self, box: Box, skip_rows: bool = False) -> Tensor:
        """The pixels of `box` (whole numbers), upright: uint8 (3, h, w) in channels-last order, mostly a part of the
        decoded image, since the kernel that resizes it needs no copy.

        With `skip_rows`, rows of a JPEG below the box are not decoded.
        """
        top, bottom, left, right = map(int, stored_box(box, self.orientation, self.height, self.width))
        return upright(self._stored(bottom, skip_rows)[:, top:bottom, left:right], self.orientation)

    def scaled(self, box: Box, size: int, factor: int) -> Tensor:
        """`box`, which may be fractional, decoded at 1/factor and scaled: uint8 (3, size, size), upright."""
        raise NotImplementedError("only a JPEG can be decoded at a fraction of its size")

    def reductions(self) -> tuple[int, ...]:
        """The factors that `scaled` takes, the largest first; none for most formats."""
        return ()

    def _stored(self, bottom: int, skip_rows: bool) -> Tensor:
        raise NotImplementedError


class _JpegPicture(Picture):
    """A JPEG, decoded when the crop is known."""

    def __init__(self, data: memoryview, header: jpeg.Header):
        super().__init__(header.height, header.width, header.orientation)
        self.data, self.header = data, header

    def _stored(self, bottom: int, skip_rows: bool) -> Tensor:
        if skip_rows:
            return jpeg.decode_top(self.data, self.header, bottom)
        return jpeg.decode_all(self.data, self.header)

    def reductions(self) -> tuple[int, ...]:
        header = self.header
        return (8, 4, 2) if header.is_ended and header.is_baseline and not header.has_restarts else ()

    def scaled(self, box: Box, size: int, factor: int) -> Tensor:
        stored = stored_box(box, self.orientation, self.height, self.width)
        return upright(jpeg.decode_reduced(self.data, self.header, factor, stored, size), self.orientation)


class _RasterPicture(Picture):
    """Every other format: Pillow decodes the whole image at once."""

    is_decoded = True

    def __init__(self, data: memoryview, name: str):
        if name == "PNG":
            _check_png_end(data)
        try:
            image = open_with_pillow(data, name)
            check_size(image.height, image.width)
            self.rgb = torch.from_numpy(_to_rgb(image)).permute(2, 0, 1)
            orientation = _orientation_of(image)
        except DecodeError:
            raise
        except Image.DecompressionBombError as error:
            raise DecodeError("too large", f"{name}: {error}") from None
        except Exception as error:  # damaged files raise nearly anything: OSError, SyntaxError, struct.error, KeyError
            cause = "truncated" if "truncated" in str(error) else "corrupt"
            raise DecodeError(cause, f"{name}: {type(error).__name__}: {error}") from None
        super().__init__(self.rgb.shape[1], self.rgb.shape[2], orientation)

    def _stored(self, bottom: int, skip_rows: bool) -> Tensor:
        return self.rgb


def _format_of(start: bytes) -> str:
    """The format that a file's first 16 bytes announce. Raises DecodeError for any other than the six."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    for signature, name in _SIGNATURES.items():
        if start.startswith(signature):
            return name
    for place, names in _UNSUPPORTED.items():
        if other := names.get(start[place : place + 4]):
            raise DecodeError("unsupported", f"{other}; JPEG, PNG, WebP, BMP, GIF and TIFF can be read")
    raise DecodeError("not an image", f"starts with {start!r}" if start else "0 bytes")


def _check_png_end(data: memoryview) -> None:
    """Walk the chunks to the end mark: Pillow reads some cut files as complete."""
    place = 8
    while place + 12 <= len(data):
        if bytes(data[place + 4 : place + 8]) == b"IEND":
            return
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    raise DecodeError("truncated", f"PNG of {len(data)} bytes without its end")


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Pixels as uint8 (H, W, 3), whatever the image's own mode."""
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips at 255
        gray = (np.asarray(image).astype(np.uint32) + 128) // 257
        return np.repeat(gray.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise DecodeError("unsupported", f"{image.format} of 32-bit numbers, which have no fixed range")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _orientation_of(image: Image.Image) -> int:
    """The orientation that a decoded PNG or WebP carries. Pillow has turned a TIFF already."""
    return 1 if image.format == "TIFF" else exif_orientation(image.info.get("exif") or b"")
