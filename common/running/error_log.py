"""Where a bad image is counted: samples that were skipped, by cause, listed with shard and key.

    tail runs/…/errors.jsonl
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from common.collate import Batch, SkippedSample
from common.distributed import World
from common.files import writing
from common.launching.failure import SharedError

SECONDS_BETWEEN_LINES = 30.0  # of one cause


class ErrorLog:
    """One per rank. Every rank appends to the same file, a line in one write; without a `path` nothing is listed."""

    def __init__(self, path: Path | None, world: World, max_errors: int, attempt: int = 0):
        self.path, self.world, self.max_errors, self.attempt = path, world, max_errors, attempt
        self.counts: Counter[str] = Counter()  # this rank's, by cause
        self.latest = ""
        self._num_errors = 0  # of all ranks
        self._told_seconds: dict[str, float] = {}

    def add(self, batch: Batch, kind: str = "train") -> int:
        """Count and list what this batch had to leave out; returns how many samples that are."""
        for bad in batch.skipped:
            self.counts[bad.cause] += 1
            self.latest = f"{bad.detail}; shard {bad.shard}, key {bad.key}"
            if self.path is not None:
                self._append(self.path, batch, bad, kind)
            now = time.monotonic()
            if now - self._told_seconds.get(bad.cause, -SECONDS_BETWEEN_LINES) >= SECONDS_BETWEEN_LINES:
                self._told_seconds[bad.cause] = now
                tqdm.write(_printable(f"skipped: {self.latest}; rank {self.world.rank}, {self.counts[bad.cause]} of "
                                      f"this cause so far{f', all in {self.path}' if self.path else ''}"))
        return len(batch.skipped)

    def check(self, num_bad: int) -> None:
        """Raise on all ranks when `num_bad` more samples, over all of them, are too many. Every rank calls it."""
        self._num_errors += num_bad
        if self._num_errors > self.max_errors:
            latest = next(filter(None, self.world.gather(self.latest)), "")
            raise SharedError(f"more than --max_errors {self.max_errors} samples could not be used, {self.skipped()} "
                              f"(such as {latest}){f'; {self.path}' if self.path else ''}; python -m "
                              "common.check_shards finds them all: mend the shards, or raise --max_errors")

    def skipped(self) -> str:
        """`7 samples: 4 broken json, 3 no label`, over all ranks; nothing where all were used. Every rank calls it."""
        counts = sum(self.world.gather(self.counts), Counter())
        return summary(counts) if counts else ""

    def _append(self, path: Path, batch: Batch, bad: SkippedSample, kind: str) -> None:
        row = {"attempt": self.attempt, "kind": kind, "epoch": batch.step.epoch, "step": batch.step.step,
               "rank": self.world.rank,
               "cause": bad.cause, "detail": bad.detail, "shard": bad.shard, "count": bad.count, "key": bad.key}
        with writing(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, (json.dumps(row) + "\n").encode())
            finally:
                os.close(descriptor)


def summary(counts: Counter[str]) -> str:
    """`7 samples: 4 broken json, 3 no label`, the most frequent first."""
    causes = ", ".join(f"{count} {cause}" for cause,
                       count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return f"{counts.total()} samples: {causes}"


def _printable(text: str) -> str:
    """One line, whatever a key or a decoder's message holds."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
