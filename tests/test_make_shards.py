"""Images to shards, through the command line: what is written, what is refused, and that nothing else decides it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import struct
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from common.errors import UserError
from common.make_shards import Options, main, make_shards
from common.tars.index import BLOCK, read_index
from common.tars.samples import is_side_file, split_name
from common.writing.keys import make_keys
from common.writing.manifest import from_manifest
from common.writing.shard_plan import choose_val
from common.writing.work_lock import sole_writer
from common.writing.writer import header
from tests.helpers import command, descendants, end, jpeg, run, start
from tests.tars import scan_tar

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def _leave_the_disk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small shards need not outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def write_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog", "owl"), num_each: int = 8) -> Path:
    """One subfolder per class, JPEGs that all differ."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(num_each):
            (root / name / f"{number:02d}.jpg").write_bytes(jpeg(label, number))
    return root


def tree(folder: Path) -> Files:
    """Every file below a folder, hidden ones too: path -> bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def members(tar: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(tar) as file:
        return [(member.name, file.extractfile(member).read()) for member in file]  # type: ignore[union-attr]


def samples(folder: Path) -> list[tuple[str, str, bytes, dict]]:
    """(key, extension, image, json) of every sample of a shard folder, in order."""
    found = []
    for tar in sorted(folder.glob("*.tar")):
        files = members(tar)
        for (name, image), (json_name, text) in zip(files[::2], files[1::2], strict=True):
            key, extension = split_name(name)
            assert json_name == f"{key}.json"
            found.append((key, extension, image, json.loads(text)))
    return found


def info(folder: Path) -> dict:
    return json.loads((folder / "info.json").read_text())


def rejected(out: Path) -> dict[str, str]:
    lines = (out / "rejected.jsonl").read_text().splitlines()
    return {row["path"]: row["cause"] for row in map(json.loads, lines)}


def encoded(image: Image.Image, name: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def check_error(capsys: pytest.CaptureFixture, *parts: str) -> None:
    """One line on stderr, `error: what; where; what to do`, which names `parts`."""
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].count("; ") >= 2, err
    assert all(part in lines[0] for part in parts), err


# What is written


def test_a_folder_of_classes_becomes_shards(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "shards"
    assert main([str(source), str(out), "-w", "1", "--samples_per_shard", "10"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "info.json", "shards-0000.idx", "shards-0000.tar", "shards-0001.idx", "shards-0001.tar",
        "shards-0002.idx", "shards-0002.tar",
    ]
    written = info(out)
    assert {key: written[key] for key in ("dataset size", "num_classes", "classes")} == {
        "dataset size": 24, "num_classes": 3, "classes": ["cat", "dog", "owl"],
    }
    assert written["shards"] == [
        {"name": f"shards-000{i}.tar", "samples": n, "bytes": (out / f"shards-000{i}.tar").stat().st_size}
        for i, n in enumerate([10, 10, 4])
    ]
    for shard, tar in enumerate(sorted(out.glob("*.tar"))):
        files = members(tar)
        for count, ((name, image), (json_name, text)) in enumerate(zip(files[::2], files[1::2], strict=True)):
            category = name.partition("/")[0]
            assert json_name == name.replace(".jpg", ".json")
            assert image == (source / name).read_bytes()
            label = ["cat", "dog", "owl"].index(category)
            assert list(json.loads(text).items()) == [
                ("write worker id", shard), ("count", count), ("category", category), ("label", label),
            ]
        assert read_index(tar) == scan_tar(tar)
    keys = [key for key, *_ in samples(out)]
    assert sorted(keys) == [f"{name}/{number:02d}" for name in ("cat", "dog", "owl") for number in range(8)]
    assert keys != sorted(keys)


def test_headers_are_plain_and_small(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images", ("a" * 60, "b"), 3), tmp_path / "out"
    make_shards(str(source), out)
    tar = out / "out-0000.tar"
    with tarfile.open(tar) as file:
        for member in file:
            assert (member.mtime, member.uid, member.gid, member.mode, member.uname) == (0, 0, 0, 0o644, "")
            assert member.type == tarfile.REGTYPE and not member.pax_headers
            assert member.offset_data == member.offset + BLOCK  # no extension before it: 512 bytes and padding
            plain = tarfile.TarInfo(member.name)
            plain.size = member.size
            assert header(member.name.encode(), member.size) == plain.tobuf(tarfile.USTAR_FORMAT)
    assert tar.read_bytes()[-2 * BLOCK :] == bytes(2 * BLOCK)


def test_seed_decides_the_order(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images")
    orders = {}
    for seed in ("0", "1", "-1"):
        assert main([str(source), str(tmp_path / seed), "--seed", seed]) == 0
        orders[seed] = [key for key, *_ in samples(tmp_path / seed)]
    assert orders["-1"] == sorted(orders["0"]) == sorted(orders["1"])
    assert len({tuple(order) for order in orders.values()}) == 3


def test_labels_and_order_are_those_of_imagefolder(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    source = write_folder(tmp_path / "images", ("B", "a", "a b"), 2)
    for path in ("a/deep/er/x.jpg", "a/deep-0/x.JPG", "B/y.PNG"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(jpeg(0, 1))
    make_shards(str(source), tmp_path / "out", Options(seed=-1))
    expected = ImageFolder(str(source))
    assert info(tmp_path / "out")["classes"] == expected.classes == ["B", "a", "a b"]
    found = samples(tmp_path / "out")
    assert [meta["label"] for *_, meta in found] == expected.targets
    assert [image for _, _, image, _ in found] == [Path(path).read_bytes() for path, _ in expected.samples]
    assert [extension for _, extension, *_ in found] == [Path(path).suffix[1:].lower() for path, _ in expected.samples]


def test_bytes_depend_on_neither_workers_nor_parts(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", num_each=12)
    (source / "cat" / "03.jpg").write_bytes(jpeg(0, 3)[:700])
    (source / "dog" / "04.jpg").write_bytes(b"")
    flags = ["--samples_per_shard", "4", "--val_fraction", "0.25", "--name", "x"]
    trees = []
    for workers in ("1", "2", "4"):
        out = tmp_path / f"w{workers}" / "out"
        assert main([str(source), str(out), "-w", workers, *flags]) == 0
        trees.append(tree(out))
    out = tmp_path / "parts" / "out"
    for part in ("2/3", "0/3"):
        assert main([str(source), str(out), "--part", part, *flags]) == 0
    assert not list(out.rglob("info.json"))
    assert main([str(source), str(out), "--finish", *flags]) == 1
    assert main([str(source), str(out), "--part", "1/3", *flags]) == 0
    assert main([str(source), str(out), "--finish", *flags]) == 0
    trees.append(tree(out))
    assert {"train/x-train-0000.tar", "val/x-val-0002.tar", "train/info.json", "rejected.jsonl"} <= set(trees[0])
    assert list(rejected(out)) == ["cat/03.jpg", "dog/04.jpg"] or list(rejected(out)) == ["dog/04.jpg", "cat/03.jpg"]
    assert trees[0] == trees[1] == trees[2] == trees[3]


def test_other_readers(tmp_path: Path) -> None:
    import webdataset

    source, out = write_folder(tmp_path / "images", ("__x__", "Ünï cödé")), tmp_path / "out"
    make_shards(str(source), out, Options(samples_per_shard=5))
    tars = sorted(map(str, out.glob("*.tar")))
    pipeline = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode("pil").to_tuple("jpg", "json")
    read = list(pipeline)
    assert Counter(meta["label"] for _, meta in read) == {0: 8, 1: 8}
    assert {meta["category"] for _, meta in read} == {"__x__", "Ünï cödé"}
    assert all(image.size == (56, 48) for image, _ in read)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    for tar in tars:
        result = subprocess.run(["tar", "xf", tar, "-C", unpacked], capture_output=True, text=True, check=True)
        assert result.stderr == ""
    assert len(list(unpacked.rglob("*.jpg"))) == len(list(unpacked.rglob("*.json"))) == 16


def test_the_index_holds_blanks_in_no_name(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images", ("a b", "c"), 2), tmp_path / "my data:v1.0"
    make_shards(str(source), out)
    assert sorted(path.name for path in out.glob("*.idx")) == ["my_data:v1_0-0000.idx"]
    assert [key for key, *_ in sorted(samples(out))] == ["a_b/00", "a_b/01", "c/00", "c/01"]
    assert read_index(out / "my_data:v1_0-0000.tar") == scan_tar(out / "my_data:v1_0-0000.tar")


@settings(deadline=None)
@given(st.lists(st.text(max_size=150), max_size=30))
def test_keys_are_distinct_and_safe(paths: list[str]) -> None:
    keys = make_keys(paths)
    assert len(set(keys)) == len(paths)
    for key in keys:
        name = f"{key}.jpeg"
        assert split_name(name) == (key, "jpeg")
        assert len(name.encode()) <= 100 and not is_side_file(name) and not name.startswith(("/", "__"))
        assert not set(key) & set(" \t\n\r\\\x00") and ".." not in key.split("/")


def test_keys_name_their_files() -> None:
    assert make_keys(["cat/a.jpg", "cat/a.png", "n.01/x.y.jpg", "../up/b.jpg", "/abs/c.jpg"]) == [
        "cat/a", "cat/a-2", "n.01/x_y", "up/b", "abs/c",
    ]
    long = make_keys(["x" * 200 + "/name.jpg", "y" * 200 + "/name.jpg"])
    assert all(key.endswith("xx/name") or key.endswith("yy/name") for key in long)


# How many and how large


def test_no_empty_shard(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", ("a", "b"), 5)
    make_shards(str(source), tmp_path / "out", Options(samples_per_shard=5))
    assert [entry["samples"] for entry in info(tmp_path / "out")["shards"]] == [5, 5]
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2


def test_a_shard_of_broken_images_leaves_no_gap(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images", ("a",), 6), tmp_path / "out"
    for number in (0, 1, 3):
        (source / "a" / f"{number:02d}.jpg").write_bytes(b"<html>no such page</html>")
    summary = make_shards(str(source), out, Options(samples_per_shard=2, seed=-1))
    assert (summary.num_samples, summary.num_shards, len(summary.rejected)) == (3, 2, 3)
    assert [key for key, *_ in samples(out)] == ["a/02", "a/04", "a/05"]
    assert [meta["count"] for *_, meta in samples(out)] == [0, 0, 1]
    assert [entry["name"] for entry in info(out)["shards"]] == ["out-0000.tar", "out-0001.tar"]
    assert sorted(path.name for path in out.glob("*.idx")) == ["out-0000.idx", "out-0001.idx"]
    assert all(read_index(tar) == scan_tar(tar) for tar in out.glob("*.tar"))


def test_shard_size_bounds_the_tars(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", num_each=10)
    make_shards(str(source), tmp_path / "out", Options(shard_size=20_000))
    sizes = [tar.stat().st_size for tar in sorted((tmp_path / "out").glob("*.tar"))]
    assert len(sizes) > 3 and max(sizes) <= 20_000 and min(sizes[:-1]) > 10_000
    assert len(samples(tmp_path / "out")) == 30
    make_shards(str(source), tmp_path / "tiny", Options(shard_size=1))
    assert len(list((tmp_path / "tiny").glob("*.tar"))) == 30  # a sample is never cut
    make_shards(str(source), tmp_path / "small", Options(shard_size=20_000, resize=16))
    assert len(list((tmp_path / "small").glob("*.tar"))) < len(sizes)


def test_validation_is_stratified(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", ("a",), 40)
    write_folder(source, ("a", "b"), 10)
    (source / "c").mkdir()
    (source / "c" / "only.jpg").write_bytes(jpeg(2, 0))
    assert main([str(source), str(tmp_path / "out"), "--val-fraction=0.2"]) == 0
    counts = {}
    for split in ("train", "val"):
        assert sorted(path.name for path in (tmp_path / "out" / split).glob("*.tar")) == [f"{split}-0000.tar"]
        counts[split] = Counter(meta["category"] for *_, meta in samples(tmp_path / "out" / split))
        assert info(tmp_path / "out" / split)["num_classes"] == 3
    assert counts == {"train": {"a": 32, "b": 8, "c": 1}, "val": {"a": 8, "b": 2}}
    keys = [key for split in ("train", "val") for key, *_ in samples(tmp_path / "out" / split)]
    assert len(set(keys)) == 51


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(-1, 9))
def test_each_class_gives_its_part(sizes: list[int], fraction: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    chosen = choose_val(labels, fraction, seed)
    assert len(set(chosen.tolist())) == len(chosen)
    given_away = np.bincount(labels[chosen], minlength=len(sizes))
    for size, num in zip(sizes, given_away, strict=True):
        assert abs(num - fraction * size) < 2 and num <= size - 1
    if min(sizes) > 1 / (1 - fraction) + 1:  # no class gave less than asked, so as to keep one
        assert abs(len(chosen) - fraction * len(labels)) <= 1


# What cannot be used


def test_broken_images_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    photo = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)), "JPEG")
    png = encoded(Image.new("RGB", (30, 30), "red"))
    broken = {
        "cat/half.jpg": photo[: len(photo) // 2], "cat/nearly.jpg": photo[: len(photo) * 99 // 100],
        "cat/zeros.jpg": photo[: len(photo) // 2] + bytes(len(photo) // 2), "dog/empty.png": b"",
        "dog/page.jpg": b"<html></html>", "owl/chunk.png": png[:-7],
    }
    for path, data in broken.items():
        (source / path).write_bytes(data)
    (source / "owl" / "gone.jpg").symlink_to("nowhere.jpg")
    (source / "owl" / "tail.jpg").write_bytes(photo + b"camera data after the image")
    (source / "owl" / "wrongly_named.jpg").write_bytes(png)
    assert main([str(source), str(out), "-w", "2", "--samples_per_shard", "7"]) == 0
    err = capsys.readouterr().err
    assert "warning: 7 inputs are rejected" in err and "rejected.jsonl" in err and "\r" not in err
    assert set(rejected(out)) == {*broken, "owl/gone.jpg"}
    assert rejected(out)["owl/gone.jpg"] == "No such file or directory"
    assert rejected(out)["dog/empty.png"] == "empty file"
    assert "truncated" in rejected(out)["cat/half.jpg"] and "truncated" in rejected(out)["cat/zeros.jpg"]
    assert info(out)["dataset size"] == len(samples(out)) == 26
    for tar in out.glob("*.tar"):
        counts = [json.loads(text)["count"] for name, text in members(tar) if name.endswith(".json")]
        assert counts == list(range(len(counts)))


@pytest.mark.parametrize("flags", [[], ["--shard_size", "1M", "--resize", "30"]])
def test_what_is_no_file_or_too_large_is_rejected(tmp_path: Path, flags: list[str]) -> None:
    """A named pipe would be waited for, and a file of 200 GiB (which cost no disk) has no place in memory."""
    source, out = write_folder(tmp_path / "images", ("a",), 2), tmp_path / "out"
    os.mkfifo(source / "a" / "pipe.jpg")
    (source / "a" / "huge.jpg").touch()
    os.truncate(source / "a" / "huge.jpg", 200 << 30)
    assert main([str(source), str(out), "-w", "1", *flags]) == 0
    assert rejected(out) == {"a/pipe.jpg": "a named pipe, not a file", "a/huge.jpg": f"{200 << 30} bytes, more than "
                             f"{0x7FFFF000}"}


def test_verify_levels(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images", ("a",), 2)
    photo = bytearray(jpeg(0, 9, side=200))
    photo[len(photo) // 2 : len(photo) // 2 + 3000] = bytes(3000)  # damage within, both ends whole
    (source / "a" / "damaged.jpg").write_bytes(photo)
    (source / "a" / "cut.jpg").write_bytes(jpeg(0, 9)[:-100])
    kept = {}
    for verify in ("none", "header", "full"):
        make_shards(str(source), tmp_path / verify, Options(verify=verify))
        kept[verify] = {key for key, *_ in samples(tmp_path / verify)}
    assert kept == {
        "none": {"a/00", "a/01", "a/cut", "a/damaged"},
        "header": {"a/00", "a/01", "a/damaged"},
        "full": {"a/00", "a/01"},
    }


def test_nothing_left_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = tmp_path / "images", tmp_path / "out"
    (source / "a").mkdir(parents=True)
    assert main([str(source), str(out)]) == 1
    check_error(capsys, "no images")
    assert not out.exists()
    (source / "a" / "x.jpg").write_bytes(b"not one")
    assert main([str(source), str(out)]) == 1
    check_error(capsys, "no usable image", "rejected.jsonl")
    assert list(tree(out)) == ["rejected.jsonl"] and list(rejected(out)) == ["a/x.jpg"]
    (source / "a" / "x.jpg").write_bytes(jpeg(0, 0))
    assert main([str(source), str(out)]) == 0
    assert sorted(tree(out)) == ["info.json", "out-0000.idx", "out-0000.tar"]


def test_what_is_no_image_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "images"
    for path in ("a/A.JPG", "a/b.jpeg", "a/C.PNG", "b/d.webp", "b/e.gif", "b/f.BMP", "b/g.tif", "b/h.ppm"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        name = {"jpg": "JPEG", "tif": "TIFF"}.get(path[-3:].lower(), path.rpartition(".")[2].upper())
        (source / path).write_bytes(encoded(Image.new("RGB", (20, 10), "green"), name))
    hidden = ("a/._A.JPG", "a/.DS_Store", "__MACOSX/a/._A.JPG", ".ipynb_checkpoints/x.jpg")
    for path in (*hidden, "a/notes.txt", "top.jpg"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(b"something")
    (source / "a" / "loop").symlink_to(source / "a", target_is_directory=True)
    (source / "empty").mkdir()
    assert main([str(source), str(tmp_path / "out"), "--seed", "-1", "--verify", "full"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in warnings] == [
        "warning: 2 files are left out", "warning: 1 of 3 classes have no image",
    ]
    assert info(tmp_path / "out")["classes"] == ["a", "b", "empty"]
    found = [(key, extension) for key, extension, *_ in samples(tmp_path / "out")]
    assert found == [("a/A", "jpg"), ("a/C", "png"), ("a/b", "jpeg"), ("b/d", "webp"), ("b/e", "gif"), ("b/f", "bmp"),
                     ("b/g", "tif"), ("b/h", "png")]
    assert Image.open(io.BytesIO(samples(tmp_path / "out")[-1][2])).getpixel((0, 0)) == (0, 128, 0)


# Manifests


def write_manifest(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(["a b.jpg", "c:d.jpg", "ünï.JPG", "e,f.jpg", 'g"h.jpg', "sub/i.jpg"]):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(jpeg(number % 3, number))
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_by_header(tmp_path: Path) -> None:
    text = "\ufeffnote, Category ,PATH\n1,zebra,a b.jpg\n2,ant,c:d.jpg\n,zebra,ünï.JPG\n"
    text += '4,bee,"e,f.jpg"\n5,ant,"g""h.jpg"\n6,ant,./sub/i.jpg,too much\n'
    manifest = write_manifest(tmp_path / "data", "list.csv", text)
    make_shards(str(manifest), tmp_path / "out", Options(seed=-1))
    assert info(tmp_path / "out")["classes"] == ["ant", "bee", "zebra"]
    found = samples(tmp_path / "out")
    assert [(key, meta["category"], meta["label"]) for key, _, _, meta in found] == [
        ("a_b", "zebra", 2), ("c:d", "ant", 0), ("ünï", "zebra", 2), ("e,f", "bee", 1), ('g"h', "ant", 0),
        ("sub/i", "ant", 0),
    ]
    assert [image for _, _, image, _ in found] == [jpeg(number % 3, number) for number in range(6)]


def test_jsonl_with_numbers(tmp_path: Path) -> None:
    absolute = str(tmp_path / "data" / "c:d.jpg")
    rows = [{"path": "a b.jpg", "label": 2, "x": [1]}, {"Path": absolute, "label": "0"}]
    rows.append({"label": 3.0, "path": "ünï.JPG"})
    manifest = write_manifest(tmp_path / "data", "list.jsonl", "\n\n".join(map(json.dumps, rows)))
    make_shards(str(manifest), tmp_path / "out", Options(seed=-1))
    assert "classes" not in info(tmp_path / "out") and info(tmp_path / "out")["num_classes"] == 4
    found = [(meta["category"], meta["label"]) for *_, meta in samples(tmp_path / "out")]
    assert found == [("2", 2), ("0", 0), ("3", 3)]


def test_label_and_category_together(tmp_path: Path) -> None:
    text = "path\tlabel\tcategory\na b.jpg\t1\tdog\nc:d.jpg\t0\tcat\nünï.JPG\t\tdog\n"
    manifest = write_manifest(tmp_path / "data", "list.tsv", text)
    make_shards(str(manifest), tmp_path / "out", Options(seed=-1))
    assert info(tmp_path / "out")["classes"] == ["cat", "dog"]
    assert [meta["label"] for *_, meta in samples(tmp_path / "out")] == [1, 0, 1]


@pytest.mark.parametrize(("labels", "classes", "numbers"), [
    (("0.0", "10.0", "2."), None, [0, 10, 2]), (("0", "10", "2"), None, [0, 10, 2]),
    (("1_1", "11", "2"), ["11", "1_1", "2"], [1, 0, 2]), (("01", "001", "1"), ["001", "01", "1"], [1, 0, 2]),
    (("+1", "1", "١"), ["+1", "1", "١"], [0, 1, 2]), (("dog", "007", "cat"), ["007", "cat", "dog"], [2, 0, 1])])
def test_which_labels_are_numbers(tmp_path: Path, labels: Sequence[str], classes: Any, numbers: list[int]) -> None:
    """As people and pandas write them; where one is not, all are names: two texts never become one class."""
    text = "path,label\n" + "".join(f"{name}.jpg,{label}\n" for name, label in zip("abc", labels, strict=True))
    source = from_manifest(str(write_manifest(tmp_path, "list.csv", text)))
    assert (source.classes, source.labels) == (classes, numbers)


def test_names_in_both_columns_agree(tmp_path: Path) -> None:
    text = "path,label,category\na.jpg,n02,tench\nb.jpg,n02,\nc.jpg,n01,shark\n"
    source = from_manifest(str(write_manifest(tmp_path, "list.csv", text)))
    assert (source.classes, source.labels) == (["shark", "tench"], [1, 1, 0])
    with pytest.raises(UserError, match="category tench has several labels"):
        from_manifest(str(write_manifest(tmp_path, "list.csv", text.replace("shark", "tench"))))


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    text = "path,label\na b.jpg,0\na b.jpg,0\n./c:d.jpg,1\nc:d.jpg,0\nünï.JPG,\nsub/i.jpg,-1\nnope.jpg,1\n,1\n"
    text += "list.csv,1\nsub,1\n"
    manifest = write_manifest(tmp_path / "data", "list.csv", text)
    make_shards(str(manifest), tmp_path / "out", Options(seed=-1))
    assert [key for key, *_ in samples(tmp_path / "out")] == ["a_b", "c:d"]
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == [
        ("line 9", "no path"), ("a b.jpg", "listed twice: lines 2 and 3"), ("c:d.jpg", "listed twice: lines 4 and 5"),
        ("ünï.JPG", "no label, line 6"), ("sub/i.jpg", "label -1 is negative, line 7"),
        ("list.csv", "none of the extensions jpg, jpeg, png, webp, bmp, gif, tif, tiff, ppm, pgm"),
        ("sub", "none of the extensions jpg, jpeg, png, webp, bmp, gif, tif, tiff, ppm, pgm"),
        ("nope.jpg", "No such file or directory"),
    ]


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    rows = [{"path": path, "category": "a"} for path in ("a b.jpg", "nul\0.jpg", "half \ud83d.jpg")]
    manifest = write_manifest(tmp_path / "data", "list.jsonl", "\n".join(map(json.dumps, rows)))
    for name, size in (("out", None), ("sized", 5000)):
        make_shards(str(manifest), tmp_path / name, Options(shard_size=size, seed=-1))
        assert [key for key, *_ in samples(tmp_path / name)] == ["a_b"]
        assert set(rejected(tmp_path / name).values()) == {"not a name that a file can have"}


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("l.csv", "a b.jpg,0\n", ["a b.jpg", "`path`"]),
        ("l.csv", "path,class\na b.jpg,0\n", ["class", "`label`"]),
        ("l.csv", "path,label\na b.jpg,0\nc:d.jpg,dog\n", ["lines 2 and 3", "`category`"]),
        ("l.csv", "path,label,category\na b.jpg,0,cat\nc:d.jpg,0,dog\n", ["label 0 is cat and dog", "line 3"]),
        ("l.csv", "path,label,category\na b.jpg,0,cat\nc:d.jpg,1,cat\n", ["cat has several labels"]),
        ("l.csv", "path,label\na b.jpg,0\nc:d.jpg,10000000\n", ["label 10000000 is larger than 9999999", "line 3"]),
        ("l.csv", "path,label,category\na b.jpg,9999999999,cat\n", ["label 9999999999 is larger", "line 2"]),
        ("l.jsonl", '{"path": "a b.jpg", "label": 1e300}\n', ["is larger than 9999999", "line 1"]),
        ("l.jsonl", "no json\n", ["no usable image"]),
        ("l.jsonl", "", ["no images"]),
        ("l.txt", "a b.jpg 0", ["no images in that form", "l.txt"]),
    ],
)
def test_manifests_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, text: str, parts: list[str]
) -> None:
    manifest = write_manifest(tmp_path / "data", name, text)
    assert main([str(manifest), str(tmp_path / "out")]) == 1
    check_error(capsys, *parts)
    assert not list(tmp_path.glob("out/*.tar")) and not (tmp_path / "out" / "info.json").exists()


# torchvision


def write_fashion_mnist(root: Path, num_train: int = 30, num_test: int = 10) -> np.ndarray:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (num_train + num_test, 28, 28), dtype=np.uint8)
    for name, part in (("train", slice(0, num_train)), ("t10k", slice(num_train, None))):
        chosen = images[part]
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *chosen.shape) + chosen.tobytes())
        labels = bytes(number % 10 for number in range(len(chosen)))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(labels)) + labels)
    return images


def test_torchvision_arrays_become_png(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    images = write_fashion_mnist(tmp_path / "data")
    for split, part in (("train", images[:30]), ("test", images[30:])):
        flags = ["--root", str(tmp_path / "data"), "--split", split, "-w", "2", "--samples_per_shard", "8"]
        assert main(["torchvision:FashionMNIST", str(tmp_path / split), *flags, "--seed", "-1"]) == 0
        found = samples(tmp_path / split)
        assert [key for key, *_ in found] == [f"{split}/{number:06d}" for number in range(len(part))]
        for number, (_, extension, data, meta) in enumerate(found):
            assert extension == "png" and np.array_equal(np.asarray(Image.open(io.BytesIO(data))), part[number])
            assert meta["label"] == number % 10
        assert found[9][3]["category"] == "Ankle boot" and info(tmp_path / split)["classes"][0] == "T-shirt/top"
    capsys.readouterr()
    assert main(["torchvision:FashionMNIST", str(tmp_path / "none"), "--root", str(tmp_path)]) == 1
    check_error(capsys, "FashionMNIST", str(tmp_path), "download=True")
    assert not (tmp_path / "none").exists()


def test_torchvision_files_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = tmp_path / "data" / "oxford-iiit-pet"
    (base / "images").mkdir(parents=True)
    (base / "annotations").mkdir()
    lines = []
    for number, name in enumerate(["Abyssinian_1", "Abyssinian_2", "great_pug_1"]):
        (base / "images" / f"{name}.jpg").write_bytes(jpeg(0, number))
        lines.append(f"{name} {1 + number // 2} 1 1\n")
    (base / "annotations" / "trainval.txt").write_text("".join(lines))
    (base / "annotations" / "test.txt").write_text(lines[2])
    root = ["--root", str(tmp_path / "data")]
    assert main(["torchvision:OxfordIIITPet", str(tmp_path / "out"), *root, "--seed", "-1"]) == 0
    found = samples(tmp_path / "out")
    assert [image for _, _, image, _ in found] == [jpeg(0, number) for number in range(3)]
    assert [(key, meta["category"]) for key, _, _, meta in found] == [
        ("oxford-iiit-pet/images/Abyssinian_1", "Abyssinian"), ("oxford-iiit-pet/images/Abyssinian_2", "Abyssinian"),
        ("oxford-iiit-pet/images/great_pug_1", "Great Pug"),
    ]
    capsys.readouterr()
    assert main(["torchvision:OxfordIIITPet", str(tmp_path / "x"), *root, "--split", "train"]) == 1
    check_error(capsys, "trainval")
    assert main(["torchvision:Nonsense", str(tmp_path / "x"), *root]) == 1
    check_error(capsys, "Nonsense", "CIFAR10")
    assert main(["torchvision:OxfordIIITPet", str(tmp_path / "x")]) == 1
    check_error(capsys, "--root")


def test_two_bytes_a_pixel_stay(tmp_path: Path) -> None:
    """A PGM becomes a PNG of 16 bits, in its own size as in another; 32 bits fit into none."""
    source, pixels = tmp_path / "images" / "a", np.random.default_rng(0).integers(0, 1 << 16, (60, 80), dtype=np.uint16)
    source.mkdir(parents=True)
    (source / "x.pgm").write_bytes(b"P5 80 60 65535\n" + pixels.astype(">u2").tobytes())
    (source / "y.pgm").write_bytes(b"Pf 80 60 -1.0\n" + bytes(60 * 80 * 4))
    for resize in (None, 30):
        out = tmp_path / f"out{resize}"
        make_shards(str(source.parent), out, Options(resize=resize))
        assert rejected(out) == {"a/y.pgm": "32-bit pixels, which no PNG can hold"}
        image = Image.open(io.BytesIO(samples(out)[0][2]))
        assert image.mode == "I;16" and image.size == ((40, 30) if resize else (80, 60))
        assert resize or np.array_equal(np.asarray(image), pixels)


# --resize


def test_resize_keeps_images_upright_and_small_ones_untouched(tmp_path: Path) -> None:
    source = tmp_path / "images" / "a"
    source.mkdir(parents=True)
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, :60] = 255, 0, 0  # red to the left
    wide = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise: red on top, 120 high
    files = {
        "cmyk.jpg": encoded(wide.convert("CMYK"), "JPEG"), "exif.jpg": encoded(wide, "JPEG", exif=exif, quality=95),
        "gray.png": encoded(wide.convert("L")), "palette.png": encoded(wide.convert("P")),
        "sixteen.png": encoded(Image.fromarray(np.full((40, 80), 40_000, np.uint16))),
        "small.jpg": encoded(wide.resize((40, 20)), "JPEG", exif=exif),
    }
    for name, data in files.items():
        (source / name).write_bytes(data)
    make_shards(str(source.parent), tmp_path / "out", Options(seed=-1, resize=30))
    written = {key: (extension, data) for key, extension, data, _ in samples(tmp_path / "out")}
    found = {key: Image.open(io.BytesIO(data)) for key, (_, data) in written.items()}
    shapes = {key: (written[key][0], image.size, image.mode) for key, image in found.items()}
    assert shapes == {
        "a/cmyk": ("jpg", (60, 30), "CMYK"), "a/exif": ("jpg", (30, 60), "RGB"), "a/gray": ("png", (60, 30), "L"),
        "a/palette": ("png", (60, 30), "RGB"), "a/sixteen": ("png", (60, 30), "I;16"),
        "a/small": ("jpg", (40, 20), "RGB"),
    }
    assert written["a/small"][1] == files["small.jpg"]
    upright = found["a/exif"]
    assert not upright.getexif()
    assert upright.getpixel((15, 10))[0] > 200 > 50 > upright.getpixel((15, 50))[0]
    assert found["a/cmyk"].convert("RGB").getpixel((10, 15))[0] > 200
    assert found["a/sixteen"].getpixel((5, 5)) == 40_000


# Killed, full, given twice


def test_killed_and_called_again(tmp_path: Path) -> None:
    source = tmp_path / "images" / "a"
    source.mkdir(parents=True)
    photo = jpeg(0, 0, side=400)
    for number in range(120):
        (source / f"{number:03d}.jpg").write_bytes(photo)
    flags = ["--resize", "100", "--samples_per_shard", "8"]
    out = tmp_path / "killed" / "out"
    process = start(command("common.make_shards", source.parent, out, "-w", 2, *flags))
    deadline = time.monotonic() + 60
    while not list(out.glob("*.tar")) and time.monotonic() < deadline:
        time.sleep(0.005)
    children = descendants(process.pid)[1:]
    process.kill()
    process.communicate(timeout=20)
    done = list(out.glob("*.tar"))
    assert 0 < len(done) < 15 and not (out / "info.json").exists() and (out / ".unfinished").is_dir()
    assert all(len(scan_tar(tar)) == 8 for tar in done)
    assert children and _all_gone(children)
    before = {tar.name: tar.stat().st_mtime_ns for tar in done}
    (out / ".unfinished" / "out-0014.tar.123.unfinished").write_bytes(b"half a shard")
    end(start(command("common.make_shards", source.parent, out, "-w", 2, *flags))).check()
    kept = [tar for tar in done if tar.stat().st_mtime_ns == before[tar.name]]
    assert kept, "every shard was made again"
    make_shards(str(source.parent), tmp_path / "whole" / "out", Options(resize=100, samples_per_shard=8, num_workers=2))
    assert tree(out) == tree(tmp_path / "whole" / "out")


def _all_gone(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_is_running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_inputs_that_change_in_between(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "images")
    out, options = tmp_path / "part" / "out", {"samples_per_shard": 4}
    make_shards(str(source), out, Options(**options, part=(0, 2)))
    (source / "dog" / "05.jpg").write_bytes(jpeg(7, 7, side=60))
    (source / "owl" / "02.jpg").write_bytes(b"")
    make_shards(str(source), out, Options(**options))
    make_shards(str(source), tmp_path / "whole" / "out", Options(**options))
    assert tree(out) == tree(tmp_path / "whole" / "out")


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    calls = []

    def fsync(file: int) -> None:
        calls.append(file)
        if Path(os.readlink(f"/proc/self/fd/{file}")).name.startswith("out-0002.tar"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    flags = [str(source), str(out), "-w", "1", "--samples_per_shard", "6"]
    assert main(flags) == 1 and calls
    check_error(capsys, "No space left on device", "out-0002.tar")
    listed = info(out)["shards"]
    assert [entry["name"] for entry in listed] == ["out-0000.tar", "out-0001.tar"] and info(out)["dataset size"] == 12
    assert sorted(path.name for path in out.glob("*.tar")) == ["out-0000.tar", "out-0001.tar"]
    assert not list(out.glob(".unfinished/*.unfinished"))
    monkeypatch.undo()
    assert main(flags) == 0
    assert len(samples(out)) == 24 and not (out / ".unfinished").exists()


def test_an_error_in_a_worker_process(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    line = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", *command("common.make_shards", source, out, "-w", 2)]
    result = end(start(line)).check(1)  # no file may be longer than 8 kB
    assert result.err.count("\n") == 1 and result.err.startswith("error: cannot write") and "too large" in result.err
    assert not list(out.glob("*.tar")) and not (out / "info.json").exists()


def test_called_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    assert main([str(source), str(out)]) == 0
    first, times = tree(out), {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main([str(source), str(out)]) == 0
    assert "already" in capsys.readouterr().out and times == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    part = ["--part", "0/2", "--seed", "1"]
    for flags in (["--seed", "1"], ["--samples_per_shard", "5"], ["--val_fraction", "0.5"], part):
        assert main([str(source), str(out), *flags]) == 1
        check_error(capsys, "--overwrite", str(out))
    (source / "cat" / "00.jpg").write_bytes(jpeg(5, 5))
    assert main([str(source), str(out)]) == 1  # the same names, another image
    check_error(capsys, "--overwrite")
    assert {**tree(out), "notes.txt": b""} == {**first, "notes.txt": b""}
    assert main([str(source), str(out), "--overwrite", "--samples_per_shard", "20"]) == 0
    assert main([str(source), str(out), "--overwrite", "--seed", "1"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["info.json", "notes.txt", "out-0000.idx", "out-0000.tar"]
    (out / "other-0000.tar").write_bytes(bytes(1024))
    capsys.readouterr()
    assert main([str(source), str(out), "--overwrite"]) == 1  # which is not ours to remove
    check_error(capsys, "other-0000.tar")
    assert (out / "other-0000.tar").exists()


def test_two_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The second is refused while the first runs, and touches nothing; parts of the work go side by side."""
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    flags = [str(source), str(out), "-w", "1", "--samples_per_shard", "6"]
    assert main([*flags, "--part", "0/2"]) == 0
    mark, before = next((out / ".unfinished").glob("plan-*")).name, tree(out)
    whole, one, other = [], ["--part", "0/2"], ["--part", "1/2"]
    for part, refused in ((None, [whole, ["--finish"], ["--overwrite"], other]), ((0, 2), [whole, ["--finish"], one])):
        with sole_writer(out / ".unfinished", mark, part):
            for more in refused:
                assert main([*flags, *more]) == 1
                check_error(capsys, "another make_shards is writing here", str(out), "wait")
            if part is None:
                assert tree(out) == before
            else:
                assert main([*flags, *other]) == 0
    assert main([*flags, "--finish"]) == 0
    assert not (out / ".unfinished").exists() and len(samples(out)) == 24


