"""Samples with fields of their own: every mode, ranks and workers, the README's example, and what is refused."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.distributed import World
from common.errors import UserError
from common.sample_loader import SampleLoader, decode_image, load_json, load_numpy, load_torch
from common.sampling import EpochOrder, Progress
from tests.helpers import ROOT, add, end, start

CAMERAS = ("front", "rear", "left", "right")
FIELDS = {**{f"{camera}.png": decode_image for camera in CAMERAS}, "speed.json": load_json,
          "waypoints.npy": load_numpy, "command.pth": load_torch}
SIZES = (4, 1, 4)


class Alone(World):
    """One of several ranks, tested by itself."""

    def on_main(self, function: Any) -> Any:
        return function()

    def agree(self, error: UserError | None) -> None:
        if error:
            raise error


def world(rank: int = 0, size: int = 1) -> World:
    return Alone(rank, size, rank, torch.device("cpu"))


def saved(save: Any, *values: Any, **named: Any) -> bytes:
    buffer = io.BytesIO()
    save(*[buffer if value is ... else value for value in values], **named)
    return buffer.getvalue()


def members(number: int) -> dict[str, bytes]:
    """A sample whose every field tells its number."""
    images = {f"{camera}.png": saved(Image.new("RGB", (8, 6), (number, place, 0)).save, ..., "PNG")
              for place, camera in enumerate(CAMERAS)}
    return {**images, "speed.json": json.dumps({"speed": number / 2, "road": f"r{number}"}).encode(),
            "waypoints.npy": saved(np.save, ..., np.full((3, 2), number, np.float32)),
            "command.pth": saved(torch.save, {"turn": torch.tensor([number, 1])}, ...)}


def write_drives(folder: Path, sizes: tuple[int, ...] = SIZES, **odd: bytes) -> Path:
    """Shards of samples without any label. `odd` replaces fields of sample 2, with _ for the dot."""
    folder.mkdir(parents=True)
    numbers = iter(range(sum(sizes)))
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"drive-{shard:04d}.tar", "w") as tar:
            for number in (next(numbers) for _ in range(size)):
                changed = {name.replace("_", "."): data for name, data in odd.items()} if number == 2 else {}
                for name, data in (members(number) | changed).items():
                    add(tar, f"{number:06d}.{name}", data)
    return folder


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drives(tmp_path_factory.mktemp("data") / "drives")


def check(batch: dict[str, Any]) -> list[int]:
    """Every field of a batch is that of its samples. Returns their numbers."""
    numbers = [int(key) for key in batch["__key__"]]
    size = len(numbers)
    for place, camera in enumerate(CAMERAS):
        image = batch[f"{camera}.png"]
        assert image.shape == (size, 3, 6, 8) and image.dtype == torch.uint8
        assert [pixel.tolist() for pixel in image[:, :, 0, 0]] == [[number, place, 0] for number in numbers]
    assert batch["speed.json"]["speed"].tolist() == [number / 2 for number in numbers]
    assert batch["speed.json"]["road"] == [f"r{number}" for number in numbers]
    assert batch["waypoints.npy"].dtype == torch.float32 and batch["waypoints.npy"].shape == (size, 3, 2)
    assert batch["waypoints.npy"][:, 2, 1].tolist() == numbers
    assert batch["command.pth"]["turn"].tolist() == [[number, 1] for number in numbers]
    assert len(batch["__shard__"]) == len(batch["__count__"]) == size
    return numbers


def test_exact_gives_the_planned_order_to_any_ranks_and_workers(drives: Path) -> None:
    """2 and 3 ranks, 0 and 2 workers, two epochs of 9 samples in global batches of 6; the last rank may get none."""
    orders = [[int(np.cumsum((0, *SIZES))[shard]) + place for shard, place in
               EpochOrder(SIZES, 5000, 3, epoch).locate(0, 9).tolist()] for epoch in range(2)]
    for ranks, workers in ((1, 2), (3, 0), (3, 2), (6, 0)):
        found: dict[tuple[int, int], list[int]] = {}
        for rank in range(ranks):
            loader = SampleLoader(world(rank, ranks), [str(drives)], FIELDS, batch_size=6 // ranks, num_workers=workers,
                                  num_epochs=2, seed=3)
            assert loader.plan.steps_per_epoch == 2
            for batch in loader:
                step = batch["__step__"]
                found.setdefault((step.epoch, step.step), []).extend(check(batch))
        assert found == {(epoch, step): orders[epoch][6 * step : 6 * step + 6]
                         for epoch in range(2) for step in range(2)}


def test_no_info_is_left_for_training_to_trip_over(drives: Path) -> None:
    assert SampleLoader(world(), [str(drives)], FIELDS).index.num_samples == 9
    assert not (drives / "info.json").exists()


@pytest.mark.parametrize("sampling", ["split", "resampled"])
def test_streams_take_equal_steps(drives: Path, sampling: str) -> None:
    for workers in (0, 1):
        for rank in range(2):
            batches = list(SampleLoader(world(rank, 2), [str(drives)], FIELDS, batch_size=2, num_workers=workers,
                                        sampling=sampling, num_epochs=2))
            assert [len(check(batch)) for batch in batches] == [2] * 4


def test_goes_on_where_it_stopped(drives: Path) -> None:
    """From the step after any batch, the rest comes as it would have."""
    asked: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "num_epochs": 2}
    whole = list(SampleLoader(world(), [str(drives)], FIELDS, **asked))
    step = whole[2]["__step__"]
    progress = Progress(step.epoch, step.step + 1, step.global_step + 1, step.stop)
    rest = list(SampleLoader(world(), [str(drives)], FIELDS, progress=progress, **asked))
    assert [batch["__key__"] for batch in rest] == [batch["__key__"] for batch in whole[3:]]


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def test_what_would_have_to_be_run_is_refused_with_shard_and_key(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    objects = np.array([Evil(mark)], dtype=object)
    cases = {
        "command_pth": (saved(torch.save, Evil(mark), ...), "command.pth cannot be read"),
        "waypoints_npy": (saved(np.save, ..., objects, allow_pickle=True), "waypoints.npy cannot be read"),
        "speed_json": (b"{", "speed.json cannot be read"),
        "front_png": (b"\x89PNG\r\n\x1a\n", "front.png cannot be read"),
    }
    for number, (name, (data, words)) in enumerate(cases.items()):
        folder = write_drives(tmp_path / str(number), (5,), **{name: data})
        for workers in (0, 1) if number == 0 else (0,):
            for sampling in ("exact", "split"):
                loader = SampleLoader(world(), [str(folder)], FIELDS, 5, workers, sampling)
                with pytest.raises(UserError, match=rf"{words}.*shard drive-0000, key 000002, count 2;"):
                    list(loader)
    assert not mark.exists()


def test_a_missing_field_and_values_that_differ_are_told(tmp_path: Path) -> None:
    folder = write_drives(tmp_path / "a", (5,), waypoints_npy=saved(np.save, ..., np.zeros((4, 2), np.float32)))
    with pytest.raises(UserError, match=r"the values of waypoints.npy make no batch .*shard drive-0000"):
        list(SampleLoader(world(), [str(folder)], FIELDS, batch_size=5, num_workers=0))
    with pytest.raises(UserError, match=r"no such field: lidar.bin, found the fields command.pth, front.png"):
        list(SampleLoader(world(), [str(folder)], {"lidar.bin": bytes}, batch_size=5, num_workers=0))


@pytest.mark.slow
def test_the_readmes_example_runs_on_two_ranks(tmp_path: Path, drives: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = next(block for block in blocks if "SampleLoader" in block)
    assert len(code.strip().splitlines()) <= 16
    (tmp_path / "drive.py").write_text(code)
    (tmp_path / "drives").symlink_to(drives)
    line = ["torchrun", "--standalone", "--nproc_per_node=2", "drive.py"]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    result = end(start(line, cwd=tmp_path, **environment), 120).check()
    lines = result.out.splitlines()
    keys = [re.findall(r"'(\d{6})'", "".join(line for line in lines if line.startswith(f"{rank} "))) for rank in (0, 1)]
    assert [len(keys[rank]) for rank in range(2)] == [5, 4]  # global batches of 8 and of 1
    assert sorted(keys[0] + keys[1]) == [f"{number:06d}" for number in range(9)]
    assert "(4, 3, 6, 8)" in result.out and "(0, 3, 6, 8)" in result.out and "torch.float32" in result.out
