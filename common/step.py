"""One optimiser step: forward, backward and update, so that any number of ranks computes what one would.

Each sample's loss weighs 1 / (size of the global batch), the short last batch included, and rows that only
fill up a batch weigh nothing. DistributedDataParallel averages over ranks, so the loss is scaled by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from common.collate import Batch
from common.data_parallel import padded_size
from common.distributed import World
from common.metrics import correct_counts
from common.optim import autocast, learning_rate, set_lr
from common.sampling import STEP, Step, deal, hashed
from common.watch import Watch


@dataclass(frozen=True)
class Recipe:
    """How a step is done: values that stay the same through a run. `num_replicas` is DP's, 1 elsewhere."""

    lr: float
    schedule: str = "constant"
    warmup_epochs: float = 0.0
    num_epochs: int = 1
    steps_per_epoch: int = 1
    global_batch: int = 1
    label_smoothing: float = 0.0
    accum: int = 1
    clip_grad: float = 0.0
    amp: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format  # of the model and of its images alike
    seed: int = 0
    num_replicas: int = 1

    def lr_at(self, step: Step) -> float:
        """The learning rate of a step, by the samples of the run that lie before it.

        So a run that goes on with another global batch goes on along its curve, to within a step: no second warm-up.
        """
        place = step.epoch * self.steps_per_epoch + step.start / self.global_batch  # global_step, if nothing changed
        return learning_rate(place, base=self.lr, schedule=self.schedule,
                             warmup_steps=round(self.warmup_epochs * self.steps_per_epoch),
                             total_steps=self.num_epochs * self.steps_per_epoch)


@dataclass(frozen=True)
class Outcome:
    """Sums over this rank's samples of one step."""

    loss: float
    correct: int
    num_samples: int


@dataclass
class Stepper:
    """What a step works on. `model` takes uint8 images and may be wrapped (DDP, DP, compiled)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    recipe: Recipe
    world: World
    watch: Watch

    def train(self, batch: Batch) -> Outcome:
        """One step on this rank's part of a global batch. Every rank calls it, also with no samples."""
        recipe, step = self.recipe, batch.step
        torch.manual_seed(hashed(recipe.seed, STEP, step.global_step, self.world.rank))  # dropout and the like
        set_lr(self.optimizer, recipe.lr_at(step))
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # of the losses, of right answers
        self.watch.before(batch)
        parts = list(self._micro_batches(batch))
        for number, (image, label, row, num_real) in enumerate(parts):
            with self._no_sync(number < len(parts) - 1), autocast(self.world.device, recipe.amp):
                logits = self.watch.forward(self.model, image, row)
                losses = F.cross_entropy(logits.float(), label, reduction="none",
                                         label_smoothing=recipe.label_smoothing)
                loss = losses[:num_real].sum() * (self.world.size / step.size)
                self.scaler.scale(loss).backward()
            correct = correct_counts(logits.detach()[:num_real], label[:num_real], (1,))
            sums += torch.cat([losses.detach()[:num_real].double().sum()[None], correct])
        self._update()
        self.watch.after(batch)
        loss_sum, num_correct = sums.tolist()  # waits for the device; nothing above does, except fp16's GradScaler
        return Outcome(loss_sum, int(num_correct), len(batch))

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
        """Images, labels, row numbers and how many rows are real, in `accum` parts.

        Behind the real rows come some of number -1, as many as BatchNorm needs: only the real ones are added up.
        """
        row = torch.arange(len(batch), device=self.world.device)
        borders = deal(len(batch), self.recipe.accum)  # as many parts on every rank: some models meet in each forward
        for start, stop in pairwise(borders):
            image, label = batch.image[start:stop], batch.label[start:stop]
            missing = padded_size(len(label), self.recipe.num_replicas) - len(label)
            if missing:  # copies of the last row where there is one: they shift the statistics least
                filling = image[-1:] if len(image) else image.new_zeros(1, *image.shape[1:])
                image = torch.cat([image, filling.expand(missing, -1, -1, -1)])
                image = image.contiguous(memory_format=torch.channels_last)
                label = torch.cat([label, label.new_zeros(missing)])
            yield image, label, torch.cat([row[start:stop], row.new_full((missing,), -1)]), stop - start

    def _no_sync(self, wanted: bool) -> AbstractContextManager[None]:
        no_sync: Any = getattr(self.model, "no_sync", nullcontext)
        return no_sync() if wanted else nullcontext()

    def _update(self) -> None:
        if self.recipe.clip_grad:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def warm_up(self, image_size: int) -> None:
        """One forward and backward that leave no trace. Every rank calls it before the first step of every start.

        DDP lays out its buckets anew after the first backward; with three ranks or more the layout decides the order of
        sums, and so the last bits. After this, a resumed run sums like one that was never stopped.
        """
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        num_rows = padded_size(2, self.recipe.num_replicas)
        image = torch.zeros(num_rows, 3, image_size, image_size, dtype=torch.uint8, device=self.world.device)
        with autocast(self.world.device, self.recipe.amp):
            row = torch.full((len(image),), -1, device=self.world.device)
            logits = self.watch.forward(self.model, image.contiguous(memory_format=torch.channels_last), row)
            (logits.float().sum() * 0).backward()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(buffers[name])
