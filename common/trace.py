"""Who used which sample, and when: each rank records a line per batch; the command holds them against the promise.

    python train_ddp.py -s shards/train --trace save        # writes OUTPUT/trace/rank00000.jsonl, rank00001.jsonl, ...
    python -m common.trace OUTPUT [--plot steps.png]        # exit 0: promise kept, 1: broken, 2: nothing to judge
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, one_line
from common.files import cut_torn_line, remedy
from common.tool import run_tool

if TYPE_CHECKING:  # reading a trace needs no torch
    from common.collate import Batch


def trace_path(output: str | Path, rank: int) -> Path:
    """Where a rank records."""
    return Path(output) / "trace" / f"rank{rank:05d}.jsonl"


class Trace:
    """One rank's record. `output` is the run's folder.

    A row costs 60 µs for 64 samples. It is one write at the end of the file, so a killed run leaves whole rows and
    at most one torn one, which the next start cuts off.
    """

    def __init__(self, output: str | Path, attempt: int, rank: int, world_size: int):
        self.attempt, self.rank, self.world_size = attempt, rank, world_size
        self.path = trace_path(output, rank)
        self._file = _open_for_append(self.path)

    def save(self, batch: Batch, device: str, replica: Sequence[int]) -> None:
        """Add the row of a batch. `replica` (n,) is the DP replica of each sample.

        Every rank calls it for every step, also with a batch of no samples. Raises UserError when the disk is full.
        """
        row = {
            "attempt": self.attempt, "epoch": batch.step.epoch, "step": batch.step.step,
            "rank": self.rank, "world_size": self.world_size, "device": device,
            "worker": batch.worker, "shard": batch.shard, "count": batch.count, "key": batch.key,
            "label": batch.label.tolist(), "replica": list(replica),
        }  # fmt: skip
        line = json.dumps(row).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise _unwritable(error, self.path) from None
        if written < len(line):
            raise _unwritable(OSError(errno.ENOSPC, "no space left"), self.path)

    def close(self) -> None:
        """Let go of the file. A row is complete without it."""
        os.close(self._file)


def _open_for_append(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        cut_torn_line(file)
    except OSError as error:
        raise _unwritable(error, path) from None
    return file


def _unwritable(error: OSError, path: Path) -> UserError:
    return UserError(f"the trace cannot be written ({error.strerror}); {path}; {remedy(error)}choose another --output")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Prints the report, returns the exit status."""
    parser = argparse.ArgumentParser("python -m common.trace", description="Hold a traced run against its promise.")
    parser.add_argument("run", metavar="RUN", help="the run's folder (its --output), trained with --trace save")
    parser.add_argument("-s", "--shards", nargs="+", metavar="SHARDS", help="the shards that it read, to compare sizes")
    parser.add_argument("--plot", metavar="FILE.png", help="draw steps x ranks, coloured by shard and worker")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(arguments)
    try:
        return _report(args)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def _report(args: argparse.Namespace) -> int:
    from common.tracing.audit import audit
    from common.tracing.canvas import Canvas
    from common.tracing.run import RecordedRun

    if args.plot and os.path.isdir(args.plot):
        raise UserError(f"a folder, not a file; --plot {args.plot}; give a FILE.png in it")
    run = RecordedRun.open(args.run, args.shards)
    canvas = Canvas.for_run(run) if args.plot else None
    report = audit(run, canvas)
    print(json.dumps(report.as_dict()) if args.json else report.text())
    if canvas is not None:
        from common.tracing.plot import paint, save, title_of

        save(paint(canvas, title_of(report)), args.plot)
    return 0 if report.kept else 1


if __name__ == "__main__":
    run_tool(main)
