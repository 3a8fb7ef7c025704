"""The loader against a model's step: does the device wait for images?

    python -m common.benchmark -s shards/train -w 2 --step --arch resnet50 --amp bf16
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from common.benchmarks.loader import Input, images_per_second
from common.collate import Batch
from common.distributed import choose_devices, single_process
from common.loader import on_device
from common.model import Normalized, build_model
from common.optim import amp_dtype, build_optimizer, grad_scaler
from common.step import Recipe, Stepper
from common.watch import Watch

NUM_WARM_STEPS = 3  # allocators and kernels settle


def show_step(data: Input, num_workers: int, arch: str, amp: str, device_name: str, num_steps: int) -> dict[str, Any]:
    """Time steps on one batch again and again, the loader alone, and steps on what it gives; print and return."""
    device = choose_devices(device_name, None)[0]
    stepper = _stepper(data, arch, amp, device)
    loader = images_per_second(data, num_workers, num_steps * data.batch_size, device)
    with closing(on_device(iter(data.loader(num_workers)), device)) as batches:
        first = next(batches)
        kept = replace(first, image=first.image.clone(), label=first.label.clone())  # the ring will be written again
        synthetic, _ = _timed_steps(stepper, repeat(kept), num_steps)
        real, wait = _timed_steps(stepper, batches, num_steps)
    print(f"{arch}, batch {data.batch_size}, amp {amp}, device {device}, {num_workers} workers")
    for name, rate in (("step on one batch", synthetic), ("loader alone", loader), ("step on real data", real)):
        print(f"{name:18s} {rate:8.0f} images/s")
    verdict = verdict_of(synthetic, loader, real, wait)
    print(verdict)
    return {"images_per_second": real, "synthetic_images_per_second": synthetic, "loader_images_per_second": loader,
            "data_wait": wait, "verdict": verdict}


def verdict_of(synthetic: float, loader: float, real: float, wait: float) -> str:
    """One sentence: whether the device starves."""
    if wait < 0.05:
        return f"the device does not wait: {wait:.0%} of the time goes into waiting for images; the step limits"
    if loader > synthetic:
        return (f"{wait:.0%} of the time goes into waiting, though the loader alone is fast enough: both use the same "
                f"cores; real data reaches {real / synthetic:.0%} of the step's rate")
    return (f"the device starves: {wait:.0%} of the time goes into waiting for images, the loader gives "
            f"{loader / synthetic:.0%} of what the step could take; raise -w, or write smaller images "
            "(python -m common.make_shards --resize 256)")


def _stepper(data: Input, arch: str, amp: str, device: torch.device) -> Stepper:
    module, _ = build_model(arch, max(data.index.num_classes, 1), "none", data.seed, data.image_size)
    module.to(device)
    with single_process(device) as world:
        optimizer = build_optimizer(module, "sgd", 1e-4, (0.9, 0.999), 0.9, 0.0)
        recipe = Recipe(lr=1e-4, amp=amp_dtype(amp), seed=data.seed)
        return Stepper(Normalized(module), optimizer, grad_scaler(device, amp_dtype(amp)), recipe, world, Watch())


def _timed_steps(stepper: Stepper, batches: Iterable[Batch], num_steps: int) -> tuple[float, float]:
    """Images per second, and the share of the time that was spent waiting for batches."""
    source: Iterator[Batch] = iter(batches)
    for _ in range(NUM_WARM_STEPS):
        stepper.train(next(source))
    count, wait, start = 0, 0.0, time.perf_counter()
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = next(source)
        wait += time.perf_counter() - asked
        count += stepper.train(batch).num_samples  # ends with .item(), so the device is done
    seconds = time.perf_counter() - start
    return count / seconds, wait / seconds
