"""Where a bad image is counted: samples that were skipped, by cause, listed with shard and key.

    tail runs/…/errors.jsonl
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from common.collate import Batch, SkippedSample

SECONDS_BETWEEN_LINES = 30.0  # of one cause


class ErrorLog:
    """One per rank. Every rank appends to the same OUTPUT/errors.jsonl, a line in one write."""

    def __init__(self, folder: Path, rank: int, attempt: int):
        self.path, self.rank, self.attempt = folder / "errors.jsonl", rank, attempt
        self.counts: Counter[str] = Counter()
        self._told_seconds: dict[str, float] = {}

    def add(self, batch: Batch) -> int:
        """Count and list what this batch had to leave out; returns how many samples that are."""
        for bad in batch.skipped:
            self.counts[bad.cause] += 1
            self._append(batch, bad)
            now = time.monotonic()
            if now - self._told_seconds.get(bad.cause, -SECONDS_BETWEEN_LINES) >= SECONDS_BETWEEN_LINES:
                self._told_seconds[bad.cause] = now
                print(f"skipped: {bad.detail}; shard {bad.shard}, key {bad.key}; rank {self.rank}, "
                      f"{self.counts[bad.cause]} of this cause so far, all in {self.path}", flush=True)
        return len(batch.skipped)

    def _append(self, batch: Batch, bad: SkippedSample) -> None:
        row = {"attempt": self.attempt, "epoch": batch.step.epoch, "step": batch.step.step, "rank": self.rank,
               "cause": bad.cause, "detail": bad.detail, "shard": bad.shard, "count": bad.count, "key": bad.key}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, (json.dumps(row) + "\n").encode())
        finally:
            os.close(descriptor)
