"""The pixels are those of torchvision's transforms of the same crop, whatever the process, the layout or the format."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import struct
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional

from common import transforms
from common.images.decode import decode_image, open_image
from common.images.picture import Box
from common.sampling import AUGMENT, hashed
from common.transforms import ImageTransform, random_crop


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth blobs with some noise, different in every corner."""
    state = np.random.RandomState(seed)
    coarse = state.randint(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray((smooth + state.randn(height, width, 1) * 3).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, name: str = "JPEG", orientation: int = 1, **options: object) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, name, exif=tags, **options)
    return file.getvalue()


def slot(size: int) -> Tensor:
    """A place in a batch: uint8 (3, size, size), channels-last, filled with rubbish."""
    batch = torch.full((2, size, size, 3), 77, dtype=torch.uint8).permute(0, 3, 1, 2)
    return batch[1]


def apply(transform: ImageTransform, data: bytes, key: int = 0) -> Tensor:
    out = slot(transform.size)
    assert transform(data, key, out) is None
    return out


def difference(one: Tensor, other: Tensor) -> int:
    assert one.shape == other.shape
    return int((one.int() - other.int()).abs().max())


def psnr(one: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.float() - other.float()).square().mean().clamp(min=1e-6)))


def reference_crop(image: Tensor, size: int, key: int) -> Tensor:
    """torchvision's resize of the crop and the flip that the key stands for."""
    rng = random.Random(key)
    top, bottom, left, right = map(int, random_crop(image.shape[1], image.shape[2], rng))
    mirror = rng.random() < 0.5
    cut = functional.resized_crop(image, top, left, bottom - top, right - left, [size, size], antialias=True)
    return functional.horizontal_flip(cut) if mirror else cut


def reference_center(image: Tensor, size: int) -> Tensor:
    return v2.Compose([v2.Resize(int(size * 256 / 224), antialias=True), v2.CenterCrop(size)])(image)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a loader worker; many threads on a busy machine only wait for one another."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# Pixels


@pytest.mark.parametrize("skip_rows", [False, True])
@pytest.mark.parametrize("height, width, size", [
    (375, 500, 224), (500, 375, 224), (64, 64, 64), (30, 40, 96), (333, 77, 50),
])
def test_crops_equal_torchvisions(height: int, width: int, size: int, skip_rows: bool) -> None:
    data = encode(photo(height, width), quality=90)
    image = decode_image(data)
    for key in range(12):
        result = apply(ImageTransform(size, "crop", skip_rows), data, key)
        assert difference(result, reference_crop(image, size, key)) <= 1


@pytest.mark.parametrize("size", [7, 64, 224])
@pytest.mark.parametrize("height, width", [
    (375, 500), (500, 375), (256, 256), (60, 90), (1, 1), (1, 2), (5, 3), (255, 257), (17, 900), (640, 427), (1000, 3),
])
def test_the_center_equals_torchvisions(height: int, width: int, size: int) -> None:
    data = encode(photo(height, width), "PNG")
    assert difference(apply(ImageTransform(size, "center"), data), reference_center(decode_image(data), size)) <= 1


@pytest.mark.parametrize("height, width", [(3, 1000), (2, 9001), (7001, 5), (11, 6007), (1, 3000)])
def test_the_center_of_a_strip_equals_torchvisions_without_its_memory(height: int, width: int) -> None:
    data = encode(photo(height, width), "PNG")
    assert difference(apply(ImageTransform(32, "center"), data), reference_center(decode_image(data), 32)) <= 1


def test_the_center_of_a_very_long_strip_takes_little_memory() -> None:
    data = encode(Image.new("L", (60_000, 1), 50), "PNG")  # scaled in full it would be 256 x 15 million pixels
    span = transforms._middle(60_000, 256 * 60_000, 224)
    assert span.skip + 224 < 2000 and span.last - span.first < 20
    assert apply(ImageTransform(224, "center"), data).unique().tolist() == [50]


