"""`--trace print`: shows which sample is where, step by step, before, inside and after the model's forward.

    [batch]    what the loader of this rank gave: worker, shard, count and label of each sample
    [forward]  what each replica of the model sees, on its own device, told from inside its forward
    [done]     the device that each returned sample was processed on

    printer = TracePrinter(NodeLock(lock_path(output)), rank=0, world_size=3)
    model = DataParallel(TracedModel(module, printer))
    printer.batch(batch, device)
    logits, where = model(image, row)
    printer.done(row, where, device)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from common.reporting.screen import write_block

if TYPE_CHECKING:
    from common.collate import Batch

COLUMNS = ("row", "worker", "shard", "count", "label", "device")


class TracePrinter:
    """Prints the blocks of one rank. `lock` is shared with the node's other ranks; `write` gets whole blocks.

    `num_replicas` is DP's: on the CPU they share a device and are told apart by number.
    """

    def __init__(self, lock: AbstractContextManager[Any], rank: int, world_size: int, num_replicas: int = 1,
                 write: Callable[[str], None] = write_block):
        self.lock, self.write, self.num_replicas = lock, write, num_replicas
        self.who = f"rank {rank} of {world_size}"
        self._batch: Batch | None = None
        self._labels: list[int] = []

    def batch(self, batch: Batch, device: torch.device | str) -> None:
        """Before the forward. The batch stays the current one, for the blocks that follow, until the next call."""
        self._batch, self._labels = batch, batch.label.tolist()
        self._print("batch", str(device), batch.image.shape, range(len(batch.key)))

    def forward(self, row: torch.Tensor, number: int, size: Sequence[int]) -> None:
        """From inside a replica's forward, on any thread: `row` (n,) int64 as it got it, -1 for rows that only pad."""
        if self._batch is not None:  # else a forward outside of a step, such as a warm-up
            self._print("forward", self.place(row.device.type, number), size, row[row >= 0].tolist())

    def done(self, row: torch.Tensor, where: torch.Tensor, device: torch.device | str) -> None:
        """After the forward. `where` (n,) is what `TracedModel` returned for `row` (n,), on `device`."""
        if self._batch is not None:
            names = [self.place(torch.device(device).type, number) for number in where[row >= 0].tolist()]
            self._print("done", str(device), (), row[row >= 0].tolist(), names)

    def place(self, kind: str, number: int) -> str:
        """A device in words: `cuda:1`, `cpu`, or `cpu replica 1`."""
        if kind != "cpu":
            return f"{kind}:{number}"
        return f"cpu replica {number}" if self.num_replicas > 1 else "cpu"

    def _print(self, block: str, device: str, size: Sequence[int], rows: Sequence[int],
               places: Sequence[str] = ()) -> None:
        batch = self._batch
        assert batch is not None
        shape = f", input size {tuple(size)}" if size else ""
        head = f"[{block}] epoch {batch.step.epoch} step {batch.step.step}, {device}, {self.who}{shape}"
        about: list[Sequence[Any]] = [batch.worker, batch.shard, batch.count, self._labels]
        columns = [rows, *([values[row] for row in rows] for values in about), places]
        with self.lock:
            self.write("\n".join([head, *_table(columns)] if rows else [head, "    no samples"]))


def _table(columns: Sequence[Sequence[Any]]) -> list[str]:
    """A line per sample under one of headings; a column without values is left out."""
    cells = [[name, *map(str, column)] for name, column in zip(COLUMNS, columns, strict=True) if column]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in cells]
    return ["    " + "  ".join(line) for line in zip(*padded, strict=True)]


def only_replica() -> int:
    """The number of the replica where there is one."""
    return 0


class TracedModel(nn.Module):
    """A model that says what it sees. Wrap it before DP or DDP do, so that each replica speaks for itself.

    forward(image (n, …), row (n,) int64) -> (what the module returns, where (n,) int64). `row` are places in the batch,
    dealt out along with the images, -1 for rows that only pad. `where` is the CUDA device's index or, on the CPU, what
    `replica()` says on the replica's thread. Without a printer it only tells `where`.
    """

    def __init__(self, module: nn.Module, printer: TracePrinter | None = None,
                 replica: Callable[[], int] = only_replica):
        super().__init__()
        self.module, self.printer, self.replica = module, printer, replica

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = image.device
        number = self.replica() if device.type == "cpu" else device.index
        if self.printer is not None:
            self.printer.forward(row, number, image.shape)
        return self.module(image), torch.full_like(row, number)
