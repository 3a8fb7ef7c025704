"""Samples that cannot be used: the run stops and names one, or goes on without them, in step and counted by cause."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_single
from common.collate import Batch, SkippedSample
from common.config import TrainConfig
from common.distributed import World
from common.errors import UserError
from common.running.error_log import ErrorLog, listed
from common.sampling import Step
from tests.helpers import TINY, jpeg, rows, run, trace, write_shards
from tests.tars import write_tar

SIZES = (40, 30, 30)
BROKEN = {3: b"{", 11: b"", 17: b'{"label": 1', 45: b'{"label": "cat"}', 50: b'{"label": 99}', 71: None, 99: None}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 samples: three with a bad json, two with none, one with a string for a label, one with a label out of
    range."""
    folder, number = tmp_path_factory.mktemp("broken"), 0
    for shard, size in enumerate(SIZES):
        members = []
        for _ in range(size):
            label = BROKEN.get(number, json.dumps({"label": number % 2}).encode())
            members += [(f"{number:03d}.jpg", jpeg(number % 2, number)),
                        *([(f"{number:03d}.json", label)] if label is not None else [])]
            number += 1
        write_tar(folder / f"t-{shard}.tar", members)
    (folder / "info.json").write_text('{"dataset size": 100, "num_classes": 2}')
    return folder


@pytest.mark.slow
def test_skipped_on_two_ranks(broken: Path, tmp_path: Path) -> None:
    """93 of 100 are trained on, ranks take equal steps, and the audit takes what was skipped for no gap."""
    output = tmp_path / "run"
    done = run("train_ddp.py", "-s", broken, "--val_path", write_tar(tmp_path / "v" / "v.tar", [
        ("a.jpg", jpeg(0, 0)), ("a.json", b'{"label": 0}'), ("b.json", b'{"label": 1}')]), *TINY, "--sampling", "exact",
        "-b", 4, "-w", 1,
        "--n_epochs", 1, "--on_error", "skip", "--trace", "save", "--output", output, ranks=2).check()
    listed = rows(output / "errors.jsonl")
    found = [row for row in listed if row["kind"] == "train"]
    assert {int(row["key"]) for row in found} == set(BROKEN)
    assert Counter(row["cause"] for row in found) == {"broken json": 2, "no label": 3, "bad label": 1,
                                                      "label out of range": 1}
    assert [(row["kind"], row["key"], row["cause"]) for row in listed
            if row["kind"] != "train"] == [("val", "b", "no image")]
    for row in found:
        assert row["epoch"] == 0 and row["shard"] == f"t-{sum(int(row['key']) >= border for border in (40, 70))}"
        assert row["count"] == int(row["key"]) - sum(SIZES[: int(row["shard"][2:])])
    traced = trace(output)
    assert [len(lines) for lines in traced.values()] == [13, 13]
    keys = [int(key) for lines in traced.values() for row in lines for key in row["key"]]
    assert sorted(keys) == sorted(set(range(100)) - set(BROKEN))
    assert rows(output / "metrics.jsonl")[-1]["samples"] == 1
    words = "skipped 8 samples: 3 no label, 2 broken json, 1 bad label,"
    told = [line for line in done.out.splitlines() if line.startswith(words)]
    assert len(told) == 1
    audit = run("common.trace", output, "--json").check()
    assert json.loads(audit.out)["epochs"][0]["skipped"] == 7


def test_stops_at_the_first_and_names_it(broken: Path, tmp_path: Path) -> None:
    stopped = run("train_single.py", "-s", broken, *TINY, "-b", 4, "-w", 1, "--shuffle", -1, "--output",
                  tmp_path / "run").check(1)
    lines = stopped.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: broken json: "
                                                   "") and "shard t-0, key 003, count 3;" in lines[0]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_names_are_shown_as_a_terminal_may_see_them(tmp_path: Path) -> None:
    """Keys and fields with line feeds and escape sequences, or as long as a PAX header allows."""
    folder, long = tmp_path / "s", "L" * 200_000
    members = [("0.jpg", jpeg(0, 0)), ("0.cls", b"0"), ("1.jpg", jpeg(0, 1)), ("1.cls", b"0"),
               ("a\nerror: b\x1b[31m.jpg", b"no image"), ("a\nerror: b\x1b[31m.cls", b"0"),
               (f"{long}.jpg", jpeg(0, 2)), (f"{long}.{long}\x1b", b"0")]
    write_tar(folder / "t.tar", members, format=tarfile.PAX_FORMAT)
    arguments = ("-s", folder, *TINY, "-b", 2, "-w", 0, "--n_epochs", 1, "--shuffle", -1)
    stopped = run("train_single.py", *arguments, "--output", tmp_path / "a").check(1)
    skipped = run("train_single.py", *arguments, "--on_error", "skip", "--output", tmp_path / "b").check()
    checked = run("common.check_shards", folder).check(1)
    assert stopped.err.count("\n") == 1 and r"key a\nerror: b\x1b[31m, count 2" in stopped.err
    assert skipped.out.count("skipped: ") == 2 and checked.out.count("wrong: ") == 2
    for text in (stopped.err, skipped.out, checked.out):
        assert "\x1b" not in text and not [line for line in text.splitlines() if len(line) > 1000]


