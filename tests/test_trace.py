"""Recording a trace: what a row holds, one write each, what a killed run leaves, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.collate import Batch
from common.errors import UserError
from common.sampling import Step
from common.trace import Trace, trace_path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ["attempt", "epoch", "step", "rank", "world_size", "device",
          "worker", "shard", "count", "key", "label", "replica"]


def make_batch(keys: list[str], step: int = 12) -> Batch:
    n = len(keys)
    counts = list(range(41, 41 + n))
    return Batch(torch.zeros(n, 3, 2, 2), torch.arange(n), Step(0, step, 52, 0, n),
                 [0] * n, ["train-0018"] * n, counts, keys)


def rows(folder: Path, rank: int = 0) -> list[dict]:
    return [json.loads(line) for line in trace_path(folder, rank).read_text().splitlines()]


def test_a_row_has_exactly_the_fields_of_the_format(tmp_path):
    trace = Trace(tmp_path, attempt=2, rank=1, world_size=3)
    trace.save(make_batch(["a", "b"]), "cuda:1", [0, 1])
    assert trace_path(tmp_path, 1) == tmp_path / "trace" / "rank00001.jsonl"
    (row,) = rows(tmp_path, 1)
    assert list(row) == FIELDS
    assert row == {"attempt": 2, "epoch": 0, "step": 12, "rank": 1, "world_size": 3, "device": "cuda:1",
                   "worker": [0, 0], "shard": ["train-0018"] * 2, "count": [41, 42], "key": ["a", "b"], "label": [0, 1],
                   "replica": [0, 1]}


def test_a_rank_without_samples_writes_empty_lists(tmp_path):
    Trace(tmp_path, 0, 3, 4).save(make_batch([]), "cpu", [])
    (row,) = rows(tmp_path, 3)
    assert [row[name] for name in FIELDS[6:]] == [[]] * 6 and row["step"] == 12


def test_any_key_makes_one_line(tmp_path):
    keys = ["ä/ö", 'quote"', "line\nbreak", "nul\0", os.fsdecode(b"not utf-8 \xff"), "\u2028", "🙂"]
    Trace(tmp_path, 0, 0, 1).save(make_batch(keys), "cpu", [0] * len(keys))
    assert rows(tmp_path)[0]["key"] == keys
    assert trace_path(tmp_path, 0).read_bytes().count(b"\n") == 1


def test_a_row_is_one_write(tmp_path, monkeypatch):
    writes, write = [], os.write
    trace = Trace(tmp_path, 0, 0, 1)
    monkeypatch.setattr(os, "write", lambda file, data: (writes.append(data), write(file, data))[1])
    trace.save(make_batch(["k" * 100] * 5000), "cpu", [0] * 5000)
    assert len(writes) == 1 and writes[0].endswith(b"\n")


@pytest.mark.parametrize("torn", [b"", b'{"attempt": 0, "epo', b"x" * 200_000, b"\0" * 10])
@pytest.mark.parametrize("num_whole", [0, 1, 3])
def test_a_torn_last_line_is_cut_off_before_more_is_written(tmp_path, torn, num_whole):
    trace = Trace(tmp_path, 0, 0, 1)
    for step in range(num_whole):
        trace.save(make_batch(["a"] * 3000, step), "cpu", [0] * 3000)
    trace.close()
    with open(trace_path(tmp_path, 0), "ab") as file:
        file.write(torn)
    Trace(tmp_path, 1, 0, 1).save(make_batch(["b"], 99), "cpu", [0])
    assert [row["step"] for row in rows(tmp_path)] == [*range(num_whole), 99]


def test_a_killed_run_leaves_whole_rows(tmp_path):
    code = ("import os, signal, sys; from tests.test_trace import make_batch; from common.trace import Trace\n"
            "trace = Trace(sys.argv[1], 0, 0, 1)\n"
            "for step in range(50): trace.save(make_batch(['a'] * 64, step), 'cpu', [0] * 64)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n")
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60).returncode == -9
    assert [row["step"] for row in rows(tmp_path)] == list(range(50))


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch):
    trace = Trace(tmp_path, 0, 0, 1)
    monkeypatch.setattr(os, "write", lambda file, data: len(data) - 1)
    with pytest.raises(UserError, match="no space left"):
        trace.save(make_batch(["a"]), "cpu", [0])
    os.close(trace._file)
    trace._file = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.undo()
    with pytest.raises(UserError, match="No space left"):
        trace.save(make_batch(["a"]), "cpu", [0])


def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(UserError, match="trace"):
        Trace(tmp_path, 0, 0, 1)


def test_descriptors_are_given_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for attempt in range(5):
        Trace(tmp_path, attempt, 0, 1).close()
    assert len(os.listdir("/proc/self/fd")) == before
