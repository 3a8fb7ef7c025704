"""Tars that were cut or damaged within, and folders that are not finished: told, and with --on_error skip used as far
as they go."""

from __future__ import annotations

import json
import os
import socket
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from common.access.storage import Storage
from common.check_shards import main
from common.errors import UserError
from common.shards import ShardIndex
from common.tars.index import index_path, read_index
from tests.helpers import TINY, rows, run, write_shards
from tests.tars import by_position, by_stream, files, scan_tar, write_tar

KEYS = [f"{number:03d}" for number in range(10)]
SKIP = Storage(skip_errors=True)
# Where the ninth sample (of ten) is torn, and what is left: samples and fields of the last of them
CUTS = {"in its image": (8, ["jpg", "json"]), "in its label": (8, ["jpg", "json"]),
        "in its first header": (8, ["jpg", "json"]), "in its second header": (9, ["jpg"])}


def cut(tar: Path, place: str) -> None:
    image, label = scan_tar(tar)[8]
    os.truncate(tar, {"in its image": image.offset + 100, "in its label": label.offset + 3,
                      "in its first header": image.offset - 300, "in its second header": label.offset - 300}[place])


@pytest.mark.parametrize("place", list(CUTS))
def test_what_is_left_of_a_torn_shard(tmp_path: Path, place: str) -> None:
    """By position and as a stream: the whole samples before the tear, and one lost sample that tells of it."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    cut(tar, place)
    with pytest.raises(UserError, match=r"cut short within.*a\.tar"):
        ShardIndex.open([str(tmp_path)])
    num_left, fields = CUTS[place]
    for _ in range(2):
        index = ShardIndex.open([str(tmp_path)], storage=SKIP)
        assert index.num_samples == num_left + 1
        for samples in (by_position(index), by_stream(index)):
            assert [sample.key for sample in samples] == [*KEYS[:num_left], ""]
            assert [sample.count for sample in samples] == list(range(num_left + 1))
            assert sorted(samples[num_left - 1].fields) == fields
            assert [sample.cause for sample in samples if sample.fault] == ["torn shard"]
            assert "cut short within" in (samples[-1].fault or "")
    assert list(tmp_path.iterdir()) == [tar]  # nothing is kept that would make the rest look whole


@pytest.mark.parametrize("promise", ["info", "idx", "total"])
def test_what_was_promised_is_skipped_sample_by_sample(tmp_path: Path, promise: str, capfd) -> None:
    """An info.json with numbers keeps the size of the data set, so that the run it belongs to can be resumed."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    ShardIndex.open([str(tmp_path)])
    if promise == "idx":
        (tmp_path / "info.json").unlink()
    else:
        index_path(tar).unlink()
    if promise == "total":
        (tmp_path / "info.json").write_text('{"dataset size": 10, "num_classes": 2}')
    os.truncate(tar, scan_tar(tar)[6][0].offset - 512)  # between two samples
    index = ShardIndex.open([str(tmp_path)], storage=SKIP)
    size, lost = {"info": (10, 4), "idx": (7, 1), "total": (6, 0)}[promise]
    assert index.num_samples == size
    assert [sample.key for sample in by_position(index)] == [*KEYS[:6], *[""] * lost]
    assert [sample.key for sample in by_stream(index)][:7] == [*KEYS[:6], *[""] * bool(lost)][: min(size, 7)]
    assert ("promises 10 samples" in capfd.readouterr().err) == (promise == "total")


def test_no_end_mark_is_told_at_every_start(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Nobody knows how many samples there should be: a warning in training, wrong for the check."""
    tar = write_tar(tmp_path / "a.tar", files(KEYS))
    os.truncate(tar, scan_tar(tar)[6][0].offset - 512)
    for _ in range(2):
        assert ShardIndex.open([str(tmp_path)]).num_samples == 6
        err = capfd.readouterr().err
        assert err.count("\n") == 1 and err.startswith("warning: no end mark") and f"shard {tar}; copy or write" in err
    assert main([str(tmp_path), "-w", "0"]) == 1
    assert "wrong: a: no end mark, the tar was probably cut" in capfd.readouterr().out
    assert main([str(tmp_path), "-w", "0", "--fix", str(tmp_path / "fixed")]) == 1
    assert main([str(tmp_path / "fixed"), "-w", "0"]) == 0


@pytest.mark.parametrize("out", ["s", "."])
def test_an_interrupted_make_shards_is_no_data_set(tmp_path: Path, out: str, capsys: pytest.CaptureFixture) -> None:
    """Neither its OUT nor OUT/train; a folder below it that is described is another one."""
    folder = write_shards(tmp_path / "s")
    mark = tmp_path / out / ".unfinished" / "plan-12"
    mark.parent.mkdir()
    mark.touch()
    assert (main([str(folder), "-w", "0"]) == 0) == (out == ".")
    for info in (None, {"plan": ""}):
        (folder / "info.json").unlink() if info is None else (folder / "info.json").write_text(json.dumps(info))
        with pytest.raises(UserError, match="make_shards has not finished.*/s; give the same make_shards"):
            ShardIndex.open([str(folder)])
        assert main([str(folder / "*.tar")]) == 1 and "has not finished" in capsys.readouterr().err


def test_an_interrupted_make_shards_without_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Killed within its first one: what is unfinished is never advised."""
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "s-0000.tar.12.unfinished").touch()
    assert main([str(tmp_path)]) == 1 and capsys.readouterr().err.endswith("make_shards makes shards\n")
    (tmp_path / ".unfinished" / "plan-12").touch()
    (tmp_path / "empty").mkdir()
    for pattern in ("", "train", "train/", "empty", "s-0000.tar", "*.tar", "s-{0..3}.tar"):
        assert main([f"{tmp_path}/{pattern}"]) == 1
        err = capsys.readouterr().err
        assert "make_shards has not finished" in err and f"; {tmp_path}" in err


