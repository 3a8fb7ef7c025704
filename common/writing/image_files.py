"""Image files as bytes: are they whole, and smaller or re-encoded copies of them.

What is not asked to change is handed on byte by byte. Used by the shard writer, in every worker.

    data, extension = prepare(data, "jpg", verify="header", resize=None)
"""

from __future__ import annotations

import io
import re
import warnings

from PIL import Image, ImageOps

from common.fields import IMAGE_EXTENSIONS

VERIFY = ("full", "header", "none")
CONVERTED = ("ppm", "pgm")  # ImageFolder reads them, readers of shards do not: they become PNG, which loses nothing
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
JPEG_QUALITY = 95


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
    is_readable = extension in IMAGE_EXTENSIONS
    if is_readable and (verify == "full" or (verify == "header" and not looks_whole(data))):
        _check_as_training_does(data, strictly=verify == "full")
    if is_readable and resize is None:
        return data, extension
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata and large images: nothing is decided by it
        image = _opened(data)
        if is_readable and resize is not None and min(image.size) <= resize:
            return data, extension
        return encode(_loaded(image, resize), resize)


def looks_whole(data: bytes) -> bool:
    """Whether first and last bytes are those of a complete JPEG, PNG, WebP or GIF. False is a doubt, not a verdict.

    0.2 µs, and true of nearly all that are: a cut file, a page of HTML, a file of zeros do not pass.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return data.endswith(b"\xff\xd9")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data.endswith(b"IEND\xaeB`\x82")
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return int.from_bytes(data[4:8], "little") + 8 == len(data)
    return data.startswith((b"GIF87a", b"GIF89a")) and data.endswith(b"\x00;")


def encode(image: Image.Image, resize: int | None) -> tuple[bytes, str]:
    """JPEG for what came as JPEG, PNG for the rest, the shorter side at most `resize` pixels. Raises Rejected."""
    as_jpeg = image.format in ("JPEG", "MPO")
    is_16_bit = image.format == "PPM" and image.mode == "I"  # as Pillow reads a PGM of two bytes a pixel
    if resize is not None and min(image.size) > resize:
        image = _resized(image, resize)
    buffer = io.BytesIO()
    if as_jpeg:
        image.save(buffer, "JPEG", quality=JPEG_QUALITY, icc_profile=image.info.get("icc_profile"))
        return buffer.getvalue(), "jpg"
    if is_16_bit:
        image = image.convert("I;16")
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
        image = ImageOps.exif_transpose(image)
    except Exception:  # broken metadata is no fault of the pixels
        pass
    shorter = min(image.size)
    width, height = (max(1, round(length * side / shorter)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _opened(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        raise Rejected("too many pixels") from None
    except Exception:  # Pillow's formats raise OSError, SyntaxError, ValueError, struct.error and more
        raise Rejected("not an image") from None


def _loaded(image: Image.Image, resize: int | None) -> Image.Image:
    """With its pixels; of a JPEG that is to become smaller, as few as twice its new size needs. Raises Rejected."""
    if resize is not None:
        scale = 2 * resize / min(image.size)
        image.draft(None, (int(image.width * scale), int(image.height * scale)))
    try:
        image.load()
    except Exception as error:
        raise Rejected(_cause(error)) from None
    return image


def _check_as_training_does(data: bytes, strictly: bool) -> None:
    """Raises Rejected for what training could not use; with `strictly`, for what check_shards would find, too."""
    from common.images.decode import DecodeError, check_image, decode_image  # PyTorch takes a second and 200 MB

    try:
        (check_image if strictly else decode_image)(data)
    except DecodeError as error:
        raise Rejected(_cause(error)) from None


def _cause(error: Exception) -> str:
    """What an error says, without the addresses that differ from run to run."""
    return re.sub(r" ?<[^<>]* at 0x\w+>", "", str(error)) or type(error).__name__
