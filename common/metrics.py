"""Means, accuracies, and sums that come out equal to the last digit on any number of ranks.

Adding floats in another order gives other last digits. So validation keeps the sums of each batch, and one
place adds them up in the order of the batches, whoever computed them.

    rows.append(batch_sums(t, logits, label, loss))     # loss: (n,), one a sample
    summarise(gather_batch_sums(world, rows))           # {"loss": ..., "top1": ..., "top5": ..., "samples": ...}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.errors import UserError


class AverageMeter:
    """A weighted mean, and the latest value. Plain floats: no graph is kept alive, and any checkpoint can hold it."""

    def __init__(self) -> None:
        self.value, self.total, self.weight = 0.0, 0.0, 0.0

    def update(self, value: float, weight: float = 1.0) -> None:
        """Add `value` with a weight, mostly a number of samples."""
        self.value = value
        if weight:  # a batch without samples may bring NaN: 0 x NaN would stay for ever
            self.total += self.value * weight
            self.weight += weight

    @property
    def mean(self) -> float:
        """NaN before the first update."""
        return self.total / self.weight if self.weight else float("nan")

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "total": self.total, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.total, self.weight = (float(state[key]) for key in ("value", "total", "weight"))


def correct_counts(logits: Tensor, label: Tensor, topk: Sequence[int] = (1, 5)) -> Tensor:
    """For each k of `topk`, how many labels are among the k highest logits: int64, (len(topk),), on the device.

    logits (n, C) of any float type, label (n,) int64. Equal logits rank by class number, on every device alike.
    A row with a NaN in it is a wrong answer for every k. k may exceed C.
    """
    own = logits.gather(1, label[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < label[:, None]
    rank = ((logits > own) | ((logits == own) & earlier)).sum(dim=1)  # 0 for the highest
    answered = ~logits.isnan().any(dim=1)
    return torch.stack([((rank < k) & answered).sum() for k in topk])


def accuracy(logits: Tensor, label: Tensor, topk: Sequence[int] = (1, 5)) -> list[int]:
    """`correct_counts` as plain numbers; on a GPU this waits for the result."""
    return [int(count) for count in correct_counts(logits, label, topk).tolist()]


class BatchSums(NamedTuple):
    """What one validation batch adds: its number, the sum of its losses, correct answers, samples."""

    batch: int
    loss: float
    correct1: int
    correct5: int
    samples: int


def batch_sums(batch: int, logits: Tensor, label: Tensor, loss: Tensor) -> BatchSums:
    """The sums of batch number `batch`: logits (n, C), label (n,), loss (n,), one a sample; added in float64."""
    correct1, correct5 = accuracy(logits, label, (1, 5))
    return BatchSums(batch, float(loss.detach().double().sum()), correct1, correct5, len(label))


class Gathering(Protocol):
    """What is asked of a World: everybody's object, in order of rank, on every rank."""

    def gather(self, obj: Any, /) -> list[Any]: ...


def gather_batch_sums(world: Gathering, rows: Iterable[BatchSums]) -> list[BatchSums]:
    """All ranks' rows in the order of their batches, on every rank; every rank must call it."""
    gathered = [BatchSums(*row) for part in world.gather([tuple(row) for row in rows]) for row in part]
    gathered.sort(key=lambda row: row.batch)
    assert [row.batch for row in gathered] == list(range(len(gathered))), "a validation batch is missing or came twice"
    return gathered


def summarise(rows: Sequence[BatchSums]) -> dict[str, float | int]:
    """Mean loss per sample, top1 and top5 in percent, and samples; `rows` in the order of their batches."""
    loss, correct1, correct5, samples = 0.0, 0, 0, 0
    for row in rows:  # not sum(): newer Pythons compensate its rounding, older ones do not
        loss, samples = loss + row.loss, samples + row.samples
        correct1, correct5 = correct1 + row.correct1, correct5 + row.correct5
    if not samples:
        raise UserError("no samples to validate on; --val_path; name a folder of shards that holds some")
    return {
        "loss": loss / samples,
        "top1": 100.0 * correct1 / samples,
        "top5": 100.0 * correct5 / samples,
        "samples": samples,
    }


class ConfusionMatrix:
    """How often each class was taken for each class: exact counts of the pairs that occur, however many classes."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.pairs: Counter[tuple[int, int]] = Counter()  # of label and answer; num_classes stands for no answer

    def update(self, logits: Tensor, label: Tensor) -> None:
        """Add a batch: logits (n, C), label (n,). The answer is the class that `accuracy` takes for top1.

        A row with a NaN has no answer: it is wrong without being another class.
        """
        answer = logits.argmax(dim=1).where(~logits.isnan().any(dim=1), self.num_classes)
        self.pairs.update(zip(*torch.stack([label, answer]).tolist(), strict=True))

    def add_ranks(self, world: Gathering) -> None:
        """Add up what all ranks have; every rank must call it, once."""
        gathered, self.pairs = world.gather(self.pairs), Counter()
        for pairs in gathered:
            self.pairs.update(pairs)

    @property
    def counts(self) -> Tensor:
        """int64, (C, C): rows are labels, columns answers. Made when asked for: 100 000 classes are 80 GB."""
        table = torch.zeros(self.num_classes, self.num_classes + 1, dtype=torch.int64)
        label, answer = torch.tensor([*self.pairs], dtype=torch.int64).view(-1, 2).T
        table[label, answer] = torch.tensor([*self.pairs.values()], dtype=torch.int64)
        return table[:, :-1]

    def by_class(self) -> Tensor:
        """int64, (2, C): how many samples of each class were recognised, and how many there are."""
        right, total = [0] * self.num_classes, [0] * self.num_classes
        for (label, answer), count in self.pairs.items():
            total[label] += count
            right[label] += count * (label == answer)
        return torch.tensor([right, total])
