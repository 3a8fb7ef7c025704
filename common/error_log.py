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
from common.files import writing

SECONDS_BETWEEN_LINES = 30.0  # of one cause


class ErrorLog:
    """One per rank. Every rank appends to the same OUTPUT/errors.jsonl, a line in one write."""

    def __init__(self, folder: Path, rank: int, attempt: int):
        self.path, self.rank, self.attempt = folder / "errors.jsonl", rank, attempt
        self.counts: Counter[str] = Counter()
        self.latest = ""
        self._told_seconds: dict[str, float] = {}

    def add(self, batch: Batch, kind: str = "train") -> int:
        """Count and list what this batch had to leave out; returns how many samples that are."""
        for bad in batch.skipped:
            self.counts[bad.cause] += 1
            self.latest = f"{bad.detail}; shard {bad.shard}, key {bad.key}"
            self._append(batch, bad, kind)
            now = time.monotonic()
            if now - self._told_seconds.get(bad.cause, -SECONDS_BETWEEN_LINES) >= SECONDS_BETWEEN_LINES:
                self._told_seconds[bad.cause] = now
                tqdm.write(_printable(f"skipped: {self.latest}; rank {self.rank}, {self.counts[bad.cause]} of this "
                                      "cause so far, "
                                      f"all in {self.path}"))
        return len(batch.skipped)

    def _append(self, batch: Batch, bad: SkippedSample, kind: str) -> None:
        row = {"attempt": self.attempt, "kind": kind, "epoch": batch.step.epoch, "step": batch.step.step,
               "rank": self.rank,
               "cause": bad.cause, "detail": bad.detail, "shard": bad.shard, "count": bad.count, "key": bad.key}
        with writing(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