@pytest.mark.parametrize("augment", ["crop", "center"])
@pytest.mark.parametrize("height, width", [(1, 1), (1, 7), (3, 1000), (1000, 3), (2, 2), (15, 400)])
def test_images_smaller_than_the_size_work(height: int, width: int, augment: str) -> None:
    for name in ("PNG", "JPEG"):
        data = encode(photo(height, width), name)
        for key in range(5):
            result = apply(ImageTransform(48, augment, skip_rows=True), data, key)
            expected = decode_image(data)
            expected = reference_crop(expected, 48, key) if augment == "crop" else reference_center(expected, 48)
            assert difference(result, expected) <= 1


@pytest.mark.parametrize("augment", ["crop", "center"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_in_training_and_validation(orientation: int, augment: str) -> None:
    data = encode(photo(90, 130), "JPEG", orientation)
    upright = decode_image(data)
    assert upright.shape[1:] == ((90, 130) if orientation < 5 else (130, 90))
    for key in range(4):
        result = apply(ImageTransform(40, augment, skip_rows=True), data, key)
        expected = reference_crop(upright, 40, key) if augment == "crop" else reference_center(upright, 40)
        assert difference(result, expected) <= 1


def test_any_format_and_layout_of_the_slot_will_do() -> None:
    image = photo(80, 100)
    for name in ("PNG", "BMP", "JPEG"):
        file = io.BytesIO()
        image.save(file, name)
        for augment in ("crop", "center"):
            transform = ImageTransform(32, augment)
            plain = torch.zeros((3, 32, 32), dtype=torch.uint8)
            transform(file.getvalue(), 5, plain)
            strided = torch.zeros((3, 32, 64), dtype=torch.uint8)[:, :, ::2]
            transform(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), 5, strided)
            assert torch.equal(plain, apply(transform, file.getvalue(), 5)) and torch.equal(strided, plain)


def test_only_the_slot_is_written() -> None:
    batch = torch.full((3, 32, 32, 3), 77, dtype=torch.uint8).permute(0, 3, 1, 2)
    for augment in ("crop", "center"):
        ImageTransform(32, augment)(encode(photo(40, 50)), 0, batch[1])
        assert batch[0].unique().tolist() == batch[2].unique().tolist() == [77]


# Large JPEGs


@pytest.mark.parametrize("orientation", range(1, 9))
def test_large_jpegs_are_decoded_at_a_reduced_size(orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photo(600, 800), "JPEG", orientation, quality=88)
    factors: Counter[int] = Counter()
    choose = transforms._reduction
    for augment in ("crop", "center"):
        for key in range(6):
            monkeypatch.setattr(transforms, "_reduction", lambda *a: factors.update([choose(*a)]) or choose(*a))
            fast = apply(ImageTransform(48, augment), data, key)
            monkeypatch.setattr(transforms, "_reduction", lambda *a: 1)
            assert psnr(fast, apply(ImageTransform(48, augment), data, key)) > 42
    assert factors[2] + factors[4] >= 6 and factors[4]


def test_a_reduced_crop_stays_in_its_place() -> None:
    """Edges that are not on whole reduced pixels: half a reduced pixel's shift on these waves gives 30 dB."""
    wave = 127 + 100 * np.sin(np.arange(1024) / 16)
    waves = np.repeat((wave[:, None] / 2 + wave[None] / 2)[:, :, None], 3, axis=2).astype(np.uint8)
    data = encode(Image.fromarray(waves), quality=95)
    for edge in range(100, 116, 3):
        box = Box(edge + 1, edge + 401, edge, edge + 400)
        expected = functional.resized_crop(decode_image(data), edge + 1, edge, 400, 400, [80, 80], antialias=True)
        for factor in (2, 4):
            assert psnr(open_image(data).scaled(box, 80, factor), expected) > 44


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"subsampling": 0}])
def test_rows_left_out_do_not_change_a_reduced_crop(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = open_image(encode(photo(700, 500), **options))
    boxes = [Box(top, top + 200, 30, 230) for top in (0, 1, 100.5, 333, 500)]
    results = [picture.scaled(box, 40, factor) for box in boxes for factor in (2, 4)]
    monkeypatch.setattr("common.images.jpeg._shortened", lambda *a: None)
    expected = [picture.scaled(box, 40, factor) for box in boxes for factor in (2, 4)]
    assert all(map(torch.equal, results, expected))


def test_what_is_never_reduced() -> None:
    data, box = encode(photo(600, 600)), Box(0, 600, 0, 600)
    factors = {size: transforms._reduction(open_image(data), box, size) for size in (37, 38, 75, 76, 150, 151)}
    assert factors == {37: 8, 38: 4, 75: 4, 76: 2, 150: 2, 151: 1}
    assert transforms._reduction(open_image(data + b"tail"), box, 32) == 1
    assert transforms._reduction(open_image(encode(photo(600, 600), "PNG")), box, 32) == 1


# Randomness


def test_all_randomness_comes_from_the_key() -> None:
    data = encode(photo(100, 140))
    transform = ImageTransform(32, "crop")
    keys = [hashed(0, epoch, position, AUGMENT) for epoch in range(2) for position in range(32)]
    random.seed(0)
    torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    first = [apply(transform, data, key) for key in keys]
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    random.seed(1)
    torch.manual_seed(1)
    assert all(torch.equal(image, apply(transform, data, key)) for image, key in zip(first, keys, strict=True))
    assert len({image.numpy().tobytes() for image in first}) == len(keys)


def test_validation_does_not_depend_on_the_key() -> None:
    data = encode(photo(100, 140))
    assert torch.equal(apply(ImageTransform(32, "center"), data, 1), apply(ImageTransform(32, "center"), data, 2))


def test_crops_are_drawn_as_torchvision_draws_them() -> None:
    """Inside the image, within the bounds, and alike in the mean: at most 4 standard errors apart."""
    torch.manual_seed(0)
    ours = [random_crop(375, 500, random.Random(key)) for key in range(3000)]
    image = torch.empty(3, 375, 500)
    theirs = [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)]
    boxes = np.array([(b.top, b.left, b.bottom - b.top, b.right - b.left) for b in ours], dtype=float)
    assert (boxes[:, 0] + boxes[:, 2]).max() <= 375 and (boxes[:, 1] + boxes[:, 3]).max() <= 500
    assert boxes[:, :2].min() >= 0
    area, ratio = boxes[:, 2] * boxes[:, 3] / (375 * 500), boxes[:, 3] / boxes[:, 2]
    assert 0.078 < area.min() and area.max() <= 1 and 0.74 < ratio.min() and ratio.max() < 1.35
    reference = np.array(theirs, dtype=float)
    boxes, reference = (np.column_stack([b, np.log(b[:, 3] / b[:, 2])]) for b in (boxes, reference))
    error = np.sqrt((boxes.var(axis=0) + reference.var(axis=0)) / 3000)
    assert (np.abs(boxes.mean(axis=0) - reference.mean(axis=0)) < 4 * error).all()


