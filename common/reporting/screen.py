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
EPOCHS = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}"


def write_block(text: str, file: TextIO | None = None) -> None:
    """To `file` (stdout) in one piece, with the bars of this process out of the way. A log that is gone ends no run."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    with tqdm.external_write_mode(file=file), suppress(OSError):
        file.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        file.flush()


class Screen:
    """Draws and prints for one rank. `lock` (acquire, release) keeps bars, lines and blocks of other ranks apart."""

    def __init__(self, lock: Any = None, text: TextIO | None = None, terminal: TextIO | None = None):
        self.text, self.terminal = text or sys.stdout, terminal or sys.stderr
        self.has_bars = self.terminal.isatty()
        self.prints_steps = not (self.has_bars and self.text.isatty())  # else the bars say the same in the same place
        self._epochs: tqdm | None = None
        self._batches: tqdm | None = None
        tqdm.monitor_interval = 0  # its thread only serves bars that skip updates
        tqdm.set_lock(lock or threading.RLock())  # the default one would be a semaphore of the whole machine

    def step(self, epoch: tuple[int, int], batch: tuple[int, int], text: str) -> None:
        """Move the bars. `epoch` and `batch` are (done, all), `text` stands before the bar of batches."""
        if not self.has_bars:
            return
        if self._epochs is None:
            self._epochs = self._bar(EPOCHS, *epoch, position=0, text="epochs")
        if self._batches is None:  # made after its first batch, so that the time until then does not count as its rate
            self._batches = self._bar(BATCHES, *batch, position=1, text=text)
        self._epochs.update(epoch[0] - self._epochs.n)
        self._batches.set_description_str(text, refresh=False)
        self._batches.update(batch[0] - self._batches.n)

    def end_epoch(self, num_done: int) -> None:
        """Take the bar of batches away: `num_done` epochs are over."""
        if self._batches is not None and self._epochs is not None:
            self._batches.close()
            self._batches = None
            self._epochs.update(num_done - self._epochs.n)

    def line(self, text: str) -> None:
        """Print one or more whole lines, above the bars where there are any."""
        write_block("\n".join(text.splitlines()), self.text)

    def close(self) -> None:
        """Leave the terminal as a finished program should. May be called twice."""
        for bar in (self._batches, self._epochs):
            if bar is not None:
                bar.close()
        self._batches = self._epochs = None

    def _bar(self, form: str, done: int, total: int, position: int, text: str) -> tqdm:
        size: dict[str, Any] = {"dynamic_ncols": True}
        with suppress(OSError, ValueError):
            if os.get_terminal_size(self.terminal.fileno()).columns < 2:  # not known: tqdm would draw nothing
                size = {"ncols": 79, "nrows": 24}
        return tqdm(desc=text, total=total, initial=done, bar_format=form, position=position, leave=position == 0,
                    file=self.terminal, miniters=1, **size)
