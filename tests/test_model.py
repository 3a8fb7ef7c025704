"""Models by name, their weights from everywhere, and the step from pixels to floats."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision import models

from common.errors import UserError
from common.model import MEAN, STD, Normalized, build_model, normalize

SMALL = "squeezenet1_1"  # the smallest of torchvision


def build(arch: str = "tiny", num_classes: int = 6, weights: str | Path = "none", seed: int = 0, **options: int):
    return build_model(arch, num_classes, str(weights), seed, **options)


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in left)


def save(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where the cores are busy, threads that wait for each other at every operator take twenty times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- models by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 9, 33, 96])
def test_tiny_takes_any_size(size: int) -> None:
    module, notes = build("tiny", 6)
    assert module(torch.zeros(2, 3, size, size)).shape == (2, 6)
    assert notes == [] and module.training
    assert sum(parameter.numel() for parameter in module.parameters()) < 100_000
    assert not any("dropout" in type(part).__name__.lower() for part in module.modules())


def test_tiny_learns_shapes_in_seconds() -> None:
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")

    def shapes(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        label = torch.arange(num_samples) % 3
        centre = torch.randint(10, 22, (num_samples, 2, 1, 1), generator=generator)
        dy, dx = (y - centre[:, 0]).abs(), (x - centre[:, 1]).abs()
        square = dy**2 + dx**2
        masks = torch.stack([square < 64, (square < 100) & (square > 36), (dy < 3) | (dx < 3)])  # disc, ring, cross
        mask = masks[label, torch.arange(num_samples)][:, None]
        colours = torch.randint(0, 256, (2, num_samples, 3, 1, 1), generator=generator)
        return torch.where(mask, colours[0], colours[1]).to(torch.uint8), label

    image, label = shapes(1500)
    module = Normalized(build("tiny", 3)[0])
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(4):
        for rows in torch.randperm(len(label), generator=generator).split(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(image[rows]), label[rows]).backward()
            optimizer.step()
    image, label = shapes(300)
    assert (module(image).argmax(dim=1) == label).float().mean() > 0.85


@pytest.mark.parametrize("arch", ["tiny", SMALL])
def test_the_seed_fixes_the_weights_and_the_global_generator_stays(arch: str) -> None:
    before = torch.get_rng_state()
    first = build(arch, seed=2**64 - 1, image_size=32)[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, build(arch, seed=2**64 - 1)[0])
    assert not same(first, build(arch, seed=1)[0])


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_auxiliary_heads_are_off(arch: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, _ = build(arch, 4, image_size=80)
    assert module.training
    assert module(torch.zeros(2, 3, 80, 80)).shape == (2, 4)
    assert not any("aux" in name.lower() for name, _ in module.named_parameters())


def test_vision_transformers_are_built_for_the_size() -> None:
    assert build("vit_b_32", 3, image_size=64)[0](torch.zeros(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize("arch, size", [("alexnet", 16), ("vit_b_16", 33), ("maxvit_t", 100), ("inception_v3", 32)])
def test_a_size_that_does_not_fit_is_refused(arch: str, size: int) -> None:
    with pytest.raises(UserError, match=f"--image_size {size}") as caught:
        build(arch, image_size=size)
    assert "\n" not in str(caught.value)


NAMES = [("resnet19", "resnet18"), ("ResNet50", "resnet50"), ("tinny", "tiny"), ("?", "tiny")]


@pytest.mark.parametrize("arch, close", NAMES)
def test_an_unknown_name_gets_close_ones(arch: str, close: str) -> None:
    with pytest.raises(UserError, match=rf"--arch .*{close}"):
        build(arch)


# --- weights from files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_a_file_of_weights_is_loaded_whole(tmp_path: Path, wrap: str, key: str | None) -> None:
    source = build(seed=1)[0]
    state = {wrap + name: value for name, value in source.state_dict().items()}
    file = save(state if key is None else {key: state, "epoch": 3, "best": 71.5}, tmp_path / "weights.pt")
    module, notes = build(weights=file, seed=2)
    assert same(module, source) and notes == []


@pytest.mark.parametrize("arch", ["tiny", SMALL, "mnasnet0_5"])
def test_a_head_for_other_classes_starts_anew(tmp_path: Path, arch: str) -> None:
    source = build(arch, 10, seed=1)[0]
    file = save(source.state_dict(), tmp_path / "weights.pt")
    module, notes = build(arch, 6, file, seed=2)
    assert len(notes) == 1 and "10 classes" in notes[0] and "6 here" in notes[0]
    fresh, state = build(arch, 6, seed=2)[0].state_dict(), module.state_dict()
    head = list(state)[-1].rpartition(".")[0]
    for name, value in state.items():
        assert torch.equal(value, fresh[name] if name.startswith(f"{head}.") else source.state_dict()[name]), name


def test_layers_keep_their_versions_behind_a_prefix(tmp_path: Path) -> None:
    source = build("mnasnet0_5", seed=1)[0]  # it refuses a state_dict whose version it cannot see
    file = save(nn.DataParallel(source).state_dict(), tmp_path / "weights.pt")
    assert same(build("mnasnet0_5", weights=file)[0], source)


def test_old_names_of_densenet_and_no_batch_counts(tmp_path: Path) -> None:
    source = build("densenet121", seed=1)[0]
    state = OrderedDict()
    for name, value in source.state_dict().items():
        if "num_batches_tracked" not in name:
            state[re.sub(r"(denselayer\d+)\.(norm|conv)(\d)", r"\1.\2.\3", name)] = value
    assert "features.denseblock1.denselayer1.norm.1.weight" in state
    assert same(build("densenet121", weights=save(state, tmp_path / "weights.pt"))[0], source)


def test_auxiliary_heads_in_a_file_are_left_out(tmp_path: Path) -> None:
    source = models.googlenet(num_classes=6, init_weights=False, aux_logits=True)
    module, notes = build("googlenet", 6, save(source.state_dict(), tmp_path / "weights.pt"))
    assert len(notes) == 1 and "auxiliary" in notes[0]
    assert torch.equal(module.fc.weight, source.fc.weight)


@pytest.mark.parametrize("key, value, words", [
    ("features.0.0.weight", None, "features.0.0.weight is missing"),
    ("head.bias", None, "head.bias is missing"),
    ("extra", torch.zeros(1), "extra is unknown"),
    ("features.0.0.weight", torch.zeros(2, 2), r"features.0.0.weight is \(2, 2\) and not \(16, 3, 3, 3\)"),
    ("head.weight", torch.zeros(6, 5), r"head.weight is \(6, 5\) and not \(6, 64\)"),
])
def test_what_does_not_fit_is_named(tmp_path: Path, key: str, value: torch.Tensor | None, words: str) -> None:
    state = {name: kept for name, kept in build()[0].state_dict().items() if name != key}
    if value is not None:
        state[key] = value
    with pytest.raises(UserError, match=words):
        build(weights=save(state, tmp_path / "weights.pt"))


def test_another_architecture_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"and \d+ more; .*weights.pt; .*--arch") as caught:
        build("tiny", weights=save(build(SMALL)[0].state_dict(), tmp_path / "weights.pt"))
    assert len(str(caught.value)) < 600


class Canary:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for held in (Canary(str(canary)), {"model": build()[0].state_dict(), "extra": Canary(str(canary))}):
        with pytest.raises(UserError, match="run code"):
            build(weights=save(held, tmp_path / "weights.pt"))
        assert not canary.exists()


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    whole = save(build()[0].state_dict(), tmp_path / "whole.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("resnet18, 69.7 %\n")
    save({}, tmp_path / "nothing.pt")
    save({"model": {"epoch": 3}}, tmp_path / "numbers.pt")
    save([torch.zeros(2)], tmp_path / "list.pt")
    save({1: torch.zeros(2)}, tmp_path / "keys.pt")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(flipped)
    for name, words in (
            ("torn.pt", "damaged .it is cut short"), ("empty.pt", "damaged .it is empty"),
            ("flipped.pt", "damaged .the checksum of .* is wrong"), ("text.pt", "damaged .it is no file of torch.save"),
            ("absent.pt", "no such file"), (".", "a folder"), ("keys.pt", "do not fit"),
            *((name, "no state_dict") for name in ("nothing.pt", "numbers.pt", "list.pt"))):
        with pytest.raises(UserError, match=f"{words}.*; .*{tmp_path}") as caught:
            build(weights=tmp_path / name)
        assert "\n" not in str(caught.value), name
    old = tmp_path / "old.pt"  # has no checksums
    torch.save(build()[0].state_dict(), old, _use_new_zipfile_serialization=False)
    assert same(build(weights=old, seed=2)[0], build()[0])


# --- torchvision's own weights ----------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of torch.hub, and where its weights for SMALL belong; they are 'published' in tmp_path."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    source = save(build(SMALL, 1000, seed=5)[0].state_dict(), tmp_path / "published.pt")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    published = tmp_path / f"{SMALL}-{digest}.pth"
    source.rename(published)
    entry = SimpleNamespace(DEFAULT=SimpleNamespace(url=published.as_uri()))
    monkeypatch.setattr(models, "get_model_weights", lambda arch: entry)
    return tmp_path / "home" / "hub" / "checkpoints" / published.name


def test_default_weights_are_downloaded_once(hub: Path, tmp_path: Path) -> None:
    module, notes = build(SMALL, 1000, "DEFAULT")
    assert same(module, build(SMALL, 1000, seed=5)[0]) and notes == []
    (tmp_path / hub.name).unlink()
    again, notes = build(SMALL, 6, "default")
    assert torch.equal(again.features[0].weight, module.features[0].weight) and "1000 classes" in notes[0]
    assert [file.name for file in hub.parent.iterdir()] == [hub.name]


def test_default_weights_offline_say_what_to_fetch_and_where_to_put_it(hub: Path, tmp_path: Path) -> None:
    published = tmp_path / hub.name
    published.rename(tmp_path / "elsewhere.pth")
    with pytest.raises(UserError) as caught:
        build(SMALL, 6, "DEFAULT")
    for words in (published.as_uri(), str(hub), "--weights none"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value) and list(hub.parent.iterdir()) == []
    shutil.copy(tmp_path / "elsewhere.pth", hub)  # the way out that it names
    build(SMALL, 6, "DEFAULT")


def test_a_damaged_download_is_not_kept(hub: Path, tmp_path: Path) -> None:
    with open(tmp_path / hub.name, "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="damaged"):
        build(SMALL, 6, "DEFAULT")
    assert list(hub.parent.iterdir()) == []


def test_tiny_has_no_default_weights() -> None:
    with pytest.raises(UserError, match="--weights none"):
        build("tiny", weights="DEFAULT")


def test_every_classifier_names_a_digest_to_check() -> None:
    for arch in models.list_models(module=models):
        assert models.get_model_weights(arch).DEFAULT.url.rpartition("-")[2].partition(".")[0].isalnum()


# --- pixels to floats -------------------------------------------------------------------------------------------------


def pixels(num_rows: int, height: int = 20, width: int = 30, memory_format=torch.channels_last) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    image = torch.randint(0, 256, (num_rows, 3, height, width), dtype=torch.uint8, generator=generator)
    return image.to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_normalize_gives_the_right_values(memory_format) -> None:
    image = pixels(4, memory_format=memory_format)
    mean, std = (torch.tensor(row, dtype=torch.float64).view(3, 1, 1) for row in (MEAN, STD))
    result = normalize(image)
    assert result.dtype == torch.float32 and result.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(result.double(), (image.double() / 255 - mean) / std, atol=1e-6, rtol=0)
    assert image.equal(pixels(4))  # the loader's buffer is left as it was


def test_normalize_changes_the_layout_when_asked() -> None:
    result = normalize(pixels(4), memory_format=torch.contiguous_format)
    assert result.is_contiguous() and torch.equal(result, normalize(pixels(4)))


def test_normalize_does_not_depend_on_the_rest_of_the_batch() -> None:
    image = pixels(7, 13, 17)
    together = normalize(image)
    assert all(torch.equal(together[i], normalize(image[i : i + 1])[0]) for i in range(7))
    assert normalize(image[:0]).shape == (0, 3, 13, 17)


def test_normalize_first_called_in_inference_mode_still_serves_training() -> None:
    with torch.inference_mode():
        normalize(pixels(2, 5, 41))
    weight = torch.ones(1, 3, 1, 1, requires_grad=True)
    (normalize(pixels(2, 5, 41)) * weight).sum().backward()
    assert weight.grad is not None


def test_normalized_is_the_model_behind_the_pixels() -> None:
    module = build()[0]
    assert torch.equal(Normalized(module)(pixels(3)), module(normalize(pixels(3))))
