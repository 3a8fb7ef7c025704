"""What looks on while a step is done. `Watch` sees nothing and costs nothing; `TraceWatch` is `--trace`.

    watch = make_watch(("print", "save"), records, devices=[world.device])
    model = watch.wrap(module)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from common.collate import Batch
from common.data_parallel import current_replica
from common.running.records import Records
from common.trace import Trace
from common.tracing.printing import TracedModel, TracePrinter


class Watch:
    """Calls the model and looks away."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """What DP or DDP go around."""
        return module

    def before(self, batch: Batch) -> None:
        """A step begins."""

    def forward(self, model: nn.Module, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """The model's logits for images (n, 3, H, W); `row` (n,) are places in the batch, -1 for rows that fill it."""
        return model(image)

    def after(self, batch: Batch) -> None:
        """The step is over."""


class TraceWatch(Watch):
    """Records and prints which sample was where, as told from inside the model's forward."""

    def __init__(self, trace: Trace | None, printer: TracePrinter | None, device: torch.device,
                 devices: Sequence[torch.device]):
        self.trace, self.printer, self.device = trace, printer, device
        cuda = device.type == "cuda"  # on the CPU replicas are told apart by their number
        self._replicas = {device.index: number for number, device in enumerate(devices)} if cuda else {}
        self._replica: list[int] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        return TracedModel(module, self.printer, current_replica)

    def before(self, batch: Batch) -> None:
        self._replica = [0] * len(batch)
        if self.printer:
            self.printer.batch(batch, self.device)

    def forward(self, model: nn.Module, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        logits, where = model(image, row)
        if self.printer:
            self.printer.done(row, where, self.device)
        for place, number in zip(row.tolist(), where.tolist(), strict=True):
            if place >= 0:
                self._replica[place] = self._replicas.get(number, number)
        return logits

    def after(self, batch: Batch) -> None:
        if self.trace:
            self.trace.save(batch, str(self.device), self._replica)


def make_watch(modes: Sequence[str], records: Records, devices: Sequence[torch.device]) -> Watch:
    """The watch for `--trace`. Every rank calls it."""
    if not modes:
        return Watch()
    world = records.world
    trace = Trace(records.folder.path, records.attempt, world.rank, world.size) if "save" in modes else None
    printer = TracePrinter(records.lock, world.rank, world.size, len(devices)) if "print" in modes else None
    return TraceWatch(trace, printer, world.device, devices)
