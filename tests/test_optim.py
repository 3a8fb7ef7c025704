"""Optimisers by name, the learning rate as a function of the step, mixed precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.optim import amp_dtype, autocast, build_optimizer, grad_scaler, learning_rate, set_lr
from common.sampling import Progress, num_steps, steps
from common.step import Recipe


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 36, 4))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        module(torch.randn(4, 3, 8, 8, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


REFERENCES = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95)),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.7),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_are_those_of_torch_with_decay_on_weights_alone(name: str) -> None:
    module, other = network(), network()
    optimizer = build_optimizer(module, name, lr=0.01, betas=(0.8, 0.95), momentum=0.7, weight_decay=0.1)
    weights = [other[0].weight, other[3].weight]
    rest = [other[0].bias, other[1].weight, other[1].bias, other[3].bias]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    for ours, theirs in zip(train(module, optimizer), train(other, REFERENCES[name](groups)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_restored_in_mid_run_the_steps_are_the_same_bits(name: str) -> None:
    module, other = network(), network()
    whole = train(module, build_optimizer(module, name, lr=0.01), 6)
    first = build_optimizer(other, name, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            state, first = first.state_dict(), build_optimizer(other, name, lr=0.5)
            first.load_state_dict(state)
        first.zero_grad()
        other(torch.randn(4, 3, 8, 8, generator=generator)).square().sum().backward()
        first.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, other.parameters(), strict=True))


def test_frozen_parameters_are_left_out() -> None:
    module = network()
    module[0].requires_grad_(False)
    optimizer = build_optimizer(module, "adamw")
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    with pytest.raises(UserError, match="frozen"):
        build_optimizer(module.requires_grad_(False), "adamw")


def test_a_wrong_name_is_told_with_its_flag() -> None:
    with pytest.raises(UserError, match="--optimizer adagrad"):
        build_optimizer(network(), "adagrad")


def rates(num_steps: int, schedule: str, warmup_steps: int = 0, total_steps: int = 10) -> list[float]:
    return [
        learning_rate(step, base=2.0, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        for step in range(num_steps)
    ]


def test_constant_rate() -> None:
    assert rates(3, "constant") == [2.0, 2.0, 2.0]
    assert rates(6, "constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_rate() -> None:
    assert rates(4, "cosine", total_steps=4) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert rates(6, "cosine", warmup_steps=2, total_steps=6)[:3] == [1.0, 2.0, 2.0]
    assert rates(6, "cosine", warmup_steps=2, total_steps=6)[4] == pytest.approx(1.0)
    assert rates(8, "cosine", total_steps=4)[4:] == pytest.approx([0.0] * 4)  # after the end it stays down
    falling = rates(100, "cosine", warmup_steps=10, total_steps=100)[10:]
    assert falling == sorted(falling, reverse=True) and falling[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup_steps, total_steps", [(0, 0), (5, 5), (5, 3), (0, 1)])
def test_odd_lengths_give_sound_rates(schedule: str, warmup_steps: int, total_steps: int) -> None:
    assert all(0 <= rate <= 2.0 for rate in rates(9, schedule, warmup_steps, total_steps))
    assert rates(1, schedule, warmup_steps, total_steps)[0] > 0  # the first step always moves


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(UserError, match="--schedule linear"):
        rates(1, "linear")


@pytest.mark.parametrize("name", REFERENCES)
def test_set_lr_reaches_every_group_and_the_next_step(name: str) -> None:
    module = network()
    optimizer = build_optimizer(module, name, lr=0.1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    set_lr(optimizer, 0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, train(module, optimizer), strict=True))


def test_precisions() -> None:
    assert [amp_dtype(name) for name in ("none", "bf16", "fp16")] == [None, torch.bfloat16, torch.float16]
    with pytest.raises(UserError, match="--amp int8"):
        amp_dtype("int8")


@pytest.mark.parametrize("name, dtype", [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_mixed_precision_step_moves_the_weights(name: str, dtype: torch.dtype) -> None:
    device, module = torch.device("cpu"), network()
    optimizer, scaler = build_optimizer(module, "adam"), grad_scaler(device, amp_dtype(name))
    before = module[3].weight.detach().clone()
    with autocast(device, amp_dtype(name)):
        logits = module(torch.randn(4, 3, 8, 8))
    assert logits.dtype == dtype
    scaler.scale(logits.float().square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.is_enabled() == (name == "fp16")
    assert module[3].weight.isfinite().all() and not torch.equal(module[3].weight, before)


def test_the_scaler_leaves_out_a_step_that_overflowed() -> None:
    module = network()
    optimizer, scaler = build_optimizer(module, "adam"), grad_scaler(torch.device("cpu"), torch.float16)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    scaler.scale(module(torch.randn(4, 3, 8, 8)).sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert scaler.get_scale() < 2**16


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_after_a_first_step_that_overflowed_the_next_ones_are_torchs(name: str, restored: None) -> None:
    """Left out, it must leave no state: torch's fused SGD would keep memory as it was for its momentum. Filled with NaN
    here, as --deterministic has it."""
    torch.use_deterministic_algorithms(True)
    weights = []
    for skipped in (True, False):
        torch.manual_seed(0)
        module = network()
        optimizer, scaler = build_optimizer(module, name, lr=0.1), grad_scaler(torch.device("cpu"), torch.float16)
        image = torch.randn(4, 3, 8, 8)
        for factor in ([math.inf] if skipped else []) + [1.0, 1.0]:
            optimizer.zero_grad()
            scaler.scale(module(image).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


SAMPLES, EPOCHS = 57, 6


def curve(global_batch: int, progress: Progress | None = None) -> list[tuple[float, float]]:
    """(epochs done, rate) of every step that is left of a run, as a run with this batch sees it."""
    recipe = Recipe(lr=1.0, schedule="cosine", warmup_epochs=1.5, num_epochs=EPOCHS,
                    steps_per_epoch=num_steps(SAMPLES, global_batch), global_batch=global_batch)
    return [(step.epoch + step.start / SAMPLES, recipe.lr_at(step))
            for step in steps(SAMPLES, global_batch, EPOCHS, progress or Progress())]


def test_with_the_same_batch_the_rate_follows_the_number_of_the_step() -> None:
    for global_batch in (4, 5, 57, 100):
        per_epoch = num_steps(SAMPLES, global_batch)
        expected = [learning_rate(step, base=1.0, schedule="cosine", warmup_steps=round(1.5 * per_epoch),
                                  total_steps=EPOCHS * per_epoch) for step in range(EPOCHS * per_epoch)]
        assert [rate for _, rate in curve(global_batch)] == expected
    assert curve(5, Progress(2, 3, 27, 15)) == curve(5)[27:] == curve(5, Progress(2, 3, 33, 15))  # whatever came before


@pytest.mark.parametrize("before, after", [(4, 8), (8, 4), (4, 57), (6, 5), (3, 1)])
@pytest.mark.parametrize("done", [1, 5, 9, 12, 20])
def test_with_another_batch_the_rate_goes_on_along_the_curve(before: int, after: int, done: int) -> None:
    """No jump, no second warm-up, the same end: the rate of a run that had this batch from the start."""
    at = list(steps(SAMPLES, before, EPOCHS, Progress()))[done]
    left = curve(after, Progress(at.epoch, at.step, at.global_step, at.start))
    whole = curve(after)
    for place, rate in left:
        near = [other for there, other in whole if abs(there - place) <= max(before, after) / SAMPLES]
        assert min(near) - 1e-9 <= rate <= max(near) + 1e-9
    falling = [rate for place, rate in left if place > 1.5 + after / SAMPLES]
    assert falling == sorted(falling, reverse=True)
    assert left[-1][1] <= whole[-2][1]
