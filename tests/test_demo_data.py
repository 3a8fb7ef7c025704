"""The demo images: the same for the same seed, whole or absent, and not to be told apart by their colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.demo_data import CLASSES, draw, main, make_demo_data
from tests.helpers import run


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_imagefolder_of_jpegs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "demo" / "images"
    assert main([str(out), "--images", "20", "-w", "2"]) == 0
    assert capsys.readouterr() == (f"20 images of 6 classes in {out}\n", "")
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == list(CLASSES) == sorted(CLASSES)
    assert [len(list((out / name).iterdir())) for name in CLASSES] == [4, 4, 3, 3, 3, 3]
    sizes = set()
    for path in out.rglob("*.jpg"):
        image = Image.open(path)
        assert (image.format, image.mode) == ("JPEG", "RGB") and 5_000 < path.stat().st_size < 60_000
        assert all(256 <= side <= 320 for side in image.size)
        sizes.add(image.size)
    assert len(sizes) > 10
    assert not [path for path in out.parent.iterdir() if path != out]


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    for name, seed, workers in (("a", 0, 1), ("b", 0, 2), ("c", 1, 1)):
        assert make_demo_data(tmp_path / name, 12, seed, workers)
    assert make_demo_data(tmp_path / "more", 14)
    a, b, c, more = (files(tmp_path / name) for name in ("a", "b", "c", "more"))
    assert a == b
    images = {path for path in a if path.endswith(".jpg")}
    assert len(images) == 12 and not any(a[path] == c[path] for path in images)
    assert all(a[path] == more[path] for path in images)  # more images add to those that there are


def test_a_second_call_reuses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "images"
    flags = [str(out), "--images", "6"]
    assert main(flags) == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert main(flags) == 0
    assert "were already in" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main([str(out), "--images", "7"]) == 1
    expected = f"error: the folder holds something else; {out}; choose another OUT, or remove it\n"
    assert capsys.readouterr().err == expected
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out, drawn = tmp_path / "images", []

    def interrupted(number: int, seed: int) -> Image.Image:
        drawn.append(number)
        if number == 4:
            raise KeyboardInterrupt
        return draw(number, seed)

    monkeypatch.setattr("common.demo_data.draw", interrupted)
    assert main([str(out), "--images", "6", "-w", "1"]) == 130
    assert drawn == [0, 1, 2, 3, 4] and not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / ".images.unfinished" / "dots").mkdir(parents=True)  # as a kill leaves it
    (tmp_path / ".images.unfinished" / "dots" / "99999.jpg").write_bytes(b"")
    out.mkdir()
    assert main([str(out), "--images", "6"]) == 0
    assert len(list(out.rglob("*.jpg"))) == 6 and list(tmp_path.iterdir()) == [out]
    capsys.readouterr()
    (tmp_path / "file").write_bytes(b"")
    assert main([str(tmp_path / "file" / "images")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write the images (Not a directory)")


def test_colours_do_not_give_the_class_away() -> None:
    """The nearest neighbours by mean colour find the class hardly more often than chance."""
    means = np.array([np.asarray(draw(number, 5).resize((8, 8))).mean(axis=(0, 1)) for number in range(240)])
    labels = np.arange(240) % len(CLASSES)
    distances = np.square(means[:, None] - means[None]).sum(-1) + 1e9 * np.eye(240)
    votes = labels[np.argsort(distances, axis=1)[:, :9]]
    guesses = np.array([np.bincount(row, minlength=len(CLASSES)).argmax() for row in votes])
    assert (guesses == labels).mean() < 0.4


def test_from_a_shell(tmp_path: Path) -> None:
    result = run("common.demo_data", tmp_path / "x", "--images", 8, "--num-workers", 2).check()
    assert result.err == "" and result.out.startswith("8 images of 6 classes in")
    assert run("common.demo_data", tmp_path / "y", "--images", 5).check(2).err.count("error: ") == 1
