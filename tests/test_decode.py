"""Every format, mode and orientation becomes the right upright RGB image; everything unusable is a DecodeError."""

from __future__ import annotations

import base64
import io
import os
import pickle
import random
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from common.images import jpeg, picture
from common.images.decode import DecodeError, check_image, decode_image, open_image
from common.images.picture import MAX_PIXELS, Box, exif_orientation
from common.images.remarks import remarks

LOSSLESS = {"PNG": {}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}, "WEBP": {"lossless": True}}
# A gray slope of 16 x 16 pixels with arithmetic coding, which Pillow reads but does not write
ARITHMETIC = base64.b64decode(
    "/9j/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYUGBIUFRT/yQALCAAQABABAREA"
    "/8wABgAQEAX/2gAIAQEAAD8A/wDn4Y1mM4u5JXEKGDK6kBFyX/gp/wBhcnc0YP/Z"
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """pytest puts the warning filters back after each test, so that muting Pillow must start again."""
    picture._mute_pillow.cache_clear()


def photo(height: int = 37, width: int = 53, seed: int = 0) -> Image.Image:
    """Smooth blobs with some noise: what JPEG is made for, and different in every corner."""
    state = np.random.RandomState(seed)
    coarse = state.randint(0, 255, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray((smooth + state.randn(height, width, 3) * 4).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, name: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    """A minimal EXIF block: one tag."""
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0) if kind == 3 else (orientation,)))
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return b"Exif\0\0" + head + struct.pack(order + "HHHI", 1, 0x0112, kind, 1) + value + bytes(4)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment behind its first bytes."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[2:]


# Formats and modes


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats_give_the_pixels_themselves(name: str) -> None:
    image = photo()
    result = decode_image(encode(image, name, **LOSSLESS[name]))
    assert torch.equal(result, pixels(image))
    assert result.dtype == torch.uint8 and result[None].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_jpeg_gives_what_pillow_gives(options: dict) -> None:
    data = encode(photo(), "JPEG", quality=92, **options)
    result = decode_image(data)
    assert torch.equal(result, pixels(Image.open(io.BytesIO(data))))
    assert result[None].is_contiguous(memory_format=torch.channels_last)


