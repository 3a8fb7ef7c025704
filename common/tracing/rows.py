"""Reading a trace: the ranks' files merged step by step, a row of each in memory at a time.

    >>> for step in merged("runs/ddp", is_live=lambda row: True):
    ...     print([row.key for row in step])
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError

_NUMBERS = ("attempt", "epoch", "step", "rank", "world_size")
DAMAGED = "it was changed or damaged and cannot be judged"
_LISTS = {"worker": int, "shard": str, "count": int, "key": str, "label": int}
BEYOND = 1 << 31  # whatever counts workers, labels or the samples of a shard


class Row(NamedTuple):
    """A line of a trace: one rank's batch. `file_rank` is whose file it stands in, to be held against `rank`."""

    attempt: int
    epoch: int
    step: int
    rank: int
    world_size: int
    worker: list[int]
    shard: list[str]
    counts: list[int]  # tuples have a method `count`
    key: list[str]
    label: list[int]
    file_rank: int

    @property
    def when(self) -> tuple[int, int, int]:
        """Attempt, epoch, step."""
        return self.attempt, self.epoch, self.step


def rank_files(folder: str | Path) -> dict[int, Path]:
    """The ranks' files of a run's folder, by rank."""
    paths = sorted((Path(folder) / "trace").glob("rank*.jsonl"))
    return {int(path.stem[4:]): path for path in paths if path.stem[4:].isdecimal()}


def read_rows(path: Path, file_rank: int) -> Iterator[Row]:
    """The rows of one file in order. A torn last line is left out; any other that is no row raises UserError."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parse(line, file_rank, f"{path} line {number}")


def sampled_rows(path: Path, file_rank: int, num_rows: int) -> Iterator[Row]:
    """About `num_rows` rows spread evenly over a file, in order, by jumping through it."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        for i in range(num_rows):
            file.seek(max(size * i // num_rows - 1, 0))
            if i:
                file.readline()  # the rest of a row, or the newline before one
            start, line = file.tell(), file.readline()
            if line.endswith(b"\n"):
                yield _parse(line, file_rank, f"{path} byte {start}")


def last_row(path: Path, file_rank: int, block: int = 1 << 16) -> Row | None:
    """The last whole row of a file, found from its end."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        while True:
            file.seek(max(size - block, 0))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is torn
            if len(lines) > 1 or (lines and block >= size):
                return _parse(lines[-1], file_rank, f"{path}, the last line")
            if block >= size:
                return None
            block *= 4


def _parse(line: bytes, file_rank: int, where: str) -> Row:
    try:
        return _row(json.loads(line), file_rank)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"not a row of a trace; {where}; {DAMAGED}") from None


def _row(values: dict[str, Any], file_rank: int) -> Row:
    numbers, lists = [values[name] for name in _NUMBERS], [values[name] for name in _LISTS]
    if not all(type(number) is int and number >= 0 for number in numbers) or len({len(items) for items in lists}) != 1:
        raise ValueError("a field that no row has")
    if not all(map(_is_list, lists, _LISTS.values())):
        raise ValueError("a field of another kind")
    return Row(*numbers, *lists, file_rank=file_rank)  # type: ignore[misc]


def _is_list(items: Any, kind: type) -> bool:
    """Whether it holds strings, or numbers that an array can take, and nothing else. Called a lot."""
    alike = type(items) is list and set(map(type, items)) <= {kind}
    return alike and (kind is str or max(map(abs, items), default=0) < BEYOND)


def merged(folder: str | Path, is_live: Callable[[Row], bool]) -> Iterator[list[Row]]:
    """The rows that count, step by step: those of all ranks for one step of one attempt together, by rank."""
    streams = [filter(is_live, read_rows(path, rank)) for rank, path in rank_files(folder).items()]
    for _, rows in groupby(heapq.merge(*streams, key=lambda row: row.when), key=lambda row: row.when):
        yield list(rows)


def survey(folder: str | Path) -> tuple[dict[int, tuple[int, int]], dict[str, int]]:
    """A pass over all rows: each attempt's first (epoch, step), and each shard's size as far as it was seen."""
    firsts: dict[int, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    for rank, path in rank_files(folder).items():
        for row in read_rows(path, rank):
            first = (row.epoch, row.step)
            firsts[row.attempt] = min(firsts.get(row.attempt, first), first)
            for shard, count in zip(row.shard, row.counts, strict=True):
                sizes[shard] = max(sizes.get(shard, 0), count + 1)
    return firsts, dict(sorted(sizes.items()))
