"""`--profile`: what a few steps spend their time on, as a trace file per rank for Perfetto or chrome://tracing.

    for batch in profiled(batches, Path("runs/…/profile/rank00000.json"), device): ...
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from common.collate import Batch
from common.files import writing

SKIPPED, WARM_UP, ACTIVE = 1, 1, 5  # steps: the first ones allocate memory and choose algorithms
UNPROFILED = SKIPPED + WARM_UP


def profiled(batches: Iterator[Batch], path: Path, device: torch.device) -> Generator[Batch, None, None]:
    """The same batches, with the profiler running on the ACTIVE steps that follow the first UNPROFILED ones.

    A step lasts until the next batch is asked for, so waiting for input is in it. The file is written after them, or at
    the end of a shorter run, if that came to one of them; from then on nothing is measured. Raises UserError where it
    cannot be written.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every GPU that it does not find
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def export(found: Any) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()  # torch only logs what it cannot write
        found.export_chrome_trace(str(path))

    threads = _ExperimentalConfig(profile_all_threads=True)  # DataParallel's replicas run on threads
    steps = schedule(wait=SKIPPED, warmup=WARM_UP, active=ACTIVE, repeat=1)
    try:
        with profile(activities=activities, schedule=steps, on_trace_ready=export, acc_events=True,
                     experimental_config=threads) as profiler:
            for number, batch in enumerate(batches):
                yield batch
                profiler.step()
                if number + 1 == UNPROFILED + ACTIVE:
                    break
        yield from batches
    finally:
        getattr(batches, "close", lambda: None)()
