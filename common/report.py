"""What a run says while it runs: bars or log lines, metrics.jsonl and TensorBoard. Every rank has one; rank 0's speaks.

    report = Report(ReportSettings(output, is_main=world.is_main, num_epochs=10, steps_per_epoch=391))
    report.train(epoch=0, step=1, loss=loss, top1=top1, lr=1e-4, num_images=64, wait_seconds=0.01)

A report comes after `report_seconds`, then at times that grow by `report_growth`, and at the end of each epoch.
On a step without one, `train` adds five numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TextIO

import torch

from common.errors import UserError
from common.metrics import ConfusionMatrix
from common.reporting.metrics_file import MetricsFile
from common.reporting.period import Period, memory
from common.reporting.screen import Screen
from common.reporting.tensorboard import TensorBoard
from common.sampling import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
HIGH_WAIT = 0.2  # share of the time spent waiting for input from which on the report says so
HINT_EVERY = 5  # reports


class Meter(Protocol):
    """A number now, and its mean over the epoch so far."""

    @property
    def value(self) -> float: ...
    @property
    def mean(self) -> float: ...


class Images(Protocol):
    """What is drawn of a batch: uint8 (n, 3, height, width), labels (n,), and who read what."""

    image: torch.Tensor
    label: torch.Tensor
    worker: list[int]
    shard: list[str]
    count: list[int]


@dataclass(frozen=True)
class ReportSettings:
    """`start` is where this attempt begins; `first_epoch_steps` its epoch's steps, where another batch changed them."""

    output: Path
    num_epochs: int
    steps_per_epoch: int
    is_main: bool = True
    attempt: int = 0
    start: Progress = Progress()
    first_epoch_steps: int | None = None
    report_seconds: float = 15.0
    report_growth: float = 1.1
    lock: Any = None  # what the ranks of a node print under: acquire and release
    text: TextIO | None = None  # stdout
    terminal: TextIO | None = None  # stderr
    clock: Callable[[], float] = time.monotonic


def main_only(method: Callable[Concatenate[Report, P], None]) -> Callable[Concatenate[Report, P], None]:
    """Make a method do nothing on other ranks than 0, so that callers need not ask."""
    @wraps(method)
    def call(self: Report, /, *arguments: P.args, **named: P.kwargs) -> None:
        if self.settings.is_main:
            method(self, *arguments, **named)
    return call