@pytest.mark.parametrize("height, width", [(1, 1000), (1000, 1), (3, 1000), (1000, 3), (10, 77), (101, 12)])
def test_strips_give_torchvisions_fallback(height: int, width: int) -> None:
    top, left, h, w = RandomResizedCrop.get_params(torch.empty(3, height, width), [0.99, 1.0], [3 / 4, 4 / 3])
    assert random_crop(height, width, _Largest()) == (top, top + h, left, left + w)


class _Largest(random.Random):
    """Always the largest area, so that no try fits a strip."""

    def random(self) -> float:
        return 0.999


def test_half_of_the_images_are_mirrored() -> None:
    slope = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    data = encode(Image.fromarray(slope), "PNG")
    images = [apply(ImageTransform(16), data, hashed(key)) for key in range(400)]
    assert 150 < sum(int(image[0, 0, 0]) > int(image[0, 0, -1]) for image in images) < 250


# Processes, threads, subclasses


class _Images(Dataset):
    """Module level, as spawned workers ask for."""

    def __init__(self, data: list[bytes], transform: ImageTransform):
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return apply(self.transform, self.data[index], index)


@pytest.mark.parametrize("augment", ["crop", "center"])
def test_workers_and_threads_do_not_change_a_pixel(augment: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = [encode(photo(150 + i, 200, seed=i)) for i in range(8)]
    images = _Images(data, ImageTransform(64, augment))
    expected = [images[i] for i in range(8)]
    loaded = list(DataLoader(images, batch_size=None, num_workers=2, timeout=60))
    assert all(map(torch.equal, expected, loaded))
    torch.set_num_threads(3)
    assert all(map(torch.equal, expected, [images[i] for i in range(8)]))
    assert capfd.readouterr().err == ""  # nothing of libjpeg's remarks, in any process


def test_damage_is_told_and_truncation_raised_from_a_worker() -> None:
    good = encode(photo(100, 100))
    cut = _Images([good, good[:-500]], ImageTransform(32))
    with pytest.raises(ValueError, match="truncated: JPEG of"):
        list(DataLoader(cut, batch_size=None, num_workers=1, timeout=60))


class Darker(ImageTransform):
    def after_crop(self, image: Tensor, rng: random.Random) -> Tensor:
        return (image * rng.uniform(0.2, 0.4)).to(torch.uint8)


class Inverted(ImageTransform):
    def after_crop(self, image: Tensor, rng: random.Random) -> Tensor:
        return image.bitwise_not_()


@dataclasses.dataclass(frozen=True)
class Noisy(ImageTransform):
    amount: int = 9

    def after_crop(self, image: Tensor, rng: random.Random) -> Tensor:
        noise = torch.randint(self.amount, image.shape, generator=torch.Generator().manual_seed(rng.getrandbits(63)))
        return (image.int() + noise).clamp(0, 255).to(torch.uint8)


def test_a_subclass_changes_the_finished_image() -> None:
    data = encode(photo(100, 140))
    plain = apply(ImageTransform(32), data, 3)
    assert 0.2 < apply(Darker(32), data, 3).float().mean() / plain.float().mean() < 0.4
    assert torch.equal(apply(Darker(32), data, 3), apply(Darker(32), data, 3))
    assert torch.equal(apply(Inverted(32), data, 3), 255 - plain)
    assert 0 < difference(apply(Noisy(32, amount=9), data, 3), plain) < 9


def test_transforms_can_be_sent_to_workers_and_say_what_they_are() -> None:
    for transform in (ImageTransform(96, "center"), Noisy(32, amount=4)):
        assert pickle.loads(pickle.dumps(transform)) == transform
    assert repr(ImageTransform(96, "center")) == "ImageTransform(size=96, augment='center', skip_rows=True)"


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="augment is 'centre'; 'crop' or 'center'"):
        ImageTransform(224, "centre")
    with pytest.raises(ValueError, match="size is 0"):
        ImageTransform(0)


def test_a_jpeg_without_a_height_is_an_error_and_no_crash() -> None:
    data = bytearray(encode(photo(100, 100)))
    struct.pack_into(">H", data, data.index(b"\xff\xc0") + 5, 0)
    for augment in ("crop", "center"):
        with pytest.raises(ValueError, match="unsupported"):
            apply(ImageTransform(32, augment), bytes(data))


def test_a_header_that_lies_about_the_size_is_an_error_and_no_crash() -> None:
    data = bytearray(encode(photo(100, 100)))
    at = data.index(b"\xff\xc0") + 5
    struct.pack_into(">HH", data, at, 10_000, 10_000)
    with pytest.raises(ValueError, match="truncated|corrupt"):
        apply(ImageTransform(32), bytes(data[:-2]))
