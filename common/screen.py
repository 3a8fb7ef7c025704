"""What a person sees of a run: two bars on a terminal, whole lines in a log file, neither from any other rank.

Bars go to stderr where that is a terminal, lines to stdout. `python train_single.py … > log` therefore shows
bars and leaves a log without a single carriage return.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

BATCHES = "{n_fmt}/{total_fmt} {desc} |{bar}| {rate_fmt} {remaining}"  # what matters most first: the rest is cut off
EPOCHS = "epochs {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}"


class Screen:
    """Draws and prints for one rank. `lock` (acquire, release) keeps blocks of other ranks and of bars apart."""

    def __init__(self, num_epochs: int, start_epoch: int, lock: Any = None, text: TextIO | None = None,
                 terminal: TextIO | None = None):
        self.num_epochs, self.start_epoch = num_epochs, start_epoch
        self.text, self.terminal = text or sys.stdout, terminal or sys.stderr
        self.has_bars = self.terminal.isatty()
        self.prints_steps = not (self.has_bars and self.text.isatty())  # bars say the same, on the same terminal
        self._epochs: tqdm | None = None
        self._batches: tqdm | None = None
        tqdm.monitor_interval = 0  # its thread only serves bars that skip updates
        tqdm.set_lock(lock or threading.RLock())  # its own lock would be a semaphore of the whole machine

    def start_epoch_bar(self, step: int, num_steps: int) -> None:
        """A new bar of batches: `step` of `num_steps` are done."""
        if self.has_bars:
            if self._epochs is None:
                self._epochs = self._bar(EPOCHS, self.start_epoch, self.num_epochs, 0)
            self._batches = self._bar(BATCHES, step, num_steps, 1)

    def advance(self, loss: tuple[float, float], top1: tuple[float, float]) -> None:
        """One batch more; `loss` and `top1` are (now, mean)."""
        if self._batches is not None:
            values = f"loss={loss[0]:.3f}/{loss[1]:.3f} top1={top1[0]:.1f}/{top1[1]:.1f}"
            self._batches.set_description_str(values, refresh=False)
            self._batches.update()

    def end_epoch_bar(self, whole: bool = True) -> None:
        """Take the bar of batches away; `whole` counts its epoch as done."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None
            if self._epochs is not None and whole:
                self._epochs.update()

    def line(self, text: str, is_error: bool = False) -> None:
        """Print one or more whole lines, above the bars where there are any. A log that is gone ends no run."""
        stream = self.terminal if is_error else self.text
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = "\n".join(text.splitlines()).encode(encoding, "backslashreplace").decode(encoding)
        with tqdm.external_write_mode(file=stream), suppress(OSError):
            stream.write(text + "\n")
            stream.flush()

    def close(self) -> None:
        """Leave the terminal as a finished program should. May be called twice."""
        self.end_epoch_bar(whole=False)
        if self._epochs is not None:
            self._epochs.close()
            self._epochs = None

    def _bar(self, form: str, done: int, total: int, position: int) -> tqdm:
        size: dict[str, Any] = {"dynamic_ncols": True}
        with suppress(OSError, ValueError):
            if os.get_terminal_size(self.terminal.fileno()).columns < 2:  # a terminal that does not know: tqdm would draw nothing
                size = {"ncols": 79, "nrows": 24}
        return tqdm(total=total, initial=done, bar_format=form, position=position, leave=position == 0,
                    file=self.terminal, miniters=1, **size)