def test_an_unfinished_run_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    assert main([str(source), str(out), "--part", "0/2", "--samples_per_shard", "6"]) == 0
    assert main([str(source), str(out), "--part", "1/2", "--samples_per_shard", "5"]) == 1
    check_error(capsys, "unfinished", "--overwrite")
    assert main([str(source), str(out), "--overwrite", "--samples_per_shard", "5"]) == 0
    assert [entry["samples"] for entry in info(out)["shards"]] == [5, 5, 5, 5, 4]
    assert main([str(source), str(out), "--part", "1/2", "--samples_per_shard", "5"]) == 0  # late, and not needed
    assert not (out / ".unfinished").exists()


def test_interrupted(tmp_path: Path) -> None:
    source = tmp_path / "images" / "a"
    source.mkdir(parents=True)
    (tmp_path / "image.jpg").write_bytes(jpeg(0, 0, side=400))
    for number in range(3000):  # enough to be at work for seconds after the first shard
        (source / f"{number:04d}.jpg").hardlink_to(tmp_path / "image.jpg")
    out = tmp_path / "out"
    flags = ["-w", 2, "--resize", 99, "--samples_per_shard", 8]
    process = start(command("common.make_shards", source.parent, out, *flags))
    deadline = time.monotonic() + 60
    while not list(out.glob("*.tar")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    result = end(process, 30).check(130)
    assert result.err == f"error: interrupted; {out}; give the same command again to go on\n"


# The command line


@pytest.mark.parametrize(
    "flags",
    [
        [], ["x"], ["x", "y", "--val_fraction", "1"], ["x", "y", "--val_fraction", "0"],
        ["x", "y", "--samples_per_shard", "0"],
        ["x", "y", "--shard_size", "5 apples"], ["x", "y", "--shard_size", "1M", "--samples_per_shard", "5"],
        ["x", "y", "--part", "3/3"], ["x", "y", "--part", "0/2", "--finish"], ["x", "y", "--verify", "some"],
        ["x", "y", "--name", "a/b"], ["x", "y", "--resize", "0"], ["x", "y", "-w", "-1"], ["x", "y", "--nonsense"],
    ],
)
def test_bad_usage(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = write_folder(tmp_path / "images")
    for arguments, part in (
        ([str(tmp_path / "nowhere"), "out"], "no such folder"),
        ([str(source / "cat"), "out"], "no class folders"),
        ([str(source), str(source / "shards")], "inside of SRC"),
        ([str(source), str(source)], "inside of SRC"),
        ([str(source), str(tmp_path / "out"), "--split", "train"], "--split"),
        ([str(source), str(tmp_path / "out"), "--val_fraction", "0.001"], "--val_fraction"),
        ([str(source), str(source / "cat" / "00.jpg" / "out")], "inside of SRC"),
        ([str(source), str(tmp_path / "file" / "out")], "Not a directory"),
    ):
        (tmp_path / "file").write_bytes(b"")
        assert main(arguments) == 1
        check_error(capsys, part)
    assert len(tree(source)) == 24  # nothing was written there


def test_splits_taken_for_classes_are_remarked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_folder(tmp_path / "images", ("train", "val"), 1)
    assert main([str(tmp_path / "images"), str(tmp_path / "out")]) == 0
    assert "the classes are train, val" in capsys.readouterr().err


def test_from_a_shell(tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "images"), tmp_path / "out"
    result = run("common.make_shards", source, out, "-w", 2, "--samples-per-shard", 9, "--shard-size", "1M").check(2)
    result = run("common.make_shards", source, out, "-w", 2, "--samples-per-shard", 9).check()
    assert result.err == "" and "24 samples in 3 shards" in result.out
    assert run("common.make_shards", tmp_path / "nowhere", out).check(1).err.startswith("error: no such folder")
