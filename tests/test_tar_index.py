"""Tars as people make them, read by position and as a stream: the same samples, and the same words for what is
wrong."""

from __future__ import annotations

import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from common.access.storage import Storage
from common.errors import UserError
from common.shards import ShardIndex
from common.tars.index import index_path, load_samples, read_index, write_index
from common.tars.samples import sample_faults, split_name
from tests.tars import by_position, by_stream, files, index_of, scan_tar, write_tar

KEYS = [f"{number:03d}" for number in range(20)]


def test_key_ends_at_the_first_dot_of_the_file_name() -> None:
    assert split_name("train.v1/0001.jpg") == ("train.v1/0001", "jpg")
    assert split_name("./a.b/c.left.JPG") == ("./a.b/c", "left.JPG")
    assert split_name("README") == ("README", "")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_and_names(tmp_path: Path, format: int) -> None:
    """Dots and blanks in folders, names of 150 letters (of 260 where the format allows), non-ASCII, upper-case
    extensions."""
    keys = ["train.v1/0001", "ordner mit blank/ü 山", "a" * 90 + "/" + "b" * 60]
    if format != tarfile.USTAR_FORMAT:
        keys.append("/".join("c" * 50 for _ in range(5)))
    written = [(name.replace(".jpg", ".JPG"), data) for name, data in files(keys)]
    tar = write_tar(tmp_path / "a.tar", written, format=format)
    assert [sample[0].name.partition(".JPG")[0] for sample in scan_tar(tar)] == keys
    index = ShardIndex.open([str(tmp_path)])
    assert index.num_samples == len(keys)
    for samples in (by_position(index), by_stream(index)):
        assert [sample.key for sample in samples] == keys
        assert [sample.count for sample in samples] == list(range(len(keys)))
        assert [dict(sample.fields) for sample in samples] == [
            {"jpg": written[i][1], "json": written[i + 1][1]} for i in range(0, len(written), 2)]


def test_gnu_tar_reads_alike(tmp_path: Path) -> None:
    """What the command writes: folders as members, names from `./`, and PAX records with times."""
    for name, data in files(KEYS[:4]):
        (tmp_path / "in" / "sub").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "sub" / name).write_bytes(data)
    for format in ("gnu", "pax", "ustar"):
        tar = tmp_path / f"{format}.tar"
        subprocess.run(["tar", f"--format={format}", "--sort=name", "-cf", tar, "-C", tmp_path / "in", "."], check=True)
        index = index_of(tar, sizes=[4])
        assert [sample.key for sample in by_position(index)] == [f"./sub/{key}" for key in KEYS[:4]]
        assert [sample.key for sample in by_stream(index)] == [f"./sub/{key}" for key in KEYS[:4]]


def test_side_files_tear_nothing(tmp_path: Path) -> None:
    """A tar from macOS: ._ files between those of a sample, .DS_Store, __MACOSX/; and files without an extension."""
    image, label = files(["d/a"])
    odd = [("d/._a.jpg", b"x"), image, ("d/._a.json", b"x"), label, ("d/.DS_Store", b"x"), ("__MACOSX/d/b.jpg", b"x"),
           ("README", b"x"), ("__meta__/x.jpg", b"x")]
    index = index_of(write_tar(tmp_path / "a.tar", odd), sizes=[1])
    for samples in (by_position(index), by_stream(index)):
        assert [(sample.key, sorted(sample.fields), sample.fault)
                for sample in samples] == [("d/a", ["jpg", "json"], None)]


def test_files_that_are_not_neighbours(tmp_path: Path) -> None:
    a_jpg, a_json, b_jpg, b_json = files(["a", "b"])
    tar = write_tar(tmp_path / "a.tar", [a_jpg, b_jpg, a_json, b_json])
    with pytest.raises(UserError, match=r"not next to each other .*--sort=name.*a\.tar, key a"):
        ShardIndex.open([str(tmp_path)])
    index = index_of(tar, sizes=[4])
    assert ["next to each other" in (sample.fault or "") for sample in by_position(index)] == [True] * 4
    assert ["next to each other" in (sample.fault or "") for sample in by_stream(index)] == [False, False, True, True]