def test_nothing_but_corrupt_images(tmp_path: Path) -> None:
    """The run stops with the causes; the log has a line per cause and interval, not one per sample."""
    members = []
    for number in range(60):
        data = jpeg(0, number)
        members += [(f"{number}.jpg", data[: len(data) // 2] if number % 2 else b"<html>"),
                    (f"{number}.json", b'{"label": 0}')]
    write_tar(tmp_path / "s" / "t.tar", members)
    stopped = run("train_single.py", "-s", tmp_path / "s", *TINY, "-b", 4, "-w", 1, "--sampling", "resampled",
                  "--n_epochs", 50, "--on_error", "skip",
                  "--max_errors", 20, "--output", tmp_path / "run").check(1)
    lines = stopped.err.strip().splitlines()
    assert re.match(r"error: more than --max_errors 20 samples could not be used, 2[1-4] samples: ", lines[-1])
    assert "truncated" in lines[-1] and "not an image" in lines[-1]
    assert 1 <= sum(line.startswith("skipped: ") for line in stopped.out.splitlines()) <= 2
    listed = rows(tmp_path / "run" / "errors.jsonl")
    assert len({row["count"] for row in listed}) == int(lines[-1].partition("used, ")[2].partition(" ")[0])


def corrupt(folder: Path, bad: Callable[[int], bool], size: int = 8) -> Path:
    """A shard of `size` samples, some of which are no images."""
    write_tar(folder / "t.tar", [(f"{i}.{name}", data) for i in range(size) for name, data in (
        ("jpg", b"<html>" if bad(i) else jpeg(i % 2, i)), ("cls", b"%d" % (i % 2)))])
    return folder


def train(*flags: object) -> None:
    """A run of one epoch, in this process."""
    config = TrainConfig.from_command_line("", list(map(str, (*TINY, "-b", 4, "-w", 0, "--n_epochs", 1, *flags))))
    train_single.train(config, World(0, 1, 0, torch.device("cpu")), [torch.device("cpu")])


@pytest.mark.parametrize("flags", [("--sampling", "exact"), ("--sampling", "split"), ("--sampling", "resampled"),
                                   ("--max_steps", 1)])
def test_an_epoch_without_a_usable_sample_is_no_epoch(tmp_path: Path, flags: tuple[object, ...]) -> None:
    folder = corrupt(tmp_path / "s", lambda i: True)
    with pytest.raises(UserError, match=r"not one sample of epoch 0 could be used, \d samples: \d not an image \(such "
                                        r"as not an image.*shard t, key .*errors.jsonl; python -m common.check_shards"):
        train("-s", folder, "--on_error", "skip", *flags, "--output", tmp_path / "run")
    assert not (tmp_path / "run" / "last.pt").exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_nothing_usable_is_told_once_on_two_ranks(tmp_path: Path) -> None:
    result = run("train_ddp.py", "-s", corrupt(tmp_path / "s", lambda i: True, 9), *TINY, "-b", 2, "-w", 1,
                 "--sampling", "exact", "--on_error", "skip", "--output", tmp_path / "run", ranks=2).check(1)
    line, = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: not one sample of epoch 0 could be used, 9 samples: 9 not an image (such as ")


def test_a_validation_set_without_a_usable_sample(tmp_path: Path) -> None:
    """Its own causes are told, not what training has skipped."""
    with pytest.raises(UserError, match=r"not one sample of --val_path could be used, 5 samples: 5 not an image"):
        train("-s", corrupt(tmp_path / "s", lambda i: i == 3), "--val_path", corrupt(tmp_path / "v", lambda i: True, 5),
              "--on_error", "skip", "--output", tmp_path / "run")


def test_a_bad_sample_counts_once_whoever_reads_it(tmp_path: Path) -> None:
    """What all ranks have skipped meets at a check: in the next epoch another rank may read a sample."""
    log = ErrorLog(tmp_path / "errors.jsonl", TwoAlike(0, 2, 0, torch.device("cpu")), max_errors=3)
    for epoch in range(3):
        assert log.add(skipping(epoch, 5, 6)) == 2
        log.check(4)
        assert log.add(skipping(epoch, 9)) == 1
        log.check(2)
        log.check(0)
    assert log.skipped() == "3 samples: 3 corrupt" and len(rows(tmp_path / "errors.jsonl")) == 18
    assert log.add(skipping(3, 5), kind="val") == 1
    with pytest.raises(UserError, match="more than --max_errors 3 samples could not be used, 4 samples: 4 corrupt"):
        log.check(1)


class TwoAlike(World):
    """Two ranks that bring the same."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def on_main(self, function: Callable[[], Any]) -> Any:
        return function()


def test_what_a_kill_has_torn_is_no_part_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line does not join it; and a full disk is told, not half a line left as if all were well."""
    path = tmp_path / "errors.jsonl"
    path.write_text('{"kind": "train", "shard": "s", "count": 1, "cause": "x"}\n{"kind": "tra')
    log = ErrorLog(path, World(0, 1, 0, torch.device("cpu")), max_errors=9)
    log.check(log.add(skipping(0, 5)))
    assert [row["count"] for row in rows(path)] == [1, 5]
    assert listed(path) == {("train", "s", 1): "x", ("train", "s", 5): "corrupt"}
    monkeypatch.setattr("os.write", lambda file, data, write=os.write: write(file, data[:7]))
    with pytest.raises(UserError, match=r"cannot write \(No space left on device\); .*errors.jsonl; free some space"):
        log.check(log.add(skipping(0, 6)))


def test_a_resumed_run_remembers_what_it_has_skipped(tmp_path: Path) -> None:
    """Else a run that Slurm starts again and again would never reach --max_errors."""
    folder, output = corrupt(tmp_path / "s", lambda i: i % 2 == 0), tmp_path / "run"
    flags = ("-s", folder, "--on_error", "skip", "--shuffle", -1, "--seed", 0, "--output", output)
    train(*flags, "--max_steps", 1)  # 2 of the first 4 are bad
    with open(output / "errors.jsonl", "a") as file:
        file.write('{"kind": "train", "sha')  # of a killed rank
    with pytest.raises(UserError, match="more than --max_errors 3 samples could not be used, 4 samples: 4 not an im"):
        train(*flags, "--max_errors", 3, "--resume", "auto")
    train(*flags, "--max_errors", 4, "--resume", "auto")
    assert json.loads((output / "status.json").read_text())["state"] == "complete"


def skipping(epoch: int, *counts: int) -> Batch:
    bad = [SkippedSample("corrupt", "corrupt: x", "s", count, "k") for count in counts]
    return Batch(torch.empty(0), torch.empty(0), Step(epoch, 0, 0, 0, 4), [], [], [], [], skipped=bad)


def test_log_lines(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one per cause in 30 s; every sample is listed, on one line whatever its key holds."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = ErrorLog(tmp_path / "errors.jsonl", TwoAlike(1, 2, 1, torch.device("cpu")), max_errors=9, attempt=2)
    bad = [SkippedSample("corrupt", "corrupt: x", "s", 5, "a\nb\udc80"),
           SkippedSample("no label", "no label: y", "s", 6, "c")] * 50
    batch = Batch(torch.empty(0), torch.empty(0), Step(3, 7, 9, 0, 4), [], [], [], [], skipped=bad)
    assert log.add(batch) == 100
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and r"key a\nb\udc80; rank 1, 1 of this cause so far" in told[0]
    now[0] += 31
    log.add(batch)
    assert len(capsys.readouterr().out.splitlines()) == 2
    log.check(200)
    found = rows(tmp_path / "errors.jsonl")
    assert len(found) == 400
    assert found[0] == {"attempt": 2, "kind": "train", "epoch": 3, "step": 7, "rank": 1, "cause": "corrupt",
                         "detail": "corrupt: x",
                         "shard": "s", "count": 5, "key": "a\nb\udc80"}


@pytest.mark.parametrize("sampling", ["exact", "split"])
def test_fields_that_are_not_there(tmp_path: Path, sampling: str) -> None:
    """Image and label under other names: the first sample's fields are listed, whether the number of classes is known
    or not."""
    folder = tmp_path / "s"
    write_tar(folder / "t.tar", [(f"{key}.{name}", jpeg(0, 0) if name == "image.jpg" else b"1") for key in "abcd"
                                 for name in ("image.jpg", "label.txt")])
    words = "wanted json or cls, found the fields image.jpg, label.txt"
    arguments = ("-s", folder, *TINY, "-b", 2, "-w", 1, "--sampling", sampling, "--n_epochs", 1)
    if sampling == "split":
        (folder / "info.json").write_text('{"dataset size": 4, "num_classes": 2}')
    assert words in run("train_single.py", *arguments, "--output", tmp_path / "a").check(1).err
    if sampling == "exact":
        run("train_single.py", *arguments, "--label_field", "label.txt", "--image_field", "image.jpg", "--output",
            tmp_path / "b").check()


def test_an_empty_shard_is_named_once(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", (4, 4))
    (folder / "info.json").unlink()
    write_tar(folder / "test-0002.tar", [])
    done = run("train_single.py", "-s", folder, *TINY, "-b", 2, "-w", 2, "--sampling", "split", "--n_epochs", 2,
               "--output", tmp_path / "run").check()
    told = [line for line in done.out.splitlines() if "are empty" in line]
    assert told == ["warning: 1 shards are empty, such as test-0002"]
