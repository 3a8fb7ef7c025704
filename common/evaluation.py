"""Validation: each image once, by the bare module, and the same number to the last digit for any number of ranks.

A batch goes whole to one rank (a convolution's last bits depend on the batch it runs in); the sums of
the batches are added in the order of the batches, and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from common.collate import Batch
from common.distributed import World
from common.launching.failure import SharedError
from common.loader import on_device
from common.metrics import BatchSums, ConfusionMatrix, batch_sums, gather_batch_sums, summarise
from common.model import normalize
from common.optim import autocast
from common.predictions import Predictions
from common.running.error_log import ErrorLog
from common.step import Recipe


@dataclass(frozen=True)
class Validation:
    """The validation set of a run. `batches` starts a loader of this rank's; `num_batches` counts all ranks'."""

    batches: Callable[[], Iterator[Batch]]
    num_batches: int
    num_classes: int
    classes: tuple[str, ...] | None = None

    def matched(self, num_classes: int, classes: Sequence[str] | None) -> Validation:
        """This set for a model of other data's classes. Raises SharedError where a label would mean something else."""
        if self.num_classes > num_classes:
            raise SharedError(f"the validation set has {self.num_classes} classes, the model knows {num_classes}; "
                              "--val_path; validate on shards of the classes that are trained on")
        names = zip(self.classes or (), classes or (), strict=False)
        for label, (name, known) in enumerate(names):
            if name != known:
                raise SharedError(f"class {label} is {name} in the validation set and {known} in the training set; "
                                  "--val_path; write both from one list of classes")
        return replace(self, num_classes=num_classes)


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0: BatchNorm's statistics differ by what each rank has seen."""
    if world.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def evaluate(module: nn.Module, data: Validation, recipe: Recipe, world: World, asked_to_stop: Callable[[], bool],
             errors: ErrorLog, predictions: Predictions | None = None) -> dict[str, Any] | None:
    """`loss`, `top1` and `top5` (percent), `samples`, and `confusion`, a ConfusionMatrix; None after a stop.

    Every rank calls it. `asked_to_stop` is what this rank knows; after each round of one batch per rank all stop if
    one of them was asked to.
    """
    share_buffers(module, world)
    module.eval()
    rows, confusion = [], ConfusionMatrix(data.num_classes)
    batches = on_device(data.batches(), world.device)
    try:
        for _ in range(0, data.num_batches, world.size):
            batch = next(batches, None)
            logits = _logits(module, batch, recipe, world.device) if batch is not None and len(batch) else None
            if batch is not None:  # without a sample where all had to be skipped
                nothing = BatchSums(batch.step.step, 0.0, 0, 0, 0)
                rows.append(nothing if logits is None else _sums(batch, logits, confusion))
            if predictions is not None:
                predictions.add(batch, logits)
            num_new = errors.add(batch, "val") if batch is not None else 0
            stop, num_bad = world.sum([asked_to_stop(), num_new])
            errors.check(int(num_bad))
            if stop:
                batches.close()
                return None
    finally:
        module.train()
    batches.close()
    confusion.add_ranks(world)
    sums = gather_batch_sums(world, rows)
    if sums and not any(row.samples for row in sums):
        raise errors.refusal("not one sample of --val_path could be used", "val")
    return summarise(sums) | {"confusion": confusion}


@torch.inference_mode()
def _logits(module: nn.Module, batch: Batch, recipe: Recipe, device: torch.device) -> torch.Tensor:
    with autocast(device, recipe.amp):
        return module(normalize(batch.image, memory_format=recipe.memory_format)).float()


@torch.inference_mode()
def _sums(batch: Batch, logits: torch.Tensor, confusion: ConfusionMatrix) -> BatchSums:
    confusion.update(logits, batch.label)
    return batch_sums(batch.step.step, logits, batch.label, F.cross_entropy(logits, batch.label, reduction="none"))
