"""Image files as bytes: are they whole, and smaller or re-encoded copies of them.

What is not asked to change is handed on byte by byte. Used by the shard writer, in every worker.

    data, extension = prepare(data, "jpg", verify="header", resize=None)
"""

from __future__ import annotations

import io
import warnings

from PIL import Image

from common.fields import IMAGE_EXTENSIONS

VERIFY = ("full", "header", "none")
CONVERTED = ("ppm", "pgm")  # read by ImageFolder, but not by readers of shards: they become PNG, which loses nothing
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
JPEG_QUALITY = 95
ORIENTATION = 0x0112
# What undoes each EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip


class Rejected(Exception):
    """An input that cannot be used. Its text is the cause, the same for the same bytes."""


def prepare(data: bytes, extension: str, verify: str, resize: int | None) -> tuple[bytes, str]:
    """The bytes to store and their extension. Raises Rejected.

    `verify`: `none` looks at nothing; `header` at the first and last bytes, and decodes what they do not
    settle; `full` decodes every image. `resize`: the shorter side in pixels; images that are no larger
    keep their bytes, others become upright (EXIF orientation applied) JPEGs of quality 95, or PNGs.
    """
    if not data:
        raise Rejected("empty file")
    if extension not in IMAGE_EXTENSIONS:
        return encode(_decode(data), resize)
    if resize is not None and min(_open(data).size) > resize:
        return encode(_decode(data, resize), resize)
    if verify != "none":
        whole = _looks_whole(data)
        if verify == "full" or not whole:
            _decode(data)
    return data, extension


def encode(image: Image.Image, resize: int | None) -> tuple[bytes, str]:
    """JPEG for what came as JPEG, PNG for everything else, with the shorter side at most `resize`. Raises Rejected."""
    jpeg = image.format in ("JPEG", "MPO")
    if resize is not None and min(image.size) > resize:
        image = _resized(image, resize)
    buffer = io.BytesIO()
    if jpeg:
        image.save(buffer, "JPEG", quality=JPEG_QUALITY, icc_profile=image.info.get("icc_profile"))
        return buffer.getvalue(), "jpg"
    if image.mode in ("I", "F"):
        raise Rejected("32-bit pixels, which no PNG can hold")
    if image.mode not in PNG_MODES:
        image = image.convert("RGB")
    image.save(buffer, "PNG", icc_profile=None)
    return buffer.getvalue(), "png"


def _resized(image: Image.Image, side: int) -> Image.Image:
    if "transparency" in image.info or image.mode in ("PA", "La", "RGBa"):
        image = image.convert("RGBA")
    elif image.mode in ("1", "P"):  # neither bits nor palette entries can be averaged
        image = image.convert("L" if image.mode == "1" else "RGB")
    try:
        upright = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # broken metadata is no fault of the pixels
        upright = None
    if upright is not None:
        image = image.transpose(upright)
    shorter = min(image.size)
    width, height = (max(1, round(length * side / shorter)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _open(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Image.open(io.BytesIO(data))
        except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, and more
            raise Rejected("too many pixels" if isinstance(error, Image.DecompressionBombError) else "not an image") from None


def _decode(data: bytes, resize: int | None = None) -> Image.Image:
    """All pixels of an image; of a JPEG to be made smaller, as few as twice its new size needs. Raises Rejected."""
    if data.startswith(b"\xff\xd8\xff") and not _looks_whole(data):
        raise Rejected("JPEG without an end")  # which the decoder would fill with gray
    image = _open(data)
    if resize is not None:
        scale = 2 * resize / min(image.size)
        image.draft(None, (int(image.width * scale), int(image.height * scale)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image.load()
        except Exception as error:
            raise Rejected(f"does not decode: {str(error) or type(error).__name__}") from None
    return image


def _looks_whole(data: bytes) -> bool:
    """Whether first and last bytes are those of a complete image. False is a doubt, not a verdict (but for JPEGs)."""
    if data.startswith(b"\xff\xd8\xff"):
        return data.endswith(b"\xff\xd9") or data.rfind(b"\xff\xd9") > _jpeg_scan(data) > 0
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data.endswith(b"IEND\xaeB`\x82")
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return int.from_bytes(data[4:8], "little") + 8 <= len(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return data.endswith(b"\x00;")
    return False


def _jpeg_scan(data: bytes) -> int:
    """Where the first scan of a JPEG starts, behind every thumbnail and its end marker; 0 where there is none."""
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xDA:
            return place
        place += 1 if marker == 0xFF else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return 0