def test_first_frame_of_a_gif() -> None:
    frames = [photo(seed=seed).quantize(16) for seed in range(3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert torch.equal(decode_image(data), pixels(frames[0]))


def test_bytes_memoryviews_and_tensors_are_the_same_and_left_alone(recwarn: pytest.WarningsRecorder) -> None:
    torch.set_warn_always(True)  # or only the first buffer of the process that is not writable would be told of
    for data in (encode(photo(), "JPEG"), encode(photo(), "PNG")):
        expected = decode_image(data)
        tensor = torch.frombuffer(bytearray(b"junk" + data), dtype=torch.uint8)[4:]
        for form in (bytearray(data), memoryview(data), memoryview(bytearray(data)), tensor):
            assert torch.equal(decode_image(form), expected)
            assert bytes(memoryview(form.numpy() if isinstance(form, torch.Tensor) else form)) == data
    torch.set_warn_always(False)
    assert not recwarn.list


def test_result_does_not_share_memory_with_the_data() -> None:
    data = bytearray(encode(photo(), "BMP"))
    result = decode_image(data)
    data[-300:] = bytes(300)
    assert torch.equal(result, pixels(photo()))


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_gray_palette_and_one_bit(name: str) -> None:
    gray = photo().convert("L")
    assert torch.equal(decode_image(encode(gray, name)), pixels(gray))
    palette = photo().quantize(32)
    assert torch.equal(decode_image(encode(palette, name)), pixels(palette))
    bits = photo().convert("1")
    result = decode_image(encode(bits, name))
    assert torch.equal(result, pixels(bits)) and set(result.unique().tolist()) == {0, 255}


def test_gray_jpeg() -> None:
    data = encode(photo().convert("L"), "JPEG")
    assert torch.equal(decode_image(data), pixels(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("name", ["PNG", "WEBP", "TIFF"])
def test_alpha_is_laid_over_white(name: str) -> None:
    rgba = np.zeros((4, 6, 4), dtype=np.uint8)
    rgba[..., 0] = 200
    rgba[:, :2, 3], rgba[:, 2:4, 3], rgba[:, 4:, 3] = 255, 51, 0  # opaque, a fifth, clear
    result = decode_image(encode(Image.fromarray(rgba, "RGBA"), name, **({"lossless": True} if name == "WEBP" else {})))
    assert result[:, 0, 0].tolist() == [200, 0, 0]
    assert result[:, 0, 2].tolist() == pytest.approx([244, 204, 204], abs=1)
    assert result[:, 0, 4].tolist() == [255, 255, 255]


def test_alpha_of_gray_and_of_palettes() -> None:
    gray = Image.merge("LA", (Image.new("L", (4, 4), 10), Image.new("L", (4, 4), 0)))
    assert decode_image(encode(gray, "PNG")).unique().tolist() == [255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 80, 70, 60])
    palette.putpixel((3, 0), 0)
    for name in ("PNG", "GIF"):
        result = decode_image(encode(palette, name, transparency=0))
        assert result[:, 0, 0].tolist() == [80, 70, 60] and result[:, 0, 3].tolist() == [255, 255, 255]
    partly = decode_image(encode(palette, "PNG", transparency=bytes([255, 0])))
    assert partly[:, 0, 0].tolist() == [255, 255, 255] and partly[:, 0, 3].tolist() == [9, 9, 9]


@pytest.mark.parametrize("transform", [0, 2])
@pytest.mark.parametrize("orientation", [1, 6])
def test_cmyk_jpeg(orientation: int, transform: int) -> None:
    """Inks are stored inverted, as they are or (2) as YCCK."""
    inks = photo(120, 160).convert("CMYK")
    data = bytearray(with_segment(encode(inks, "JPEG", quality=95), 0xE1, exif(orientation)))
    data[data.index(b"Adobe") + 11] = transform
    picture, result = open_image(data), decode_image(data)
    assert torch.equal(result, pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    small = picture.scaled(Box(0, picture.height, 0, picture.width), 40, 2)
    expected = torch.nn.functional.interpolate(result[None], (40, 40), mode="bilinear", antialias=True)[0]
    assert (small.float() - expected.float()).abs().mean() < 2


def test_red_ink_is_red() -> None:
    flat = Image.new("CMYK", (32, 16), (0, 255, 255, 0))  # no cyan, full magenta and yellow
    assert decode_image(encode(flat, "JPEG")).float().mean((1, 2)).tolist() == pytest.approx([255, 0, 0], abs=3)


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(name: str) -> None:
    image = Image.fromarray(np.array([[0, 128, 200, 257, 40000, 65535]], dtype=np.uint16))
    assert decode_image(encode(image, name))[:, 0].tolist() == [[0, 0, 1, 1, 156, 255]] * 3


def test_sixteen_bit_colour_png() -> None:
    values = np.array([[[200, 40000, 65535], [0, 30000, 257]]], dtype=">u2")
    rows = zlib.compress(b"\0" + values.tobytes())
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    difference = decode_image(data).permute(1, 2, 0).int() - torch.from_numpy(values.astype(np.int32) // 257)
    assert difference.abs().max() <= 1


def test_numbers_without_a_range_are_refused() -> None:
    for image in (Image.fromarray(np.ones((4, 4), dtype=np.float32)), Image.fromarray(np.ones((4, 4), dtype=np.int32))):
        with pytest.raises(DecodeError) as caught:
            decode_image(encode(image, "TIFF"))
        assert caught.value.cause == "unsupported"


def test_arithmetic_coding_is_read_and_twelve_bits_are_refused() -> None:
    slope = torch.from_numpy(np.add.outer(np.arange(16) * 8, np.arange(16) * 7))
    assert (decode_image(ARITHMETIC).int() - slope).abs().max() <= 3
    data = bytearray(encode(photo(), "JPEG"))
    data[jpeg.read_header(memoryview(data)).height_at - 1] = 12
    with pytest.raises(DecodeError, match="unsupported: JPEG: Unsupported JPEG data precision 12"):
        decode_image(data)


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(name: str, orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = encode(photo(), name, exif=tags, **LOSSLESS.get(name, {}))
    result = decode_image(data)
    assert torch.equal(result, pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    assert result.shape == ((3, 37, 53) if orientation < 5 else (3, 53, 37))
    assert result[None].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_box_is_cut_from_the_upright_image(orientation: int) -> None:
    data = with_segment(encode(photo(80, 60), "JPEG"), 0xE1, exif(orientation))
    whole = decode_image(data)
    cut = open_image(data).pixels(Box(11, 40, 5, 23), skip_rows=True)
    assert torch.equal(cut, whole[:, 11:40, 5:23])
    assert cut.stride()[0] == 1 and cut.stride()[2] == 3  # channels-last


def test_exif_blocks_as_cameras_write_them() -> None:
    for order in "<>":
        for kind in (3, 4):
            assert exif_orientation(exif(6, order, kind)) == 6
            assert exif_orientation(memoryview(exif(6, order, kind))[6:]) == 6


@pytest.mark.parametrize("block", [
    b"", b"Exif\0\0", b"Exif\0\0garbage", exif(0), exif(9), exif(6)[:-9], exif(6)[:16],
    b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0II*\0" + struct.pack("<IH", 8, 65535) + bytes(30),
])
def test_bad_exif_is_no_obstacle(block: bytes) -> None:
    plain = encode(photo(), "JPEG")
    assert torch.equal(decode_image(with_segment(plain, 0xE1, block)), decode_image(plain))
    for name in ("PNG", "WEBP"):
        image = encode(photo(), name, exif=block, **LOSSLESS[name])
        assert torch.equal(decode_image(image), pixels(photo()))


def test_invalid_xmp_is_no_obstacle() -> None:
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta \xff\xfe\x80 tiff:Orientation=\"6\""
    plain = encode(photo(), "JPEG")
    turned = with_segment(with_segment(plain, 0xE1, exif(3)), 0xE1, xmp)
    assert torch.equal(decode_image(turned), decode_image(plain).flip(1, 2))
    cmyk = encode(photo().convert("CMYK"), "JPEG")
    assert decode_image(with_segment(cmyk, 0xE1, xmp)).shape == (3, 37, 53)


def test_odd_metadata_fills_no_log() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(10, 30):
            decode_image(encode(photo(), "PNG", exif=exif(6)[:size]))
            reduced = open_image(with_segment(encode(photo(), "JPEG"), 0xE1, exif(6)[:size]))
            reduced.scaled(Box(0, reduced.height, 0, reduced.width), 8, 2)
            decode_image(encode(photo(), "TIFF", tiffinfo={0x010E: "x" * size})[:-1] + b"?")
        large = Image.new("1", (9500, 9500))  # Pillow warns from 89 million pixels on
        assert decode_image(encode(large, "PNG")).shape == (3, 9500, 9500)
    assert not caught


# Unusable data


def cause_of(data: bytes) -> str:
    with pytest.raises(DecodeError) as caught:
        decode_image(data)
    return caught.value.cause


@pytest.mark.parametrize("name, options", [
    ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {}),
    ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}),
])
def test_a_file_cut_short_is_refused(name: str, options: dict) -> None:
    data = encode(photo(120, 160), name, **options)
    for part in (0.2, 0.5, 0.9, 0.99):
        assert cause_of(data[: int(len(data) * part)]) in ("truncated", "corrupt")
    for end in range(12, 60, 7):
        assert cause_of(data[:end]) in ("truncated", "corrupt")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_a_cut_jpeg_is_called_truncated_wherever_it_is_cut(options: dict) -> None:
    data = encode(photo(40, 40), "JPEG", **options)
    for end in range(3, len(data), 5):
        assert cause_of(data[:end]) == "truncated"
    assert cause_of(data[:-1]) == "truncated"


def test_a_cut_cmyk_jpeg_and_a_cut_large_one_are_refused() -> None:
    assert cause_of(encode(photo().convert("CMYK"), "JPEG")[:-200]) == "truncated"
    data = encode(photo(400, 400), "JPEG")
    assert cause_of(data[: len(data) // 2] + b"\xff\xd9") == "damaged image"  # with a false end
    assert not open_image(data[: len(data) // 2]).reductions()


def test_a_png_cut_within_a_chunk_is_called_truncated() -> None:
    data = encode(photo(), "PNG")
    start = data.index(b"IDAT")
    for end in (start - 2, start, start + 2, start + 4, len(data) - 13, len(data) - 9, len(data) - 5, len(data) - 1):
        assert cause_of(data[:end]) == "truncated"


def test_bytes_after_the_end_are_ignored() -> None:
    for data in (encode(photo(), "JPEG"), encode(photo(), "PNG"), encode(photo(), "WEBP"), encode(photo(), "BMP")):
        assert torch.equal(decode_image(data + b"\0 trailing \xff\xd8 garbage" * 9), decode_image(data))


def test_what_is_no_image() -> None:
    for data in (b"", b"\0", b"<html>not found</html>", bytes(1000), b"RIFF\0\0\0\0WAVEfmt "):
        assert cause_of(data) == "not an image"
    for data in (b"\0\0\0\x20ftypavif" + bytes(50), b"8BPS" + bytes(50)):
        assert cause_of(data) == "unsupported"
    for data in (b"\xff\xd8\xff\xd9", b"BM" + bytes(60), b"GIF89a" + bytes(20), b"II*\0" + bytes(40)):
        assert cause_of(data) in ("corrupt", "truncated")


def test_damage_raises_nothing_else() -> None:
    """Flipped bytes: the result is an image or a DecodeError, whatever the decoders raise."""
    rng = random.Random(0)
    formats: list[tuple[str, dict]] = [("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), *LOSSLESS.items()]
    for name, options in formats:
        data = encode(photo(24, 24), name, **options)
        for _ in range(80):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(min(len(damaged), rng.choice([40, 400, 4000])))] = rng.randrange(256)
            try:
                result = decode_image(damaged)
            except DecodeError:
                continue
            assert result.dtype == torch.uint8 and result.shape[0] == 3


def test_bombs_are_refused_by_their_headers() -> None:
    data = bytearray(encode(photo(), "JPEG"))
    at = jpeg.read_header(memoryview(data)).height_at
    struct.pack_into(">HH", data, at, 65500, 65500)
    assert cause_of(data) == "too large"
    png = bytearray(encode(photo(), "PNG"))
    struct.pack_into(">II", png, 16, 20000, 20000)
    struct.pack_into(">I", png, 29, zlib.crc32(png[12:29]))
    assert cause_of(png) == "too large"
    bmp = bytearray(encode(photo(), "BMP"))
    struct.pack_into("<II", bmp, 18, 20000, 20000)
    assert cause_of(bmp) == "too large"
    gif = bytearray(encode(photo(), "GIF"))
    struct.pack_into("<HH", gif, 6, 65535, 65535)
    assert cause_of(gif) == "too large"
    assert 2 * 89_478_485 == MAX_PIXELS  # where Pillow draws the line too


def test_a_jpeg_without_a_size_is_refused() -> None:
    data = bytearray(encode(photo(), "JPEG"))
    struct.pack_into(">H", data, jpeg.read_header(memoryview(data)).height_at, 0)
    assert cause_of(data) == "unsupported"


def test_the_error_survives_the_way_out_of_a_worker() -> None:
    error = pickle.loads(pickle.dumps(DecodeError("truncated", "JPEG of 12 bytes")))
    assert (error.cause, error.detail, str(error)) == ("truncated", "JPEG of 12 bytes", "truncated: JPEG of 12 bytes")
    assert isinstance(error, ValueError) and str(DecodeError("as one text")) == "as one text"


# Decoding no more than the top rows


def repacked(data: bytes, sampling: int, height: int, width: int) -> bytes:
    """The same coded blocks under another chroma sampling and size: Pillow cannot write all of them."""
    changed = bytearray(data)
    at = jpeg.read_header(memoryview(data)).height_at
    struct.pack_into(">HH", changed, at, height, width)
    changed[at + 6] = sampling
    return bytes(changed)


def sampled(kind: str, height: int, width: int, quality: int) -> bytes:
    if kind == "gray":
        return encode(photo(height, width).convert("L"), "JPEG", quality=quality)
    if kind == "440":
        return repacked(encode(photo(8 * height, 16 * width), "JPEG", subsampling=1), 0x12, 16 * height, 8 * width)
    if kind == "411":
        return repacked(encode(photo(16 * height, 16 * width), "JPEG", subsampling=2), 0x41, 8 * height, 32 * width)
    return encode(photo(height, width), "JPEG", quality=quality, subsampling=["444", "422", "420"].index(kind))


@pytest.mark.parametrize("kind", ["444", "422", "420", "440", "411", "gray"])
def test_the_top_rows_are_those_of_the_whole_image(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(kind)
    num_shorter = 0
    for _ in range(40):
        longest = 12 if kind in ("440", "411") else 150
        data = memoryview(sampled(kind, rng.randint(1, longest), rng.randint(1, longest), rng.randint(30, 98)))
        header = jpeg.read_header(data)
        whole = jpeg.decode_all(data, header)
        assert whole.shape == (3, header.height, header.width)
        for bottom in {rng.randint(1, header.height) for _ in range(4)} | {min(16, header.height)}:
            top = jpeg.decode_top(data, header, bottom)
            num_shorter += top.shape[1] < header.height
            assert torch.equal(top[:, :bottom], whole[:, :bottom])
    assert num_shorter > 50
    assert capfd.readouterr().err == ""


def missing_within(data: bytes, start: float, stop: float = 1.0, filling: bytes = b"") -> bytearray:
    """A JPEG with both ends whole and a part of its scan gone, or overwritten."""
    first, last = int(len(data) * start), min(int(len(data) * stop), len(data) - 2)
    return bytearray(data[:first] + filling * (last - first) + data[last:])


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 50}])
@pytest.mark.parametrize("damage", [(0.5,), (0.3, 0.6, b"\0")])
def test_missing_data_are_told_and_not_padded_gray(options: dict, damage: tuple, capfd: pytest.CaptureFixture) -> None:
    """Wherever the file would be decoded, whole, in part, or at a fraction of its size."""
    data = encode(photo(300, 300), "JPEG", quality=90, **options)
    damaged = memoryview(missing_within(data, *damage))
    header, everything = jpeg.read_header(damaged), Box(0, 300, 0, 300)
    attempts = [lambda: jpeg.decode_all(damaged, header), lambda: jpeg.decode_top(damaged, header, 250),
                lambda: decode_image(damaged), lambda: check_image(bytes(damaged))]
    if not options:
        attempts.append(lambda: open_image(damaged).scaled(everything, 32, 8))
    for attempt in attempts:
        with pytest.raises(DecodeError, match=r"^damaged image: Corrupt JPEG data: "):
            attempt()
    assert bool(open_image(damaged).reductions()) == (not options)
    check_image(data)
    assert open_image(data).pixels(Box(0, 30, 0, 300), skip_rows=True).shape == (3, 30, 300)
    assert capfd.readouterr().err == ""


def test_rows_above_the_damage_can_be_used() -> None:
    data = encode(photo(300, 300), "JPEG", quality=90)
    damaged = memoryview(missing_within(data, 0.5))
    header = jpeg.read_header(damaged)
    assert torch.equal(jpeg.decode_top(damaged, header, 60)[:, :60], decode_image(data)[:, :60])


def test_harmless_remarks_are_for_checks_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes that nothing needs before the end mark; an odd version number says nothing of the pixels. What others
    write to stderr meanwhile comes out."""
    data = encode(photo(), "JPEG")
    longer = data[:-2] + b"x" * 65 + data[-2:]
    assert torch.equal(decode_image(longer), decode_image(data))
    with pytest.raises(DecodeError, match="63 extraneous bytes"):
        check_image(longer)
    check_image(data.replace(b"JFIF\0\1\1", b"JFIF\0\2\0"))
    assert capfd.readouterr().err == ""
    with remarks() as said:
        os.write(2, b"a thread's line\nCorrupt JPEG data: bad Huffman code\n")
    assert said == b"Corrupt JPEG data: bad Huffman code\n" and capfd.readouterr().err == "a thread's line\n"


def test_blocks_of_remarks_may_be_nested(capfd: pytest.CaptureFixture) -> None:
    said = []
    with remarks() as outer:
        for number in range(2):
            os.write(2, b"Corrupt JPEG data: outside\n")
            with remarks() as inner:
                os.write(2, b"Corrupt JPEG data: %d\nother %d\n" % (number, number))
            said.append(bytes(inner))
        assert capfd.readouterr().err == "other 0\nother 1\n"
    assert said == [b"Corrupt JPEG data: 0\n", b"Corrupt JPEG data: 1\n"]
    assert outer == b"Corrupt JPEG data: outside\n" * 2
    os.write(2, b"back\n")
    assert capfd.readouterr().err == "back\n"


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}])
def test_where_leaving_rows_out_would_hide_something_all_are_decoded(options: dict) -> None:
    data = encode(photo(200, 100), "JPEG", **options)
    assert jpeg.decode_top(memoryview(data), jpeg.read_header(memoryview(data)), 30).shape == (3, 200, 100)
    plain = encode(photo(200, 100), "JPEG")
    assert jpeg.decode_top(memoryview(plain), jpeg.read_header(memoryview(plain)), 30).shape[1] < 50
    longer = memoryview(plain + b"tail")  # a cut file might end like this too
    assert jpeg.decode_top(longer, jpeg.read_header(longer), 30).shape == (3, 200, 100)


def test_the_header_tells_files_with_several_scans() -> None:
    data = bytearray(encode(photo(), "JPEG"))
    assert jpeg.read_header(memoryview(data)).is_baseline
    data[data.index(b"\xff\xda") + 4] = 1  # the first scan holds one of three components
    assert not jpeg.read_header(memoryview(data)).is_baseline


def test_without_torchvisions_decoder_pillow_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photo(), "JPEG")
    expected = decode_image(data)
    monkeypatch.setattr(jpeg, "_native_decoder", lambda: None)
    assert torch.equal(decode_image(data), expected)
    assert torch.equal(open_image(data).pixels(Box(0, 9, 0, 9), skip_rows=True), expected[:, :9, :9])
    assert cause_of(data[: len(data) // 2]) == "truncated"
