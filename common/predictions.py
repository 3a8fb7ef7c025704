"""`--predictions FILE`: what the model takes each validation image for, a JSON line each, in the order of the data.

    {"shard": "val-0003", "count": 17, "key": "000317", "label": 4, "predicted": 4, "probability": 0.973}

`predicted` and `probability` are null where the model answers with numbers that are none.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from common.collate import Batch
from common.distributed import World
from common.errors import UserError
from common.files import remedy


class Predictions:
    """Written by rank 0 to a temporary name, round by round, so that memory holds one batch of each rank.

    A context manager: where it ends without `finish`, after a stop or an error, nothing is left.
    """

    def __init__(self, path: str | Path, world: World):
        """Every rank makes one. Raises UserError on all of them where rank 0 cannot write."""
        self.path, self.world = Path(path), world
        self.temporary, self.skipped = Path(f"{path}.tmp"), skipped_path(path)
        self._file: TextIO | None = None
        self._error: UserError | None = None
        world.on_main(self._open)

    def add(self, batch: Batch | None, logits: torch.Tensor | None) -> None:
        """Add the batches of one round, one per rank, rank after rank; None for a rank without. Every rank calls it."""
        lines = "" if batch is None or logits is None else "".join(f"{line}\n" for line in _lines(batch, logits))
        gathered = self.world.gather(lines)
        if self._file is not None and self._error is None:
            try:
                with self._writing():
                    self._file.writelines(gathered)
            except UserError as error:
                self._error = error  # told at the end, to all ranks

    def finish(self) -> None:
        """The validation is over: give the file its name. Every rank calls it."""
        self.world.on_main(self._finish)

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *reason: object) -> None:
        """Rank 0 tidies up alone: after an error the others may not answer."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self.temporary.unlink()

    def _open(self) -> None:
        with self._writing():
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self.skipped.unlink(missing_ok=True)  # of an evaluation before this one
            self._file = open(self.temporary, "w", encoding="utf-8")

    def _finish(self) -> None:
        assert self._file is not None
        if self._error is not None:
            raise self._error
        with self._writing():
            self._file.close()
            os.replace(self.temporary, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write ({error.strerror or error}); --predictions {self.path}; "
                            f"{remedy(error)}choose another file") from None


def skipped_path(path: str | Path) -> Path:
    """Where the images are listed that cannot be predicted: not in the errors.jsonl of a run that `path` may lie in."""
    return Path(os.path.splitext(path)[0] + ".errors.jsonl")


def _lines(batch: Batch, logits: torch.Tensor) -> Iterator[str]:
    """A line per image: logits float (n, classes). Of equal logits the lower class counts, as it does for top1."""
    answer, probability = logits.argmax(dim=1), logits.softmax(dim=1).amax(dim=1)
    columns = (batch.shard, batch.count, batch.key, batch.label.tolist(), answer.tolist(), probability.tolist())
    for shard, count, key, label, number, share in zip(*columns, strict=True):
        known = share == share  # else NaN, which JSON has no word for
        yield json.dumps({"shard": shard, "count": count, "key": key, "label": label,
                          "predicted": number if known else None, "probability": share if known else None})
