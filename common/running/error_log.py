"""Where a bad image is counted: samples that were skipped, by cause, listed with shard and key.

    tail runs/…/errors.jsonl
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.collate import Batch
from common.distributed import World
from common.errors import one_line, printable
from common.files import append_rows
from common.launching.failure import SharedError

SECONDS_BETWEEN_LINES = 30.0  # of one cause


Sample = tuple[str, str, int]  # train or val, shard, place in it


class ErrorLog:
    """One per rank. Rank 0 writes what all bring to a check; without a `path` nothing is listed.

    A sample counts once, however often it is read, on whichever ranks and in whichever start; it is listed each time.
    """

    def __init__(self, path: Path | None, world: World, max_errors: int, attempt: int = 0,
                 earlier: Mapping[Sample, str] | None = None):
        self.path, self.world, self.max_errors, self.attempt = path, world, max_errors, attempt
        self.causes = dict(earlier or {})  # of what could not be used on any rank, up to the last check
        self.latest = ""
        self._new: list[dict[str, Any]] = []  # rows of this rank's, since then
        self._told_seconds: dict[str, float] = {}

    def add(self, batch: Batch, kind: str = "train") -> int:
        """Note what this batch had to leave out; returns how many samples that are, for `check`."""
        step = batch.step
        for bad in batch.skipped:
            self._new.append({
                "attempt": self.attempt, "kind": kind, "epoch": step.epoch, "step": step.step, "rank": self.world.rank,
                "cause": bad.cause, "detail": bad.detail, "shard": bad.shard, "count": bad.count, "key": bad.key})
            self.latest = f"{bad.detail}; shard {bad.shard}, key {printable(bad.key)}"
            now = time.monotonic()
            if now - self._told_seconds.get(bad.cause, -SECONDS_BETWEEN_LINES) >= SECONDS_BETWEEN_LINES:
                self._told_seconds[bad.cause] = now
                num_alike = Counter((self.causes | _causes(self._new)).values())[bad.cause]
                tqdm.write(one_line(f"skipped: {self.latest}; rank {self.world.rank}, {num_alike} of "
                                      f"this cause so far{f', all in {self.path}' if self.path else ''}"))
        return len(batch.skipped)

    def check(self, num_skipped: int) -> None:
        """List what all ranks had to leave out, `num_skipped` together, and raise on all of them when there are too
        many different samples. Every rank calls it."""
        if not num_skipped:
            return
        rows = [row for new in self.world.gather(self._new) for row in new]
        self.causes |= _causes(rows)
        self._new = []
        if self.path is not None:
            self.world.on_main(partial(append_rows, self.path, rows))
        if len(self.causes) > self.max_errors:
            raise self.refusal(f"more than --max_errors {self.max_errors} samples could not be used",
                               advice="mend the shards, or raise --max_errors")

    def refusal(self, what: str, kind: str | None = None, advice: str = "mend the shards") -> SharedError:
        """What to raise where too little can be used, with the causes and an example. Every rank calls it."""
        latest = next(filter(None, self.world.gather(self.latest)), "")
        return SharedError(f"{what}, {self.skipped(kind)} (such as {latest}){f'; {self.path}' if self.path else ''}; "
                           f"python -m common.check_shards finds them all: {advice}")

    def skipped(self, kind: str | None = None) -> str:
        """`7 samples: 4 broken json, 3 no label`, over all ranks, of `kind` alone or of all; nothing where all were
        used."""
        counts = Counter(cause for sample, cause in self.causes.items() if kind in (None, sample[0]))
        return summary(counts) if counts else ""


def listed(path: Path) -> dict[Sample, str]:
    """Which samples a file of these lists, and why. A line that a killed rank has torn is left out."""
    found: dict[Sample, str] = {}
    with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                found |= _causes([json.loads(line)])
    return found


def _causes(rows: Iterable[Mapping[str, Any]]) -> dict[Sample, str]:
    return {(str(row["kind"]), str(row["shard"]), int(row["count"])): str(row["cause"]) for row in rows}


def summary(counts: Counter[str]) -> str:
    """`7 samples: 4 broken json, 3 no label`, the most frequent first."""
    causes = ", ".join(f"{count} {cause}" for cause,
                       count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return f"{counts.total()} samples: {causes}"