def test_the_folder_above(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("train", "val"):
        write_shards(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("; give one of its folders that do: train, val\n")


def test_a_file_that_no_memory_holds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """200 GiB, which cost no disk: the same words by position, as a stream and in the check, though an index is there;
    and what stands before and behind can be saved."""
    tar, size = write_tar(tmp_path / "a.tar", files(KEYS)), 200 << 30
    place = scan_tar(tar)[8][0].offset - 512
    huge, rest = tarfile.TarInfo("huge.jpg"), tar.read_bytes()[place:]
    huge.size = size
    with open(tar, "r+b") as file:
        file.seek(place)
        file.write(huge.tobuf(tarfile.GNU_FORMAT))
        file.seek(place + 512 + size)
        file.write(rest)
    words = f"huge.jpg has {size} bytes"
    with pytest.raises(UserError, match=f"{words}.*a.tar"):
        ShardIndex.open([str(tmp_path)])
    index = ShardIndex.open([str(tmp_path)], storage=SKIP)
    for samples in (by_position(index), by_stream(index)):
        assert [sample.key for sample in samples] == [*KEYS[:8], ""] and words in (samples[-1].fault or "")
    assert main([str(tmp_path), "-w", "0", "--fix", str(tmp_path / "fixed")]) == 1
    out = capsys.readouterr().out
    assert f"wrong: a, key huge.jpg: {words}" in out and "10 samples saved" in out
    index_path(tar).write_text(f"v1.2 1\njpg {place + 512} {size} huge.jpg\n")
    assert read_index(tar) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: socket.socket(socket.AF_UNIX).bind(str(path))])
def test_what_is_no_file_is_no_shard(tmp_path: Path, make: Callable[[Path], None], capsys) -> None:
    """A named pipe would be waited for; nor is it an index, or what describes the folder."""
    make(tmp_path / "x-1.tar")
    for storage in (Storage(), SKIP, Storage(cache_dir=str(tmp_path / "cache"))):
        with pytest.raises(UserError, match="cannot be read .*, not a file.*x-1.tar"):
            ShardIndex.open([str(tmp_path)], storage=storage)
    assert main([str(tmp_path), "-w", "0"]) == 1 and "not a file" in capsys.readouterr().out
    (tmp_path / "x-1.tar").rename(tmp_path / "x-1.idx")
    write_tar(tmp_path / "x-1.tar", files(KEYS))
    assert ShardIndex.open([str(tmp_path)]).num_samples == 10
    (tmp_path / "info.json").unlink()
    (tmp_path / "x-1.idx").rename(tmp_path / "info.json")
    with pytest.raises(UserError, match="cannot be read .*, not a file.*info.json"):
        ShardIndex.open([str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["exact", "split"])
def test_training_goes_on_without_what_is_torn(tmp_path: Path, sampling: str) -> None:
    """Two ranks in step, the tear counted by cause, and no gap for the audit."""
    folder = write_shards(tmp_path / "s", (12, 10))
    (folder / "info.json").unlink()
    cut(folder / "test-0001.tar", "in its image")
    arguments = ("-s", folder, *TINY, "-b", 4, "-w", 1, "--sampling", sampling, "--n_epochs", 2, "--trace", "save",
                 "--output", tmp_path / "run")
    done = run("train_ddp.py", *arguments, "--on_error", "skip", ranks=2).check()
    listed = rows(tmp_path / "run" / "errors.jsonl")
    assert {(row["cause"], row["shard"], row["count"]) for row in listed} == {("torn shard", "test-0001", 8)}
    assert "skipped: torn shard: cut short within the member" in done.out
    per_rank = Counter(row["rank"] for path in (tmp_path / "run" / "trace").glob("rank*.jsonl") for row in rows(path))
    assert per_rank[0] == per_rank[1]
    if sampling == "exact":
        assert len(listed) == 2
        audit = json.loads(run("common.trace", tmp_path / "run", "--json").check(0).out)
        assert [epoch["skipped"] for epoch in audit["epochs"]] == [1, 1]