@pytest.mark.parametrize("second", ["a.jpg", "a.JPG"])
def test_a_file_twice(tmp_path: Path, second: str) -> None:
    """Told with tar and key; who skips errors loses this sample alone."""
    image, label = files(["a"])
    tar = write_tar(tmp_path / "a.tar", [image, (second, image[1]), label, *files(["b"])])
    with pytest.raises(UserError, match=r"two files with the extension jpg; shard .*a\.tar, key a;"):
        ShardIndex.open([str(tmp_path)])
    index = ShardIndex.open([str(tmp_path)], storage=Storage(skip_errors=True))
    for samples in (by_position(index), by_stream(index)):
        assert [sample.fault for sample in samples] == ["two files with the extension jpg", None]
    assert sample_faults(load_samples(tar)) == {0: "two files with the extension jpg"}


def test_links_are_told(tmp_path: Path) -> None:
    """Hard links, which tar makes of files with one inode, hold no data: a sample would lose its image in silence."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"x")
    os.link(tmp_path / "in" / "a.jpg", tmp_path / "in" / "b.jpg")
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "a.tar", "-C", tmp_path / "in", "."], check=True)
    with pytest.raises(UserError, match="b.jpg is a link without data.*--hard-dereference"):
        scan_tar(tmp_path / "a.tar")
    with pytest.raises(UserError, match="b.jpg is a link without data.*--hard-dereference"):
        by_stream(index_of(tmp_path / "a.tar", sizes=[2]))


def cut_places(tar: Path) -> dict[str, int]:
    samples = scan_tar(tar)
    last = samples[-1]
    return {"mid data": last[0].offset + last[0].size // 2, "border of samples": last[0].offset - 512,
            "border of members": last[1].offset - 512, "mid header": last[0].offset - 300,
            "end": last[1].offset + 512 * -(-last[1].size // 512)}


@pytest.mark.parametrize("place", ["mid data", "border of samples", "border of members", "mid header", "end"])
def test_cut_tars(tmp_path: Path, place: str, capfd: pytest.CaptureFixture) -> None:
    """Wherever it was cut: told, by the walk itself or because the number of samples was known; a lost end mark alone
    is a warning."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    index = ShardIndex.open([str(tmp_path)])  # leaves a.idx and info.json
    os.truncate(tar, cut_places(tar)[place])
    if place == "end":
        assert len(by_stream(index)) == 20 and len(by_position(index)) == 20
        assert ShardIndex.open([str(tmp_path)]).num_samples == 20
        assert len(scan_tar(tar)) == 20 and "no end mark" in capfd.readouterr().err
        return
    words = r"(cut short within|promise).*a\.tar"
    for read in (by_position, by_stream) if place != "border of members" else (by_position,):
        with pytest.raises(UserError, match=words):
            read(index)
    if place == "border of members":  # the last sample has lost its label: told when it is used
        assert sorted(by_stream(index)[-1].fields) == ["jpg"]
    with pytest.raises(UserError, match=words):
        ShardIndex.open([str(tmp_path)])
    (tmp_path / "info.json").unlink()
    with pytest.raises(UserError, match=words):
        ShardIndex.open([str(tmp_path)])  # the index alone knows that it went on


