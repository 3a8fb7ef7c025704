"""JPEG: read the header, then decode no more of the file than a crop needs.

Two savings. Rows below a crop need not be decoded: a copy of the file whose header claims fewer rows gives
the same pixels sooner. And a crop much larger than what is wanted is decoded at 1/2, 1/4 or 1/8 of its
size, which the JPEG format allows at little cost.

    >>> header = read_header(data)
    >>> decode_top(data, header, bottom=200).shape          # at least 200 rows of 375
    torch.Size([3, 201, 500])
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.images.picture import Box, DecodeError, check_size, exif_orientation, open_with_pillow
from common.images.remarks import remarks

# Pixels are wrong after some remarks; after others (bytes that nothing needs, an odd version number) they are not.
_DAMAGE = re.compile(rb"Premature end|bad (Huffman|arithmetic) code|instead of RST", re.IGNORECASE)
_ODD = re.compile(rb"extraneous bytes|Inconsistent progression|Invalid SOS")  # maybe damage: for checks alone
_SEGMENT = struct.Struct(">HH")  # marker, length
_FRAME = struct.Struct(">HHBHHB")  # marker, length, precision, height, width, number of components
_HOLE = bytes(512)  # a sector
_MISSING = (128, 128, 128)  # what libjpeg puts where data are missing
_MIN_SAVED = 1 / 16  # of the rows: below that, copying the file and catching the remark cost as much as they save


class Header(NamedTuple):
    """What a crop needs to know of a JPEG file. `height` and `width` are as stored, before `orientation` is applied."""

    height: int
    width: int
    orientation: int
    height_at: int  # where the file keeps its height: 2 bytes, big-endian
    is_baseline: bool  # sequential, Huffman, 8 bit, one scan
    has_restarts: bool  # marks within the scan from which a decoder can go on after damage
    is_ended: bool  # the last bytes are the end mark, so nothing was cut off


def read_header(data: memoryview) -> Header:
    """Read the segments up to the first scan, about 5 µs. Raises DecodeError; called for every JPEG image."""
    frame, orientation, restarts = 0, 1, False
    place = 2
    while True:
        try:
            marker, length = _SEGMENT.unpack_from(data, place)
        except struct.error:
            raise DecodeError("truncated", f"JPEG of {len(data)} bytes that ends within its header") from None
        if marker <= 0xFF00 or marker == 0xFFFF:  # padding or stray bytes: go on to the next marker
            place += 1
            continue
        if marker == 0xFF01 or 0xFFD0 <= marker <= 0xFFD8:  # no content
            place += 2
            continue
        if marker == 0xFFDA or marker == 0xFFD9:
            break
        if marker == 0xFFE1 and orientation == 1 and bytes(data[place + 4 : place + 10]) == b"Exif\0\0":
            orientation = exif_orientation(data[place + 4 : place + 2 + length])
        elif marker == 0xFFDD:
            restarts = True
        elif 0xFFC0 <= marker <= 0xFFCF and marker not in (0xFFC4, 0xFFC8, 0xFFCC):
            frame = place
        place += 2 + max(length, 2)
    if marker == 0xFFD9 or not frame:
        raise DecodeError("corrupt", "JPEG without an image")
    return _header(data, frame, place, orientation, restarts)


def _header(data: memoryview, frame: int, scan: int, orientation: int, has_restarts: bool) -> Header:
    """The header from the places of the frame and scan segments; both lie within the data, but for their ends."""
    try:
        marker, _, precision, height, width, num_components = _FRAME.unpack_from(data, frame)
        one_scan = data[scan + 4] == num_components
    except (struct.error, IndexError):
        raise DecodeError("truncated", f"JPEG of {len(data)} bytes that ends within its header") from None
    if not (height and width):
        raise DecodeError("unsupported", "JPEG that does not give its size in the header")
    check_size(height, width)
    is_baseline = marker == 0xFFC0 and precision == 8 and one_scan
    is_ended = bytes(data[-2:]) == b"\xff\xd9"
    return Header(height, width, orientation, frame + 5, is_baseline, has_restarts, is_ended)


def decode_all(data: memoryview, header: Header) -> Tensor:
    """The whole stored image, uint8 (3, height, width), channels-last. Raises DecodeError."""
    with remarks() as said:
        pixels = _decode_all(data, header)
    _refuse(said, _DAMAGE)
    if said and _has_hole(data, header):
        _refuse(said, _ODD)
    return pixels


def _decode_all(data: memoryview, header: Header) -> Tensor:
    """Whatever can be made of the file; raises DecodeError where that is nothing."""
    native, message = _native_decoder(), ""
    if native is not None:
        try:
            return native(torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8))
        except RuntimeError as error:
            message = re.sub(r".*\.cpp:\d+, ", "", str(error).partition("\n")[0])  # less the place in its source
    if "truncated" not in message:
        try:  # Pillow's libjpeg is built with more (arithmetic coding)
            return _from_pillow(open_with_pillow(data, "JPEG"))
        except Exception as error:
            message = message or str(error)
    if "truncated" in message:
        raise DecodeError("truncated", f"JPEG of {len(data)} bytes, {header.width} x {header.height} pixels")
    cause = "unsupported" if re.search("support|sorry", message, re.IGNORECASE) else "corrupt"
    raise DecodeError(cause, f"JPEG: {message}")


def decode_top(data: memoryview, header: Header, bottom: int) -> Tensor:
    """At least the first `bottom` rows of the stored image, the same pixels as decode_all gives.

    Damage below them is not seen, and does no harm. Raises DecodeError.
    """
    native = _native_decoder()
    # With restart marks, what libjpeg says about rows left over reads like what it says about damage.
    shorter = None if header.has_restarts or _has_hole(data, header) else _shortened(data, header, bottom)
    if native is None or shorter is None:
        return decode_all(data, header)
    try:
        with remarks() as said:
            pixels = native(torch.frombuffer(shorter, dtype=torch.uint8))
    except RuntimeError:
        return decode_all(data, header)
    _refuse(said, _DAMAGE)  # or the rows left over, which count as extraneous bytes
    return pixels


def check(data: memoryview) -> None:
    """Decode the whole image. Raises DecodeError for what training refuses, and for bytes within it that nothing
    needs: they may be what damage left."""
    with remarks() as said:
        _decode_all(data, read_header(data))
    _refuse(said, _DAMAGE)
    _refuse(said, _ODD)


def _refuse(said: bytearray, pattern: re.Pattern[bytes]) -> None:
    """Raise DecodeError where libjpeg made one of these remarks."""
    if said and pattern.search(said):
        raise DecodeError("damaged image", said.decode(errors="replace").partition("\n")[0])


def _shortened(data: memoryview, header: Header, bottom: int) -> bytearray | None:
    """A copy of the file that claims little more than `bottom` rows; None where that gains too little or cannot be."""
    if not (header.is_baseline and header.is_ended):
        return None
    rows = bottom + 1  # one more, since smooth chroma looks a row ahead
    if rows > header.height * (1 - _MIN_SAVED):
        return None
    shorter = bytearray(data)
    struct.pack_into(">H", shorter, header.height_at, rows)
    return shorter


def decode_reduced(data: memoryview, header: Header, factor: int, box: Box, size: int) -> Tensor:
    """The stored image decoded at 1/factor (2, 4, 8), its `box` scaled to uint8 (3, size, size). Raises DecodeError.

    `box` is in pixels of the full image and may be fractional, so that the crop stays where it was. For files that are
    baseline and without restart marks: Pillow does not tell what libjpeg remarks, but in these missing data leave the
    rest of the image gray. Where its last pixel is so, or a hole is seen, torchvision's decoder is asked, which tells.
    """
    try:
        image = open_with_pillow(_shortened(data, header, math.ceil(box.bottom) + factor) or data, "JPEG")
        image.draft("RGB", (max(image.width // factor, 1), max(image.height // factor, 1)))
        edges = box.left / factor, box.top / factor, box.right / factor, box.bottom / factor
        scaled = _from_pillow(image.resize((size, size), Image.Resampling.BILINEAR, box=edges))
        last = image.getpixel((image.width - 1, image.height - 1))
    except Exception as error:
        raise DecodeError("truncated" if "truncated" in str(error) else "corrupt", f"JPEG: {error}") from None
    if last in (_MISSING, _MISSING[0]) or _has_hole(data, header):
        decode_all(data, header)
    return scaled


def _has_hole(data: memoryview, header: Header) -> bool:
    """Whether there are zeros behind the header as a lost piece of a file leaves them (and some flat images); 10 µs."""
    return bytes(data[header.height_at :]).find(_HOLE) >= 0


def _from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@lru_cache(maxsize=1)
def _native_decoder() -> Callable[[Tensor], Tensor] | None:
    """torchvision's decoder, a fifth faster than Pillow's; None where torchvision was built without or dropped it."""
    try:
        import torchvision  # noqa: F401  # registers the operator

        operator: Any = torch.ops.image.decode_jpeg.default
    except (ImportError, AttributeError, RuntimeError):
        return None
    return lambda data: operator(data, 3)  # 3: as RGB
