"""What comes together between two reports: means over images, and rates over the time that they took."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass
class Period:
    """Sums since the last report; `began` is None until the first batch is over, whose wait is that of a cold start."""

    began: float | None
    num_steps: int = 0
    num_images: int = 0
    loss: float = 0.0
    top1: float = 0.0
    timed_steps: int = 0
    timed_images: int = 0
    wait_seconds: float = 0.0

    def add(self, now: float, loss: float, top1: float, num_images: int, wait_seconds: float) -> None:
        self.num_steps += 1
        self.num_images += num_images
        self.loss += loss * num_images
        self.top1 += top1 * num_images
        if self.began is None:
            self.began = now
        else:
            self.timed_steps += 1
            self.timed_images += num_images
            self.wait_seconds += wait_seconds

    def row(self, now: float) -> dict[str, float]:
        """Means over the images, and rates over the time; no rates where no step was timed."""
        num_images = max(self.num_images, 1)
        means = {"loss": self.loss / num_images, "top1": self.top1 / num_images}
        if self.began is None or not self.timed_steps or now <= self.began:
            return means
        seconds = now - self.began
        return means | {"images_per_second": round(self.timed_images / seconds, 2),
                        "data_wait": round(min(self.wait_seconds / seconds, 1.0), 4)}


def memory() -> dict[str, float]:
    """MiB: the most allocated on the CUDA device so far, where one is in use, and what this process holds now."""
    held = {}
    if torch.cuda.is_initialized():
        held["device_memory_mb"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    with suppress(OSError), open("/proc/self/statm") as file:
        held["host_memory_mb"] = round(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return held
