"""metrics.jsonl: a line per report and per validation, each written at once, so that a kill tears at most the last.

    {"kind": "train", "epoch": 0, "step": 20, "loss": 2.31, "top1": 10.2, "lr": 0.0001, ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from common.files import Json, write_atomic, writing


class MetricsFile:
    """The rows of a run that goes on after `start_step` optimiser steps: later rows, and torn ones, are dropped."""

    def __init__(self, path: Path, start_step: int):
        self.path = path
        self._file: FileIO | None = None
        self._keep(lambda row: row.get("step", 0) <= start_step)

    def append(self, row: Json) -> None:
        """Write a row. What is no number (a mean of nothing) becomes null, which every reader of JSON takes."""
        values = {name: _finite(value) for name, value in row.items()}
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        with writing(self.path):
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)
            if self._file.write(line) != len(line):
                raise OSError("no space left for a row")

    def replace(self, row: Json) -> None:
        """Write a row, and drop an older one of the same kind and step."""
        self._keep(lambda other: (other.get("kind"), other.get("step")) != (row["kind"], row["step"]))
        self.append(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, holds: Callable[[Json], bool]) -> None:
        """Rewrite the file without the rows that do not hold, and without torn ones. Untouched where there are none."""
        if not self.path.exists():
            return
        with writing(self.path):
            text = self.path.read_text(encoding="utf-8", errors="replace")
        kept = "".join(f"{line}\n" for line in text.split("\n") if (row := _parse(line)) is not None and holds(row))
        if kept != text:
            self.close()
            write_atomic(self.path, kept)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> Json | None:
    """The row of a line; None for one that is torn."""
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step", 0), int):
            return row
    return None
