"""From what -s says to an index: patterns, odd paths, info.json of every shape, classes that have to be found."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.access.storage import Storage
from common.errors import UserError
from common.fields import Fields
from common.indexing.info import parse_info, read_info
from common.indexing.paths import expand, gaps, shard_names
from common.shards import ShardIndex
from tests.helpers import write_shards
from tests.tars import by_position, by_stream, files, write_tar


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a glob, braces, files, file:// and several of them; never a pattern taken for a name."""
    folder = write_shards(tmp_path / "my data:v1\\x", (1, 1, 1, 1, 1), name="data")
    names = [str(folder / f"data-{number:04d}.tar") for number in range(5)]
    for pattern in (f"{folder}", f"{folder}/data-*.tar", f"{folder}/data-{{0000..0004}}.tar"):
        assert expand([pattern]) == names
    assert expand(names[:2] + [f"{folder}/data-000[23].tar"]) == names[:4]
    assert expand([folder.as_uri()]) == names and expand([Path(names[0]).as_uri()]) == names[:1]
    assert ShardIndex.open([str(folder)]).num_samples == 5
    assert len(by_stream(ShardIndex.open([str(folder)]))) == 5
    monkeypatch.chdir(tmp_path)
    os.rename(folder, tmp_path / "a[1]{x}*:b")
    assert [Path(path).name for path in expand(["a[1]{x}*:b"])] == [Path(name).name for name in names]
    assert ShardIndex.open(["a[1]{x}*:b"]).num_samples == 5 and len(by_stream(ShardIndex.open(["a[1]{x}*:b"]))) == 5


@pytest.mark.parametrize(("pattern", "words"), [
    ("{}/no-*.tar", "nothing matches the pattern"), ("{}/no.tar", "no such shard; .*/no.tar;"),
    ("{}/t-{{0..4}}.tar", "no such shard; .*/t-3.tar;"), ("{}/t-{{0..999999999}}.tar", "more than 2000000 shards"),
    ("{}/empty", r"no shards \(\*.tar\)"), ("pipe:cat x", "a command .*--allow_pipe"),
    ("ftp://host/x.tar", "no way to read ftp://"), ("http://host/*.tar", "http cannot be listed")])
