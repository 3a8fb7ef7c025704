"""What is wrong is found ahead of time, by shard and key; what can be saved is saved."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common import check_shards
from common.check_shards import main
from common.errors import UserError
from common.fields import Fields
from common.shards import ShardIndex
from common.tars.index import read_index, write_index
from tests.helpers import command, end, jpeg, run, start, write_shards
from tests.tars import by_position, by_stream, files, scan_tar, write_tar, write_two_kinds

KEYS = [f"{number:02d}" for number in range(10)]


def checked(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "-w", "0", "--json"])
    printed = capsys.readouterr()
    assert "JPEG" not in printed.err  # nothing that a C library says on its own
    return code, json.loads(printed.out)


def test_nothing_is_wrong(tmp_path: Path) -> None:
    """In processes of its own, as a user starts it."""
    done = run("common.check_shards", write_shards(tmp_path), "-w", 2).check(0)
    assert done.out.splitlines() == [
        "3 shards, 20 samples, 20 of them usable, 2 classes; nothing is wrong",
        "exact and resampled feed any number of ranks × workers; split at most 3 ranks, and every worker if ranks × "
        "workers are at most 3"]
    assert "\r" not in done.err


def test_an_interrupted_fix_leaves_no_shard_that_could_be_read(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Some of the clean shards would pass for a whole data set. The same command again makes them all."""
    shards, out = write_shards(tmp_path / "in"), tmp_path / "out"

    def interrupted(*arguments: Any, check: Any = check_shards.check) -> None:
        check(*arguments)
        assert len(list(out.glob(".fixing-*/*.tar"))) == 3
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(check_shards, "check", interrupted)
        main([str(shards), "--fix", str(out), "-w", "0"])
    assert list(out.iterdir()) == []
    assert main([str(shards), "--fix", str(out), "-w", "0"]) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["info.json", *(f"test-{number:04d}.{kind}" for number in range(3) for kind in ("tar", "idx"))])
    assert ShardIndex.open([str(out)]).num_samples == 20


