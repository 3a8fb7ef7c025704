"""One step: what is added up, and that nothing in it waits for the device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.collate import Batch
from common.distributed import World
from common.model import normalize
from common.optim import grad_scaler
from common.sampling import Step, deal
from common.step import Recipe, Stepper
from common.watch import Watch

WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


class Waits(TorchDispatchMode):
    """Lists the operators that a GPU would have to be waited for: those whose result Python or a shape depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        masks = [index for index in args[1] if index is not None and index.dtype == torch.bool] \
            if name in ("aten.index", "aten.index_put", "aten.index_put_") else []
        if name in WAITS or masks:
            self.found.append(name)
        return func(*args, **kwargs or {})


def make(num_samples: int, device: str = "cpu", **recipe: Any) -> tuple[Stepper, Batch]:
    """A linear model behind a BatchNorm, and a batch of this rank in a global one of twice the size."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).to(device)

    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.module(normalize(image))

    world = World(0, 1, 0, torch.device(device))
    stepper = Stepper(Normal(), torch.optim.SGD(module.parameters(), 0.1), grad_scaler(world.device, None),
                      Recipe(lr=0.1, clip_grad=1.0, **recipe), world, Watch())
    image = torch.randint(0, 256, (num_samples, 3, 4, 4), dtype=torch.uint8)
    label = torch.arange(num_samples) % 5
    names = [""] * num_samples
    step = Step(0, 0, 0, 0, max(2 * num_samples, 1))
    return stepper, Batch(image.to(device), label.to(device), step, [0] * num_samples, names, [0] * num_samples, names)


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 7])
def test_only_real_rows_are_added_up(num_samples: int, accum: int) -> None:
    """BatchNorm gets two rows at least; those that fill up give neither loss nor gradient nor a right answer."""
    stepper, batch = make(num_samples, accum=accum, label_smoothing=0.1)
    reference, _ = make(num_samples)
    module, loss_sum, num_correct = reference.model, 0.0, 0
    starts = {start: stop for start, stop in pairwise(deal(num_samples, accum)) if stop > start}
    for start, stop in starts.items():
        image, label = batch.image[start:stop], batch.label[start:stop]
        if len(image) == 1:
            image = torch.cat([image, image])
        logits = module(image)[: stop - start]
        losses = F.cross_entropy(logits, label, reduction="none", label_smoothing=0.1)
        (losses.sum() / batch.step.size).backward()
        loss_sum += losses.detach().double().sum().item()
        num_correct += int((logits.argmax(dim=1) == label).sum())
    gradients = {}
    stepper._update = lambda: gradients.update(  # type: ignore[method-assign]
        {name: value.grad.clone() for name, value in stepper.model.named_parameters()})
    outcome = stepper.train(batch)
    assert outcome.loss == pytest.approx(loss_sum, rel=1e-6)  # the layout of rows that fill up changes the last bits
    assert (outcome.correct, outcome.num_samples) == (num_correct, num_samples)
    for name, value in module.named_parameters():
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        assert torch.allclose(gradients[name], expected, atol=1e-7), name


@pytest.mark.parametrize("num_samples", [1, 6])
def test_a_step_waits_for_nothing(num_samples: int) -> None:
    """But for the two sums at its end, which are fetched together."""
    stepper, batch = make(num_samples, accum=2 if num_samples > 1 else 1)
    with Waits() as waits:
        stepper.train(batch)
    assert waits.found == []
    with Waits() as waits:
        batch.image[batch.label >= 0].sum().item()
    assert waits.found == ["aten.index", "aten._local_scalar_dense"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: waiting for one needs one")
def test_a_step_waits_for_the_gpu_once() -> None:
    stepper, batch = make(6, "cuda", accum=2)
    stepper.train(batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as warned:
            stepper.train(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(warned) == 1
