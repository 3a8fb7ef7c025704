"""The loader of one rank: starts the workers once, hands out a `Batch` per step, and runs on across epochs.

Its workers go on reading the next epoch while the model is validated, since nothing stops them at an
epoch's end but a full queue.

    for batch in on_device(Loader(dataset, batch_size=64, num_workers=2), world.device): ...
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from common.collate import Batch, Made, assemble, shared_ring
from common.dataset import BatchDataset
from common.errors import UserError
from common.sampling import Step

PREFETCH = 2  # pieces that each worker has ready ahead of time


class Loader:
    """Iterate once. `start_method` is fork, spawn or forkserver; None takes Python's own."""

    def __init__(self, dataset: BatchDataset, num_workers: int, start_method: str | None = None):
        self.dataset, self.num_workers, self.start_method = dataset, num_workers, start_method

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batch of each step that is left of the run. Raises UserError with what a worker found."""
        mixing, dataset = self.dataset.mixing, self.dataset
        num_slots = mixing.num_slots(PREFETCH if self.num_workers else 0)
        dataset.ring = shared_ring(num_slots, mixing.batch_size, dataset.transform.size)
        made = self._made()
        try:
            for group in mixing.groups(self._steps()):
                num_pieces = mixing.num_workers if mixing.kind == "pooled" else len(group)
                pieces = [_checked(piece) for piece in itertools.islice(made, num_pieces)]
                for step in group:
                    slot = pieces[0].slots[0] if mixing.kind == "queue" else dataset.slot(step.global_step, 0, 0)
                    if step.global_step >= dataset.source.plan.progress.global_step:
                        yield assemble(step, dataset.ring[slot], pieces)
        finally:
            made.close()

    def _steps(self) -> Iterator[Step]:
        """The steps of the source; from the start of a group where the run goes on within one."""
        progress, mixing = self.dataset.source.plan.progress, self.dataset.mixing
        back = progress.step - mixing.group_start(progress.step)
        if not back:
            return self.dataset.source.steps()
        size = self.dataset.source.plan.global_batch
        earlier = replace(progress, step=progress.step - back, global_step=progress.global_step - back,
                          position=progress.position - back * size)
        return replace(self.dataset.source, plan=replace(self.dataset.source.plan, progress=earlier)).steps()

    def _made(self) -> Iterator[Made]:
        if not self.num_workers:
            yield from self.dataset
            return
        loader = DataLoader(
            self.dataset, batch_size=None, num_workers=self.num_workers, prefetch_factor=PREFETCH,
            worker_init_fn=start_worker, multiprocessing_context=self.start_method,
            generator=torch.Generator(),  # its base seed would be drawn from the global generator otherwise
            in_order=self.dataset.mixing.kind != "queue",
        )
        batches = iter(loader)
        try:
            yield from batches
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(f"a loader worker died ({str(error).splitlines()[0]}); on {os.uname().nodename}; "
                            "if memory ran out, lower -w or --shuffle") from None
        finally:
            del batches


def _checked(piece: Made) -> Made:
    if piece.fatal is not None:
        raise UserError(piece.fatal)
    return piece


def start_worker(worker: int) -> None:
    """Called in each worker as it starts: it leaves signals to its rank, and dies with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for a signal when the parent is gone, however it went. Linux only; nothing elsewhere."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal_number)
    except (AttributeError, OSError):
        return


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`: on CUDA copied on a stream of its own while the step before still computes."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    ahead: Batch | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copy = replace(batch, image=batch.image.to(device, non_blocking=True), label=batch.label.to(device, non_blocking=True))
        copied = stream.record_event()
        if ahead is not None:
            yield ahead
        copied.synchronize()  # before more is asked for: the ring's slot may be written again then
        torch.cuda.current_stream(device).wait_event(copied)
        for tensor in (copy.image, copy.label):
            tensor.record_stream(torch.cuda.current_stream(device))
        ahead = copy
    if ahead is not None:
        yield ahead