def test_damage_in_the_middle(tmp_path: Path) -> None:
    """A header of zeros or of noise ends the tar for other readers; two tars in one file, too."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    place = scan_tar(tar)[10][0].offset - 512
    whole = tar.read_bytes()
    for patch, words in ((bytes(512), "data after the end mark"), (os.urandom(512), "damaged header")):
        tar.write_bytes(whole[:place] + patch + whole[place + 512 :])
        for attempt in (lambda: scan_tar(tar), lambda: by_stream(index_of(tar, sizes=[20]))):
            with pytest.raises(UserError, match=f"{words} at byte {place}"):
                attempt()
    tar.write_bytes(whole + whole)
    with pytest.raises(UserError, match="two tars in one file"):
        scan_tar(tar)
    tar.write_bytes(b"<!DOCTYPE html><html>Not found</html>" + bytes(1000))
    with pytest.raises(UserError, match="not a tar, a web page"):
        scan_tar(tar)


def test_index_is_dalis_and_reads_back(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", files(["x/ü", "y"]))
    samples = scan_tar(tar)
    write_index(tar, samples)
    lines = index_path(tar).read_text().splitlines()
    image, label = samples[0]
    assert lines[0] == "v1.2 2"
    assert lines[1] == f"jpg 512 {image.size} x/ü.jpg json {label.offset} 12 x/ü.json"
    assert read_index(tar) == samples
    whole = tar.read_bytes()
    for sample in samples:
        assert whole[sample[1].offset : sample[1].offset + sample[1].size] in (b'{"label": 0}', b'{"label": 1}')


@pytest.mark.parametrize("lines", [
    ["v1.2 2", "jpg 512 99999999 a.jpg", "jpg 512 5 b.jpg"], ["v1.2 2", "jpg -512 5 a.jpg", "jpg 512 5 b.jpg"],
    ["v1.2 2", "jpg 512 -5 a.jpg", "jpg 512 5 b.jpg"], ["v1.2 99999999999999999999", "jpg 512 5 a.jpg"],
    ["v1.2 1", "jpg 0 5 a.jpg"], ["v1.2 1", ""], ["v1.1 1", "jpg 512 5"], ["v1.2"], [""], ["v1.2 -1"], ["\0\1\2"],
    ["v1.2 1", "jpg 512 5 a.jpg json"], ["v1.2 1", "jpg 512 " + "9" * 5000 + " a.jpg"],
    ["v1.2 1", "jpg 1024 700 a.jpg"]])
def test_an_index_is_not_believed(tmp_path: Path, lines: list[str]) -> None:
    """Offsets out of the tar, negative, huge counts, another version, another tar: scanned anew, and the same samples
    come out."""
    tar = write_tar(tmp_path / "a.tar", files(["a", "b"]))
    index_path(tar).write_text("\n".join(lines) + "\n")
    assert read_index(tar) is None
    assert load_samples(tar) == scan_tar(tar)


def test_stale_and_foreign_indexes(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", files(["a", "b"]))
    write_index(tar, scan_tar(tar))
    os.utime(index_path(tar), (1, 1))
    assert read_index(tar) is None
    assert load_samples(tar) == scan_tar(tar) and read_index(tar) is not None  # written anew
    index_path(tar).write_bytes(b"somebody else's\n")
    assert len(load_samples(tar)) == 2
    assert index_path(tar).read_bytes() == b"somebody else's\n"  # not ours to replace
    index_path(tar).unlink()
    tar = write_tar(tmp_path / "b.tar", files(["a b"]))
    assert len(load_samples(tar)) == 1 and not index_path(tar).exists()  # the format cannot hold a blank


def test_walk_agrees_with_tarfile_on_any_names(tmp_path: Path) -> None:
    draw = random.Random(5)
    for number in range(30):
        names = ["/".join("".join(draw.choice("abü.山 _-") for _ in range(draw.randint(1, 70)))
                          for _ in range(draw.randint(1, 3)))
                 for _ in range(10)]
        format = draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
        tar = write_tar(tmp_path / f"{number}.tar",
                        [(f"{i}{name}.x", os.urandom(draw.randint(0, 1500))) for i, name in enumerate(names)],
                        format=format)
        with tarfile.open(tar) as whole:
            expected = [(m.name, m.offset_data, m.size) for m in whole if not m.name.rpartition("/")[2].startswith(".")]
        found = [(m.name, m.offset, m.size) for sample in scan_tar(tar) for m in sample]
        assert found == [entry for entry in expected if "." in entry[0].rpartition("/")[2]]