def test_a_label_that_training_refuses(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One of a million among two would make a model of a million classes."""
    write_tar(tmp_path / "t.tar", [(f"{i}.{name}", data) for i, label in enumerate((0, 1, 999_999)) for name, data in (
        ("jpg", jpeg(0, i)), ("cls", b"%d" % label))])
    assert main([str(tmp_path), "--json", "-w", "0"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["causes"] == {"stray label": 1} and not found["warnings"]
    with pytest.raises(UserError, match="a label of 999999 among 3 different ones"):
        ShardIndex.open([str(tmp_path)], Fields(), labels=True)


def test_the_first_samples_field_is_the_image_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_two_kinds(tmp_path)
    assert main([str(tmp_path), "-w", "0"]) == 0, capsys.readouterr().out


def broken_folder(folder: Path) -> Path:
    """One fault of each kind, each in a shard of its own with ten samples."""
    good = files(KEYS)
    half = good[6][1][: len(good[6][1]) // 2]
    hole = half + b"\xff\xd9"  # both ends whole: decoders pad it
    faults = {
        "image": [*good[:6], ("03.jpg", half), *good[7:]], "hole": [*good[:6], ("03.jpg", hole), *good[7:]],
        "label": [*good[:7], ("03.json", b'{"label": 7}'), *good[8:]],
        "json": [*good[:7], ("03.json", b"{"), *good[8:]], "missing": [*good[:7], *good[8:]],
        "twice": [*good[:8], ("03.JPG", good[6][1]), *good[8:]],
        "other": [*good[:8], ("03.jpg", good[8][1]), *good[8:]], "apart": [*good[:6], good[7], *good[8:], good[6]]}
    for name, members in faults.items():
        write_tar(folder / f"{name}.tar", members)
    cut = write_tar(folder / "cut.tar", good)
    os.truncate(cut, scan_tar(cut)[3][0].offset + 100)
    damaged = write_tar(folder / "damaged.tar", good)
    place, whole = scan_tar(damaged)[3][0].offset - 512, damaged.read_bytes()
    damaged.write_bytes(whole[:place] + b"\xff" * 512 + whole[place + 512 :])
    (folder / "page.tar").write_bytes(b"<html>" * 200)
    (folder / "info.json").write_text('{"num_classes": 2}')
    return folder


EXPECTED = {  # shard: (cause, key), samples that are saved
    "image": (("truncated", "03"), 9), "hole": (("damaged image", "03"), 9),
    "label": (("label out of range", "03"), 9), "json": (("broken json", "03"), 9),
    "missing": (("no label", "03"), 9), "twice": (("torn sample", "03"), 10), "other": (("torn sample", "03"), 9),
    "apart": (("torn sample", "03"), 10), "cut": (("damaged tar", ""), 3), "damaged": (("damaged tar", ""), 9),
    "page": (("damaged tar", ""), 0)}


def test_every_kind_of_fault_and_what_can_be_saved(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    capsys, folder = capfd, broken_folder(tmp_path / "broken")
    code, report = checked(capsys, folder, "--fix", tmp_path / "clean")
    assert code == 1
    first = {}
    for problem in report["problems"]:
        first.setdefault(problem["shard"], (problem["cause"], problem["key"]))
    assert first == {name: problem for name, (problem, _) in EXPECTED.items()}
    assert {p["key"]: p["count"] for p in report["problems"] if p["shard"] == "image"} == {"03": 3}
    saved = {name: number for name, (_, number) in EXPECTED.items() if number}
    index = ShardIndex.open([str(tmp_path / "clean")])
    assert dict(zip(index.names, index.sizes.tolist(), strict=True)) == saved
    assert [sample.key for sample in by_position(index)] == [sample.key for sample in by_stream(index)]
    assert all(read_index(path) == scan_tar(path) for path in index.paths)
    assert checked(capsys, tmp_path / "clean") == (0, {
        "shards": 10, "samples": 86, "usable": 86, "num_classes": 2, "labels": index_labels(index), "causes": {},
        "problems": [], "warnings": [],
        "feeds": {"exact": None, "resampled": None, "split": 10}})
    assert len((tmp_path / "clean" / "rejected.jsonl").read_text().splitlines()) == len(report["problems"])
    assert main([str(folder), "--fix", str(tmp_path / "clean")]) == 1
    assert "shards are here already" in capsys.readouterr().err


def index_labels(index: ShardIndex) -> dict[str, int]:
    labels = [str(json.loads(sample.fields["json"])["label"]) for sample in by_position(index)]
    return {label: labels.count(label) for label in sorted(set(labels))}


def test_the_report_for_people(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    members = []
    for number in range(30):
        members += [(f"{number:02d}.jpg", b"x"), (f"{number:02d}.json", b'{"label": 1}')]
    write_tar(tmp_path / "t-0.tar", [*members, ("fine.jpg", jpeg(1, 0)), ("fine.json", b'{"label": 1}')])
    write_tar(tmp_path / "t-2.tar", [])
    assert main([str(tmp_path), "-w", "0"]) == 1
    text = capsys.readouterr().out.splitlines()
    assert text[0].startswith("wrong: t-0, key 00, count 0: not an "
                              "image") and text[20] == "wrong: 10 more: not an image"
    assert text[21:24] == ["warning: 1 of 2 classes have no usable sample", "warning: 1 shards are empty, such as t-2",
                           f"warning: 1 numbers are missing between the shards, such as {tmp_path}/t-1.tar"]
    assert text[24] == "2 shards, 31 samples, 1 of them usable, 2 classes; 30 problems: 30 not an image"


def test_promises_that_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_shards(tmp_path / "a", (4, 4))
    ShardIndex.open([str(folder)])  # leaves the index
    cut = scan_tar(folder / "test-0001.tar")[3][0].offset - 512
    os.truncate(folder / "test-0001.tar", cut)
    code, report = checked(capsys, folder)
    assert code == 1 and set(report["causes"]) == {"damaged tar", "wrong number of samples"}
    (folder / "info.json").write_text("[")
    code, report = checked(capsys, folder)
    assert code == 1 and "wrong description" in report["causes"]


@pytest.mark.parametrize("change", ["offsets", "sizes", "names", "fewer", "order"])
def test_an_index_that_points_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture, change: str) -> None:
    """Training looks at its first and last entry alone."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS, label="cls"))
    samples = scan_tar(tar)
    (image, label), (_, other) = samples[3], samples[4]
    if change == "offsets":
        samples[3], samples[4][1] = [image, label._replace(offset=other.offset)], other._replace(offset=label.offset)
    elif change == "fewer":
        del samples[3]
    elif change == "order":
        samples[3], samples[4] = samples[4], samples[3]
    else:
        samples[3] = [image, label._replace(**{"sizes": {"size": 0}, "names": {"name": "07.cls"}}[change])]
    write_index(tar, samples)
    assert read_index(tar) == samples
    code, report = checked(capsys, tmp_path)
    assert code == 1 and report["causes"] == {"wrong index": 1}
    assert (report["problems"][0]["key"], report["problems"][0]["count"]) == ("03", 3)


def test_compressed_and_odd_shards(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plain = write_tar(tmp_path / "x" / "plain.tar", files(["a b/ü", "c" * 120 + ".d"]), format=2)
    (tmp_path / "s:1").mkdir()
    (tmp_path / "s:1" / "a.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    code, report = checked(capsys, tmp_path / "s:1", "--fix", tmp_path / "clean", "--label_field", "json",
                           "--image_field", "jpg")
    assert (code, report["samples"]) == (1, 2)
    assert report["causes"] == {"no label": 1}  # the field is d.json: the key ends at the first dot
    assert [sample.key for sample in by_position(ShardIndex.open([str(tmp_path / "clean")]))] == ["a_b/ü"]


def test_clean_shards_do_not_overwrite_each_other(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Names that differ in a slash alone; and none becomes a hidden file, which no reader would find."""
    paths = [write_tar(tmp_path / name, files([name[:1] + key for key in KEYS[:4]]))
             for name in ("a-b/c.tar", "a/b-c.tar", "d/c.tar", "e/.c.tar")]
    assert main([*map(str, paths), "--fix", str(tmp_path / "fixed"), "-w", "0"]) == 0
    assert "16 samples saved in 4 clean shards" in capsys.readouterr().out
    assert ShardIndex.open([str(tmp_path / "fixed")]).num_samples == 16
    assert main([str(tmp_path / "fixed"), "-w", "0"]) == 0


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    """No file may be longer than 8 kB: nothing half written is left, and no shard that is not described is passed."""
    folder, out = write_shards(tmp_path / "s"), tmp_path / "out"
    for num_workers in (1, 2):
        line = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-",
                *command("common.check_shards", folder, "-w", num_workers, "--fix", out)]
        result = end(start(line)).check(1)
        assert result.err.startswith("error: cannot write a shard (File too large); ") and result.err.count("\n") == 1
        assert not [path for path in out.iterdir() if path.name.startswith(".") or path.name == "info.json"]
        for path in out.iterdir():
            path.unlink()


def test_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(tmp_path)]) == 1 and "no shards" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        main(["--nonsense"])
    assert usage.value.code == 2