def test_patterns_that_name_nothing(tmp_path: Path, pattern: str, words: str) -> None:
    for number in (0, 1, 2, 4):
        write_tar(tmp_path / f"t-{number}.tar", files(["a"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=words):
        ShardIndex.open([pattern.format(tmp_path)])


def test_a_shard_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, (1, 1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="named twice; .*test-0001.tar"):
        expand([str(tmp_path), "test-0001.tar"])


def test_gaps_in_the_numbers_of_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert gaps(["a/d-00.tar", "a/d-01.tar", "a/d-04.tar", "b/d-09.tar"]) == ["a/d-02.tar", "a/d-03.tar"]
    assert gaps(["a/20240101.tar", "a/20250101.tar", "a/x.tar"]) == []
    for number in (0, 2):
        write_tar(tmp_path / f"t-{number}.tar", files(["a"]))
    ShardIndex.open([str(tmp_path)])
    assert "warning: the numbers of the shards have a gap" in capfd.readouterr().err


def test_names_of_shards() -> None:
    assert shard_names(["x/a.tar", "x/b.tar.gz"]) == ["a", "b"]
    assert shard_names(["x/a.tar", "y/a.tar"]) == ["x/a", "y/a"]
    assert shard_names(["https://u:p@h/a.tar?k=1", "https://h/b.tar"]) == ["a", "b"]
    assert shard_names(["a.tar", "a.tar.gz"]) == ["a~0", "a~1"] and shard_names(["pipe:cat d/x.tar"]) == ["x"]


def test_same_key_in_two_shards_and_two_patterns(tmp_path: Path) -> None:
    """Both samples are kept, and told apart by their shard."""
    one, two = write_tar(tmp_path / "one" / "t.tar", files(["a"])), write_tar(tmp_path / "two" / "t.tar", files(["a"]))
    index = ShardIndex.open([str(one.parent), str(two.parent)])
    for samples in (by_position(index), by_stream(index)):
        assert [(sample.shard, sample.key) for sample in samples] == [("one/t", "a"), ("two/t", "a")]


def test_empty_shards(tmp_path: Path) -> None:
    """End blocks alone, no bytes at all, a folder: no samples, and no search for ever."""
    write_tar(tmp_path / "t-0.tar", [])
    (tmp_path / "t-1.tar").touch()
    with pytest.raises(UserError, match="no samples; all 2 shards of .* are empty"):
        ShardIndex.open([str(tmp_path)])
    write_tar(tmp_path / "t-2.tar", files(["a", "b"]))
    index = ShardIndex.open([str(tmp_path)])
    assert index.sizes.tolist() == [0, 0, 2] and len(by_stream(index)) == len(by_position(index)) == 2


def test_compressed_tars(tmp_path: Path) -> None:
    """As a stream they are read as they are; by position through the cache, or with a word on what to do. Suffixes may
    lie."""
    plain = write_tar(tmp_path / "plain.tar", files([f"{i:02d}" for i in range(9)]))
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "b.tar").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "c.tar.bz2").write_bytes(bz2.compress(plain.read_bytes()))
    index = ShardIndex.open([str(folder)])
    assert index.sizes.tolist() == [9, 9, 9] and index.num_classes == 2 and len(by_stream(index)) == 27
    with pytest.raises(UserError, match=r"compressed shard cannot be read by position; .*a\.tar\.gz; --cache_dir"):
        by_position(index)
    with pytest.raises(UserError, match="by position"):
        index.storage.check_positions(index.paths)
    cached = ShardIndex.open([str(folder)], storage=Storage(cache_dir=str(tmp_path / "cache")))
    for samples in (by_position(cached), by_stream(cached)):
        assert [sample.key for sample in samples] == [f"{i:02d}" for i in range(9)] * 3
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 3
    data = (folder / "a.tar.gz").read_bytes()
    (folder / "a.tar.gz").write_bytes(data[: len(data) // 2])
    for storage in (Storage(), cached.storage):
        with pytest.raises(UserError, match=r"damaged|cut.*a\.tar\.gz"):
            ShardIndex.open([str(folder / "a.tar.gz")], storage=storage)


@pytest.mark.parametrize(("text", "words"), [
    ("{", "not readable as JSON"), ("[" * 100_000, "not readable as "
                                                   "JSON"), ('{"dataset size": -1}', "dataset size is -1"),
    ('{"num_classes": 0}', "num_classes is 0"), ('{"num_classes": '
                                                 '1e12}', "num_classes"), ('{"num_classes": true}', "num_classes"),
    ('{"num_classes": "two"}', "num_classes is two, no whole number from 1 to 10000000"),
    ('{"num_classes": [2]}', r"num_classes is \[2\], no whole"),
    ('{"num_classes": 1' + "0" * 400 + "}", "no whole number from"),
    ('{"classes": {"a": 1, "b": 2}}', "classes must number its 2 names from 0 to 1, each once"),
    ('{"classes": {"a": 0, "b": 0}}', "each once"), ('{"classes": {"a": "x"}}', "the number of class a is x, no whole"),
    ('{"num_classes": 2.5}', "num_classes is 2.5"), ('{"shards": 5}', "shards is no list"),
    ('{"shards": [5]}', "an entry of shards has no name: 5"), ('{"shards": [{"name": 5}]}', "no name: {"),
    ('{"shards": [{"samples": 5}]}', 'an entry of shards has no name: {"samples": 5}'),
    ('{"shards": [{"name": "t-0.tar", "samples": -5}]}', "samples is -5"),
    ('{"num_classes": 3, "classes": ["a"]}', "classes has 1 names"),
    ('{"dataset size": 1, "classes": 5}', "classes is no list"),
    ('{"dataset size": 5}', "promises 5 samples, the 1 tars hold 2"),
    ('{"shards": [{"name": "t-0.tar", "samples": 5}]}', "promises 5 samples, the tar holds 2"),
    ('{"shards": [{"name": "t-1.tar", "samples": 5}]}', "names a shard that is not there")])
def test_info_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    write_tar(tmp_path / "t-0.tar", files(["a", "b"]))
    (tmp_path / "info.json").write_text(text)
    with pytest.raises(UserError, match=words) as found:
        ShardIndex.open([str(tmp_path)])
    assert "info.json" in str(found.value)


def test_info_of_other_shapes(tmp_path: Path) -> None:
    """Two keys in any *.json; JSON about something else, or broken but not ours, is left alone."""
    write_tar(tmp_path / "t-0.tar", files(["a", "b"]))
    (tmp_path / "annotations.json").write_text('[{"num_classes": 7}]')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "dataset.json").write_text('{"dataset size": "2", "num_classes": "5"}')
    assert ShardIndex.open([str(tmp_path)]).num_classes == 5
    (tmp_path / "info.json").write_text('{"num_classes": 3, "shards": ["t-0.tar"], "classes": {"y": 1, "x": 0, "z": '
                                        '2}}')
    index = ShardIndex.open([str(tmp_path)])
    assert (index.num_classes, index.classes, index.num_samples) == (3, ("x", "y", "z"), 2)
    assert parse_info(b'{"shards": null, "num_classes": null, "dataset size": '
                      b'4}', "x").num_samples == 4  # type: ignore[union-attr]
    assert read_info(str(tmp_path / "nowhere")).path == ""
    (tmp_path / "info.json").write_text('{"classes": ["x", "y"]}')
    index = ShardIndex.open([str(tmp_path)])
    assert (index.num_classes, index.classes, index.num_samples) == (2, ("x", "y"), 2)
    assert parse_info(b'{"classes": 5}', "other.json", is_own=False) is None


def test_classes_are_found_and_kept(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, (4, 5), num_classes=3)
    (folder / "info.json").unlink()
    index = ShardIndex.open([str(folder)])
    assert (index.num_classes, index.classes) == (3, ("class0", "class1", "class2"))
    info = json.loads((folder / "info.json").read_text())
    assert info["dataset size"] == 9 and [entry["samples"] for entry in info["shards"]] == [4, 5]
    (folder / "test-0000.idx").unlink()
    assert ShardIndex.open([str(folder)]).sizes.tolist() == [4, 5]
    assert not (folder / "test-0000.idx").exists()  # info.json was enough


def test_labels_that_cannot_be_classes(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a" / "t.tar", [*files(["a", "b"]), ("c.json", b'{"label": 123456789}')])
    with pytest.raises(UserError, match=f"a label of 123456789 among 3 different ones; shard {tar}"):
        ShardIndex.open([str(tmp_path / "a")])
    write_tar(tmp_path / "b" / "t.tar", [("a.image.jpg", b""), ("a.label.txt", b"1")])
    with pytest.raises(UserError, match=r"no sample has a label: .*found the fields image.jpg, label.txt.*key a; "
                                        r"shard"):
        ShardIndex.open([str(tmp_path / "b")])
    assert ShardIndex.open([str(tmp_path / "b")], Fields(label_field="label.txt")).num_classes == 2


def test_folders_must_agree(tmp_path: Path) -> None:
    one, two = write_shards(tmp_path / "a", (1,), num_classes=2), write_shards(tmp_path / "b", (1,), num_classes=3)
    with pytest.raises(UserError, match="differ in num_classes: 2 and 3"):
        ShardIndex.open([str(one), str(two)])


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "a", (2,))
    (folder / "info.json").unlink()

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert ShardIndex.open([str(folder)]).num_samples == 2
    assert [path.name for path in folder.iterdir()] == ["test-0000.tar"]


def test_digest_and_pickle(tmp_path: Path) -> None:
    index = ShardIndex.open([str(write_shards(tmp_path / "a", (2, 3)))])
    assert pickle.loads(pickle.dumps(index)).digest == index.digest
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert ShardIndex.open([str(tmp_path / "b")]).digest == index.digest
    changed = ShardIndex(index.paths, index.names, np.array([2, 4]), 2)
    assert changed.digest != index.digest
