"""The loader of one rank: starts the workers once, hands out a `Batch` per step, and runs on across epochs.

Its workers go on reading the next epoch while the model is validated, since nothing stops them at an
epoch's end but a full queue.

    for batch in on_device(Loader(dataset, num_workers=2), world.device): ...
"""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.utils.data import DataLoader

from common.batch_dataset import BatchDataset
from common.collate import Batch, MadePiece, assemble, shared_ring
from common.errors import UserError
from common.loader_workers import CHECK_SECONDS, Deaths, awaited, deaf, end_workers, patience, start_worker
from common.orders import Orders
from common.pinned_ring import PinnedRing
from common.processes import let_threads_settle
from common.sampling import Step

PREFETCH = 2  # pieces that each worker has ready ahead of time


class Loader:
    """One iteration at a time. `start_method` is fork, spawn or forkserver; None takes Python's own.

    A batch that takes the workers longer than `timeout_seconds` (0: no limit) ends the run.
    """

    def __init__(self, dataset: BatchDataset, num_workers: int, start_method: str | None = None,
                 timeout_seconds: float = 0.0):
        self.dataset, self.num_workers, self.start_method = dataset, num_workers, start_method
        self.timeout_seconds = timeout_seconds

    def __iter__(self) -> Generator[Batch, None, None]:
        """This rank's batch of each step that is left of the run. Raises UserError with what a worker found."""
        mixing, dataset = self.dataset.mixing, self.dataset
        num_slots = mixing.num_slots(PREFETCH if self.num_workers else 0)
        dataset.ring = shared_ring(num_slots, mixing.batch_size, dataset.transform.size)
        made = self.made()
        pieces: Iterator[MadePiece] = map(checked, made)
        if mixing.kind == "queue":
            context = multiprocessing.get_context(self.start_method)
            dataset.orders = Orders(mixing, context, num_slots)
            pieces = dataset.orders.filled(pieces, self._steps())
        try:
            for group in mixing.groups(self._steps()):
                taken = list(itertools.islice(pieces, len(group) * mixing.pieces_per_step))
                for step in group:
                    slot = taken[0].slot if mixing.has_own_slots else dataset.slot(step.global_step, 0, 0)
                    if step.global_step >= dataset.source.plan.progress.global_step:
                        yield assemble(step, dataset.ring[slot], taken)
        finally:
            if dataset.orders is not None:
                dataset.orders.close()
                dataset.orders = None
            made.close()
            dataset.ring = torch.empty(0)  # its memory may be wanted before the next iteration makes another

    def _steps(self) -> Iterator[Step]:
        """The steps of the source; from the start of a group where the run goes on within one."""
        source = copy.copy(self.dataset.source)
        progress = source.plan.progress
        back = progress.step - self.dataset.mixing.group_start(progress.step)
        earlier = replace(progress, step=progress.step - back, global_step=progress.global_step - back,
                          position=progress.position - back * source.plan.global_batch)
        source.plan = replace(source.plan, progress=earlier)
        return source.steps()

    def made(self) -> Generator[MadePiece, None, None]:
        """What the workers make, in the order of the steps (`queue`: as it gets ready).

        Raises UserError where a worker dies or hangs.
        """
        if not self.num_workers:
            yield from self.dataset
            return
        with warnings.catch_warnings():  # torch's words on workers and cores, at every start: the plan has its own
            warnings.filterwarnings("ignore", "This DataLoader will create")
            made = self._start_workers()
        deaths = Deaths.listen()
        try:
            while (piece := awaited(made, deaths, self.timeout_seconds)) is not None:
                yield piece
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise UserError(f"a loader worker died ({str(error).splitlines()[0]}); on {os.uname().nodename}; "
                            "if memory ran out, lower -w or --shuffle") from None
        finally:
            deaths.close()
            end_workers(made)

    def _start_workers(self) -> Iterator[MadePiece]:
        loader = DataLoader(
            self.dataset, batch_size=None, num_workers=self.num_workers, prefetch_factor=PREFETCH,
            worker_init_fn=partial(start_worker, parent=os.getpid()), multiprocessing_context=self.start_method,
            generator=torch.Generator(),  # its base seed would be drawn from the global generator otherwise
            in_order=self.dataset.mixing.kind != "queue",
            timeout=patience(self.timeout_seconds) / max(4, math.ceil(self.timeout_seconds / CHECK_SECONDS)),
        )
        let_threads_settle()
        try:
            with deaf():  # as the workers are from their birth
                return iter(loader)
        except OSError as error:
            raise UserError(f"{self.num_workers} loader workers cannot be started ({error.strerror or error}); -w; "
                            f"on {os.uname().nodename}: lower -w, or raise the limits (ulimit -u, -n)") from None


def checked(piece: MadePiece) -> MadePiece:
    """The piece. Raises UserError with what its worker found wrong."""
    if piece.fatal is not None:
        raise UserError(piece.fatal)
    return piece


def on_device(batches: Iterable[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on `device`: on CUDA copied on a stream of its own, one ahead, from pinned memory.

    An error comes after the batches before it, as without one ahead: they are trained on, validated and saved.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream, pinned = torch.cuda.Stream(device), PinnedRing(torch.cuda.cudart())
    ahead: Batch | None = None
    source, fault = iter(batches), None
    try:
        while True:
            try:
                batch = next(source)
            except StopIteration:
                break
            except Exception as error:
                fault = error
                break
            pinned.pin(batch.image)  # the workers were forked before they made it
            with torch.cuda.stream(stream):
                moved = replace(batch, image=batch.image.to(device, non_blocking=True),
                                label=batch.label.to(device, non_blocking=True))
            if ahead is not None:
                yield ahead
            stream.synchronize()  # before more is asked for: the ring's slot may be written again then
            for tensor in (moved.image, moved.label):
                tensor.record_stream(torch.cuda.current_stream(device))
            ahead = moved
        if ahead is not None:
            yield ahead
        if fault is not None:
            raise fault
    finally:
        stream.synchronize()
        pinned.release()