class Report:
    """Rank 0 draws and writes; on other ranks it does nothing. A context manager that closes."""

    def __init__(self, settings: ReportSettings):
        self.settings = settings
        self._screen = Screen(settings.lock, settings.text, settings.terminal)
        if settings.is_main:
            self._metrics = MetricsFile(settings.output / "metrics.jsonl", settings.start.global_step)
            self._board = TensorBoard(settings.output, settings.start.global_step)
        self._epoch, self._done = settings.start.epoch, settings.start.step
        self._last = (settings.start.epoch, settings.start.global_step, 0.0)  # epoch, step, lr of the last step
        self._interval = settings.report_seconds
        self._due = settings.clock() + self._interval
        self._period = Period(began=None)
        self._num_reports, self._hinted = 0, -HINT_EVERY

    @main_only
    def train(self, *, epoch: int, step: int, loss: Meter, top1: Meter, lr: float, num_images: int,
              wait_seconds: float) -> None:
        """A step is over. `step` counts those of the run, this one too. Only `wait_seconds` is of this rank alone."""
        now = self.settings.clock()
        if epoch != self._epoch:
            self._end_epoch(epoch)
        self._done += 1
        self._last = (epoch, step, lr)
        self._period.add(now, loss.value, top1.value, num_images, wait_seconds)
        total = self._num_steps()
        self._screen.step((epoch, self.settings.num_epochs), (self._done, total),
                          f"loss={loss.value:.3f}/{loss.mean:.3f} top1={top1.value:.1f}/{top1.mean:.1f}")
        if self._done >= total:
            self._end_epoch(epoch + 1)
        elif now >= self._due:
            self._report(now)
            self._interval *= self.settings.report_growth
            self._due = now + self._interval

    @main_only
    def validation(self, epoch: int, step: int, result: Mapping[str, Any]) -> None:
        """A validation after `step` steps. `result`: loss, floats in percent, samples; the rest stays out."""
        self._report(self.settings.clock())
        numbers = {name: value for name, value in result.items() if isinstance(value, float)}
        row = {"kind": "val", "epoch": epoch, "step": step, **numbers, "samples": result["samples"]}
        self._metrics.replace({**row, "attempt": self.settings.attempt})
        self._board.scalars({f"val/{name}": value for name, value in numbers.items()}, step)
        words = ", ".join(f"{name} {value:.4g}{'' if name == 'loss' else ' %'}" for name, value in numbers.items())
        self._screen.line(f"epoch {epoch}, step {step}: validation {words}, {result['samples']} samples")
        self._restart_clock()

    @main_only
    def note(self, text: str) -> None:
        """Print a line."""
        self._screen.line(text)

    @main_only
    def config(self, config: Mapping[str, Any]) -> None:
        """Show the run's choices in TensorBoard."""
        rows = [f"| {name} | {json.dumps(value)} |" for name, value in config.items()]
        self._board.start_text("config", "\n".join(["| flag | value |", "|---|---|", *rows]))

    @main_only
    def images(self, batch: Images, classes: Sequence[str] | None) -> None:
        """Show the first batch in TensorBoard, with class, shard, place in it and worker of each image."""
        rows = zip(batch.label.tolist(), batch.shard, batch.count, batch.worker, strict=True)
        captions = [f"{classes[label] if classes else label}\n{shard} #{count}\nworker {worker}"
                    for label, shard, count, worker in rows]
        self._board.start_images(batch.image, captions)

    @main_only
    def figure(self, tag: str, figure: Figure, step: int) -> None:
        """Show a matplotlib figure in TensorBoard."""
        self._board.figure(tag, figure, step)

    @main_only
    def confusion(self, confusion: ConfusionMatrix, classes: Sequence[str] | None, step: int) -> None:
        """Show a validation's counts and the accuracy of each class in TensorBoard."""
        self._board.confusion(confusion, classes or [str(label) for label in range(confusion.num_classes)], step)

    @main_only
    def flush(self) -> None:
        """Report what has come together since the last report."""
        self._report(self.settings.clock())

    @main_only
    def close(self) -> None:
        """Write what is left of an epoch that was stopped, and close everything. May be called twice."""
        self._screen.close()
        self._report(self.settings.clock())
        self._metrics.close()
        self._board.close()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except UserError:
            if kind is None:  # else what went wrong first is what counts
                raise

    def _num_steps(self) -> int:
        settings = self.settings
        first = settings.first_epoch_steps if self._epoch == settings.start.epoch else None
        return settings.steps_per_epoch if first is None else first

    def _end_epoch(self, num_done: int) -> None:
        if self._done:
            self._report(self.settings.clock())
            self._screen.end_epoch(num_done)
        self._epoch, self._done = num_done, 0
        self._restart_clock()

    def _restart_clock(self) -> None:
        now = self.settings.clock()
        self._due = now + self._interval
        if self._period.began is not None:
            self._period.began = now

    def _report(self, now: float) -> None:
        """Write and print what has come together since the last report, if anything."""
        if not self._period.num_steps:
            return
        epoch, step, lr = self._last
        rates = self._period.row(now)
        numbers = {"loss": rates["loss"], "top1": rates["top1"], "lr": lr, **rates, **memory()}
        row = {"kind": "train", "epoch": epoch, "step": step, **numbers, "attempt": self.settings.attempt}
        self._metrics.append(row)
        self._board.scalars({f"train/{name}": value for name, value in numbers.items()}, step)
        if self._screen.prints_steps:
            words = f"loss {rates['loss']:.4f}, top1 {rates['top1']:.2f} %, lr {lr:.3g}"
            if "data_wait" in rates:
                words += f", {rates['images_per_second']:.1f} images/s, waiting for input {rates['data_wait']:.0%}"
            self._screen.line(f"epoch {epoch}, step {step}: {words}")
        self._hint(rates.get("data_wait", 0.0))
        self._num_reports += 1
        self._period = Period(began=now)

    def _hint(self, data_wait: float) -> None:
        """Say that the input is too slow, and what to turn: not at the first report, and not at each."""
        if data_wait > HIGH_WAIT and self._num_reports and self._num_reports - self._hinted >= HINT_EVERY:
            self._hinted = self._num_reports
            self._screen.line(f"note: {data_wait:.0%} of the time went waiting for input; more loader workers (-w), "
                              "smaller images in the shards (make_shards --resize) or a smaller --image_size help")
