"""What a run says: lines, bars, metrics.jsonl and TensorBoard, and that a restart repeats none of it."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.metrics import ConfusionMatrix
from common.report import Report, ReportSettings
from common.reporting.metrics_file import MetricsFile
from common.reporting.tensorboard import PATTERN, accuracy_table, class_accuracy, image_grid
from common.sampling import Progress

ROOT = Path(__file__).parents[1]
VAL = {"loss": 1.5, "top1": 25.0, "top5": 75.0, "samples": 8, "more": object()}


@dataclass
class Meter:
    value: float
    mean: float = 0.0


def confused(matrix: np.ndarray) -> ConfusionMatrix:
    """What a validation has counted, from (true, predicted)."""
    confusion = ConfusionMatrix(len(matrix))
    confusion.pairs.update({pair: int(count) for pair, count in np.ndenumerate(matrix) if count})
    return confusion


class Bench:
    """A report with a clock that moves only when told to, and streams that are no terminals."""

    def __init__(self, output: Path, **settings: Any):
        self.now, self.text, self.terminal = 0.0, io.StringIO(), io.StringIO()
        defaults = {"num_epochs": 2, "steps_per_epoch": 10, "text": self.text, "terminal": self.terminal}
        self.output = output
        self.report = Report(ReportSettings(output, clock=lambda: self.now, **{**defaults, **settings}))

    def step(self, step: int, seconds: float = 1.0, **values: Any) -> None:
        """Step number `step` of the run, the first being 1, in epochs of `steps_per_epoch`."""
        self.now += seconds
        per_epoch = self.report.settings.steps_per_epoch
        given = {"epoch": (step - 1) // per_epoch, "loss": Meter(2.0), "top1": Meter(50.0), "lr": 0.1, "num_images": 4,
                 "wait_seconds": 0.0}
        self.report.train(step=step, **{**given, **values})

    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        return [row for row in read_rows(self.output) if row["kind"] == kind]


def read_rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read_events(output: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def steps_of(output: Path, tag: str = "train/loss") -> list[int]:
    return [event.step for event in read_events(output).Scalars(tag)]


# Times

def test_reports_come_at_growing_intervals_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps_per_epoch=100, report_seconds=10, report_growth=2.0)
    for step in range(1, 101):
        bench.step(step)
    assert [row["step"] for row in bench.rows()] == [10, 30, 70, 100]
    assert len(bench.lines()) == 4


def test_a_short_run_has_a_row_for_every_epoch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_epochs=3, steps_per_epoch=2)
    for step in range(1, 7):
        bench.step(step, seconds=0.01)
        assert len(bench.rows() if step > 1 else []) == step // 2  # at the end of an epoch, not at the next one's start
    assert [(row["epoch"], row["step"]) for row in bench.rows()] == [(0, 2), (1, 4), (2, 6)]


def test_zero_seconds_report_every_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    for step in range(1, 5):
        bench.step(step)
    assert [row["step"] for row in bench.rows()] == [1, 2, 3, 4]


def test_an_epoch_that_ends_early_is_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(1, epoch=0)
    bench.step(2, epoch=1)  # fewer steps than announced
    assert [(row["epoch"], row["step"]) for row in bench.rows()] == [(0, 1)]
    bench.report.close()
    bench.report.close()
    assert [(row["epoch"], row["step"]) for row in bench.rows()] == [(0, 1), (1, 2)]


# Numbers

def test_a_row_has_means_over_images_and_rates_over_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=6, attempt=3)
    bench.step(1, seconds=5, loss=Meter(1.0), top1=Meter(0.0), num_images=8, wait_seconds=4.5)  # cold: not timed
    bench.step(2, seconds=1.5, loss=Meter(4.0), top1=Meter(100.0), num_images=4, wait_seconds=0.3, lr=0.05)
    row, = bench.rows()
    assert row.pop("host_memory_mb") > 1
    assert row == {"kind": "train", "epoch": 0, "step": 2, "loss": 2.0, "top1": pytest.approx(100 / 3), "lr": 0.05,
                   "images_per_second": round(4 / 1.5, 2), "data_wait": 0.2, "attempt": 3}
    bench.step(3, seconds=10, num_images=20, wait_seconds=1)
    assert (bench.rows()[1]["images_per_second"], bench.rows()[1]["data_wait"]) == (2.0, 0.1)


def test_where_no_step_was_timed_there_are_no_rates(tmp_path: Path) -> None:
    """The first step of a start is not, since its wait is that of a cold start: a rate of 0.0 would be a lie."""
    bench = Bench(tmp_path, steps_per_epoch=1)
    bench.now += 1
    bench.step(1)
    bench.now += 1
    bench.step(2, num_images=6, wait_seconds=0.25)
    bench.report.close()
    first, second = bench.rows()
    assert not {"images_per_second", "data_wait"} & set(first)
    assert (second["images_per_second"], second["data_wait"]) == (3.0, 0.125)
    assert bench.lines() == ["epoch 0, step 1: loss 2.0000, top1 50.00 %, lr 0.1",
                             "epoch 1, step 2: loss 2.0000, top1 50.00 %, lr 0.1, 3.0 images/s, "
                             "waiting for input 12%"]
    assert steps_of(tmp_path) == [1, 2] and steps_of(tmp_path, "train/data_wait") == [2]


def test_time_between_epochs_is_not_training_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps_per_epoch=2)
    bench.step(1)
    bench.step(2)
    bench.now += 1000
    bench.report.validation(0, 2, VAL)
    bench.step(3, seconds=2, num_images=10)
    bench.step(4, seconds=2, num_images=10)
    assert bench.rows()[1]["images_per_second"] == 5.0


def test_a_step_without_images_and_a_loss_that_is_no_number_leave_json(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    bench.step(1, num_images=0)
    bench.step(2, loss=Meter(float("nan")), top1=Meter(float("inf")))
    assert [row["loss"] for row in bench.rows()] == [0.0, None] and bench.rows()[1]["top1"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_validation_row_line_and_scalars(tmp_path: Path) -> None:
    bench = Bench(tmp_path, attempt=1)
    bench.step(1)
    bench.report.validation(0, 1, VAL)
    row = {"kind": "val", "epoch": 0, "step": 1, "loss": 1.5, "top1": 25.0, "top5": 75.0, "samples": 8, "attempt": 1}
    assert bench.rows("val") == [row]
    assert bench.lines()[-1] == "epoch 0, step 1: validation loss 1.5, top1 25 %, top5 75 %, 8 samples"
    assert [row["kind"] for row in read_rows(tmp_path)] == ["train", "val"]  # what was pending comes first
    bench.report.close()
    events = read_events(tmp_path)
    scalars = [event for tag in ("val/top1", "val/top5") for event in events.Scalars(tag)]
    assert [(event.step, event.value) for event in scalars] == [(1, 25.0), (1, 75.0)]


def test_high_data_wait_is_said_with_what_to_turn_but_not_at_every_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0, steps_per_epoch=100)
    for step in range(1, 12):
        bench.step(step, wait_seconds=0.43)
    hints = [number for number, line in enumerate(bench.lines()) if line.startswith("note:")]
    assert hints == [2, 8] and len(bench.lines()) == 13  # after reports 2 and 7
    assert all(word in bench.lines()[2] for word in ("43%", "-w", "--resize", "--image_size"))


@pytest.mark.parametrize(("report_seconds", "num_steps", "wait_seconds"), [(0, 8, 0.1), (5, 5, 0.9)])
def test_no_hint_for_a_low_data_wait_or_the_first_batches(tmp_path: Path, report_seconds: float, num_steps: int,
                                                          wait_seconds: float) -> None:
    bench = Bench(tmp_path, report_seconds=report_seconds)
    for step in range(1, num_steps + 1):
        bench.step(step, wait_seconds=wait_seconds)
    assert bench.lines() and not any(line.startswith("note:") for line in bench.lines())


# Who speaks

def test_other_ranks_are_silent_and_touch_no_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "never made", is_main=False, report_seconds=0)
    with bench.report as report:
        bench.step(1)
        report.validation(0, 1, VAL)
        report.note("hello")
        report.config({"lr": 1})
        report.images(Images(2), None)
        report.confusion(confused(np.eye(2)), None, 1)
        report.figure("x", object(), 1)
    assert bench.text.getvalue() == bench.terminal.getvalue() == "" and not (tmp_path / "never made").exists()


def test_a_log_has_no_carriage_return(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    bench.report.note("two\r\nlines\rthree")
    for step in range(1, 21):
        bench.step(step)
    bench.report.validation(1, 20, VAL)
    bench.report.close()
    written = bench.text.getvalue() + bench.terminal.getvalue()
    assert "\r" not in written and "\x1b" not in written
    assert bench.lines()[:3] == ["two", "lines", "three"]
    assert bench.terminal.getvalue() == ""


def test_lines_survive_narrow_encodings_and_a_reader_that_left(tmp_path: Path) -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Bench(tmp_path, text=latin).report.note("Größe")
    assert latin.buffer.getvalue() == b"Gr\\xf6\\xdfe\n"

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Bench(tmp_path, text=Gone()).report.note("nobody listens")


def test_lines_are_printed_under_the_lock(tmp_path: Path) -> None:
    class Lock:
        def __init__(self) -> None:
            self.lock, self.num_taken = threading.Lock(), 0  # not re-entrant: nothing may take it twice

        def acquire(self, *arguments: Any, **named: Any) -> bool:
            self.num_taken += 1
            return self.lock.acquire(timeout=5) or pytest.fail("taken twice")

        def release(self) -> None:
            self.lock.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *exception: object) -> None:
            self.release()

    lock = Lock()
    bench = Bench(tmp_path, lock=lock)
    bench.report.note("hello")
    assert lock.num_taken == 1 and not lock.lock.locked()
    master, terminal = open_terminal(80)
    bars = Bench(tmp_path, lock=lock, terminal=terminal)
    for step in range(1, 21):
        bars.step(step)
    bars.report.close()
    assert read_terminal(master, terminal) and not lock.lock.locked()


# Bars

def open_terminal(columns: int) -> tuple[int, Any]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    return master, os.fdopen(slave, "w")


def read_terminal(master: int, terminal: Any) -> str:
    """All that was drawn. The end of what a closed terminal still holds reads as an error."""
    terminal.close()
    parts = []
    try:
        while part := os.read(master, 1 << 16):
            parts.append(part)
    except OSError as error:
        assert error.errno == errno.EIO
    os.close(master)
    return b"".join(parts).decode()


def draw(tmp_path: Path, columns: int, steps: range, **settings: Any) -> tuple[Bench, str]:
    """Draw on a terminal of so many columns, and wait between steps so that each is drawn."""
    master, terminal = open_terminal(columns)
    chunks: list[bytes] = []
    reader = threading.Thread(target=lambda: chunks.extend(_read_all(master)))
    reader.start()
    bench = Bench(tmp_path, terminal=terminal, **settings)
    from tqdm import tqdm
    for step in steps:
        bench.step(step, loss=Meter(2.25, 2.5), top1=Meter(step + 0.5, 10.0))
        for bar in list(tqdm._instances):
            bar.refresh()
    bench.report.close()
    terminal.close()
    reader.join(timeout=10)
    os.close(master)
    return bench, b"".join(chunks).decode()


def _read_all(master: int) -> list[bytes]:
    parts = []
    try:
        while part := os.read(master, 1 << 16):
            parts.append(part)
    except OSError:
        pass
    return parts


def shown(drawn: str) -> list[str]:
    """What stood on the lines of the terminal at any time."""
    return [line for line in re.split(r"[\r\n]|\x1b\[A", drawn) if line.strip()]


def test_two_bars_on_a_terminal(tmp_path: Path) -> None:
    bench, drawn = draw(tmp_path, 100, range(1, 21))
    lines = shown(drawn)
    heads = [line.split("|")[0].strip() for line in lines]
    assert {f"{n}/10 loss=2.250/2.500 top1={n}.5/10.0" for n in range(1, 10)} <= set(heads)
    assert {f"epochs {n}/2" for n in range(3)} <= set(heads)
    assert lines[-1].startswith("epochs 2/2 |")
    assert max(map(len, lines)) < 100 and "more hidden" not in drawn and not any("?" in head for head in heads)
    assert len(bench.lines()) == 2  # stdout is a file here, and gets its lines all the same


@pytest.mark.parametrize("columns", [0, 20, 40])
def test_bars_on_a_narrow_terminal(tmp_path: Path, columns: int) -> None:
    _, drawn = draw(tmp_path, columns, range(1, 21))
    lines = shown(drawn)
    assert max(map(len, lines)) < (columns or 80)
    assert any(line.startswith("7/10 loss=2.250"[: columns or 80]) for line in lines)
    assert any(line.startswith("epochs 1/2") for line in lines)
    if columns == 40:
        assert any(line.startswith("7/10 loss=2.250/2.500 top1=7.5/10.0") for line in lines)


def test_bars_go_on_where_the_run_stopped(tmp_path: Path) -> None:
    start = Progress(epoch=1, step=4, global_step=14, position=32)
    bench, drawn = draw(tmp_path, 100, range(15, 25), num_epochs=3, start=start)
    lines = shown(drawn)
    heads = {line.split("|")[0].strip() for line in lines if " loss=" in line and not line.startswith("10/10")}
    expected = {14: range(5, 10), 20: range(1, 5)}  # steps of the run before an epoch's first
    assert heads == {f"{n}/10 loss=2.250/2.500 top1={n + (10 if before == 14 else before)}.5/10.0"
                     for before, numbers in expected.items() for n in numbers}
    assert {line.split()[1] for line in lines if line.startswith("epochs")} == {"1/3", "2/3"}
    assert [(row["epoch"], row["step"]) for row in bench.rows()] == [(1, 20), (2, 24)]


def test_another_batch_size_changes_the_steps_of_the_first_epoch_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start=Progress(0, 4, 4, 32), first_epoch_steps=6)
    for step, epoch in [(5, 0), (6, 0), *((step, 1) for step in range(7, 17))]:
        bench.step(step, epoch=epoch)
    assert [(row["epoch"], row["step"]) for row in bench.rows()] == [(0, 6), (1, 16)]


def test_lines_stand_above_the_bars(tmp_path: Path) -> None:
    master, terminal = open_terminal(100)
    bench = Bench(tmp_path, text=terminal, terminal=terminal)
    for step in range(1, 4):
        bench.step(step)
    bench.report.note("something happened")
    bench.report.note("something else")
    bench.report.close()
    drawn = read_terminal(master, terminal)
    for text in ("something happened", "something else"):
        assert re.search(rf"\r(\x1b\[A)?{text}\r\n", drawn)
    assert "lr 0.1" not in drawn  # the bars say it


# Restarts

def test_rows_after_the_step_from_which_a_run_goes_on_are_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    for step in range(1, 9):
        bench.step(step)
    bench.report.validation(0, 8, VAL)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "epoch": 0, "st')
    again = Bench(tmp_path, report_seconds=0, attempt=1, start=Progress(0, 5, 5, 20))
    for step in range(6, 8):
        again.step(step)
    assert [(row["step"], row["attempt"]) for row in again.rows()] == [(n, 0) for n in range(1, 6)] + [(6, 1), (7, 1)]
    assert again.rows("val") == []


def test_a_start_from_the_beginning_replaces_everything(tmp_path: Path) -> None:
    for attempt in range(2):
        bench = Bench(tmp_path, report_seconds=0, attempt=attempt)
        bench.step(1)
        bench.report.close()
    assert [(row["step"], row["attempt"]) for row in bench.rows()] == [(1, 1)]
    assert steps_of(tmp_path) == [1]


WHOLE = '{"kind": "train", "step": 1}'


@pytest.mark.parametrize("torn", ["", "\n", "\x00\x00\n", '{"step": "x"}\n', "[]\n", WHOLE, "\udcff{\n"])
def test_torn_lines_are_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n' + torn.encode(errors="surrogateescape"))
    rows = MetricsFile(path, 5)
    rows.append({"kind": "train", "step": 6})
    assert {row["step"] for row in read_rows(tmp_path)} == {1, 6}


def test_each_row_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = MetricsFile(tmp_path / "metrics.jsonl", 0)
    rows.append({"kind": "train", "step": 1})
    writes = []

    class File:
        def write(self, line: bytes) -> int:
            writes.append(line)
            return len(line) // 2  # as on a disk that is just full

    rows._file = File()
    with pytest.raises(UserError, match=r"metrics\.jsonl.*--output"):
        rows.append({"kind": "train", "step": 2})
    assert writes == [b'{"kind": "train", "step": 2}\n']


def test_a_validation_done_again_is_written_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps_per_epoch=4)
    for step in range(1, 5):
        bench.step(step)
    bench.report.validation(0, 4, VAL)
    bench.report.confusion(confused(np.eye(3)), None, 4)
    bench.report.close()
    again = Bench(tmp_path, steps_per_epoch=4, attempt=1, start=Progress(1, 0, 4, 0))
    again.report.validation(0, 4, {**VAL, "top1": 26.0})
    again.report.confusion(confused(np.eye(3)), None, 4)
    again.step(5, epoch=1)
    again.report.close()
    assert [(row["step"], row["top1"], row["attempt"]) for row in again.rows("val")] == [(4, 26.0, 1)]
    events = read_events(tmp_path)
    assert steps_of(tmp_path, "val/top1") == [4] and steps_of(tmp_path) == [4, 5]
    assert len(events.Images("val/confusion")) == len(events.Tensors("val/accuracy by class/text_summary")) == 1


# TensorBoard

@dataclass
class Images:
    """A batch of gray images, the last one white."""

    num: int

    def __post_init__(self) -> None:
        self.image = torch.full((self.num, 3, 20, 24), 100, dtype=torch.uint8)
        self.image = self.image.contiguous(memory_format=torch.channels_last)
        self.image[-1] = 255
        self.label = torch.arange(self.num) % 2
        self.worker, self.shard, self.count = [0] * self.num, ["train-0003"] * self.num, list(range(self.num))


def test_events_of_all_attempts_are_in_one_file_without_a_step_twice(tmp_path: Path) -> None:
    """Restarts within a second, one of them after a kill that tore the file."""
    for attempt, start in enumerate([0, 5, 5, 3, 3]):
        place = Progress(0, start, start, 0)
        bench = Bench(tmp_path, report_seconds=0, steps_per_epoch=100, attempt=attempt, start=place)
        bench.report.config({"lr": 0.1, "attempt": attempt})
        bench.report.images(Images(2), ["cat", "dog"])
        for step in range(start + 1, start + 5):
            bench.step(step, loss=Meter(100.0 * attempt + step))
        if attempt == 0:
            bench.step(5)
            path, = tmp_path.glob(PATTERN)
            path.write_bytes(path.read_bytes() + b"\x30\x00\x00\x00\x00\x00\x00\x00torn")
        else:
            bench.report.close()
        assert len(list(tmp_path.glob(PATTERN))) == 1
    events = read_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 404.0), (5, 405.0), (6, 406.0), (7, 407.0)]
    texts = events.Tensors("start/config/text_summary")
    assert [text.step for text in texts] == [0, 3] and b"| attempt | 4 |" in texts[1].tensor_proto.string_val[0]
    assert [image.step for image in events.Images("start/first batch")] == [0, 3]
    assert [row["step"] for row in bench.rows()] == [1, 2, 3, 4, 5, 6, 7]


def test_files_of_one_second_and_one_pid_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer import event_file_writer as writer

    monkeypatch.setattr(time, "time", lambda: 1e9)
    for attempt in range(2):
        monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))  # as in a new process
        bench = Bench(tmp_path, report_seconds=0, attempt=attempt, start=Progress(0, attempt, attempt, 0))
        bench.step(attempt + 1)
        bench.report.close()
    assert steps_of(tmp_path) == [1, 2]


def test_a_kill_while_events_are_copied_doubles_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    for step in range(1, 4):
        bench.step(step)
    bench.report.close()
    path, = tmp_path.glob(PATTERN)
    path.with_name(path.name + "x").write_bytes(path.read_bytes())
    again = Bench(tmp_path, report_seconds=0, attempt=1, start=Progress(0, 3, 3, 12))
    again.step(4)
    again.report.close()
    assert steps_of(tmp_path) == [1, 2, 3, 4] and len(list(tmp_path.glob(PATTERN))) == 1


def test_a_run_stopped_before_its_first_report_still_drops_later_events(tmp_path: Path) -> None:
    bench = Bench(tmp_path, report_seconds=0)
    for step in range(1, 6):
        bench.step(step)
    bench.report.close()
    again = Bench(tmp_path, attempt=1, start=Progress(0, 2, 2, 8))
    again.report.config({})
    again.report.close()
    assert steps_of(tmp_path) == [1, 2] == [row["step"] for row in again.rows()]


def test_first_batch_is_copied_when_given_and_drawn_later(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    batch = Images(3)
    bench.report.images(batch, ["cat", "dog"])
    batch.image.zero_()  # the loader writes the next batch there
    bench.report.close()
    from PIL import Image
    image, = read_events(tmp_path).Images("start/first batch")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert pixels.shape == (152, 336, 3)
    assert pixels[50, 50].tolist() == [100] * 3 and pixels[50, 300].tolist() == [255] * 3


def test_first_batch_may_be_empty(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    empty, full = Images(1), Images(3)
    empty.image, empty.label = empty.image[:0], empty.label[:0]
    empty.shard, empty.worker, empty.count = [], [], []
    bench.report.images(empty, None)
    bench.report.images(full, None)
    bench.report.close()
    image, = read_events(tmp_path).Images("start/first batch")
    assert image.width == 336  # three images


def test_image_grid_places_images_and_captions() -> None:
    images = np.zeros((9, 8, 8, 3), dtype=np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None]
    grid = image_grid(images, ["猫\udcff\n" + "x" * 100] + [""] * 8)
    assert grid.shape == (304, 896, 3)
    assert grid[10, 10 + 112 * 7].tolist() == [7] * 3 and grid[162, 10].tolist() == [8] * 3
    assert grid[112:152, :112].min() < 128 and grid[112:152, 224:].min() == 255


def test_confusion_names_classes_and_their_accuracy(tmp_path: Path) -> None:
    matrix = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    right, total = confused(matrix).by_class().numpy()
    accuracy = class_accuracy(right, total)
    assert accuracy[[0, 2]].tolist() == [75.0, 0.0] and np.isnan(accuracy[1])
    table = accuracy_table(right, total, ["cat", "nan", "dog"])
    assert table.splitlines()[2:] == ["| dog | 0.00 | 2 |", "| cat | 75.00 | 4 |", "| nan | – | 0 |"]
    bench = Bench(tmp_path)
    bench.report.confusion(confused(matrix), ["cat", "nan", "dog"], 7)
    odd = [*(str(number) for number in range(37)), "$x^$", "猫", "a\udcff"]  # no formula, no glyph, no letter
    bench.report.confusion(confused(np.ones((40, 40))), odd, 8)
    bench.report.confusion(ConfusionMatrix(200_000), None, 9)  # a table only
    bench.report.close()
    events = read_events(tmp_path)
    assert [image.step for image in events.Images("val/confusion")] == [7, 8]
    assert [text.step for text in events.Tensors("val/accuracy by class/text_summary")] == [7, 8, 9]


def test_nothing_slow_is_imported_before_the_first_report(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from common.report import Report, ReportSettings
report = Report(ReportSettings(Path({str(tmp_path)!r}), num_epochs=1, steps_per_epoch=1))
report.config({{"lr": 1}})
print([name for name in ("tensorboard", "matplotlib", "PIL", "torch.utils.tensorboard") if name in sys.modules])
report.close()
print([name for name in ("matplotlib", "torch.utils.tensorboard") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['torch.utils.tensorboard']"], done.stderr


def test_a_full_disk_is_one_line_and_hides_nothing_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bench = Bench(tmp_path)
    bench.step(1)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    with pytest.raises(UserError, match=f"No space left on device.*{re.escape(str(tmp_path))}.*--output"):
        bench.report.validation(0, 1, VAL)
    with pytest.raises(KeyError), bench.report:
        bench.step(2)
        raise KeyError("first")


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = ReportSettings(tmp_path, 1, 1)
    assert replace(settings, attempt=2).attempt == 2
    with pytest.raises(AttributeError):
        settings.attempt = 1  # type: ignore[misc]
