"""Pins the shared ring's memory, so that a GPU fetches a batch itself while the processor does other work.

    pinned = PinnedRing(torch.cuda.cudart())
    pinned.pin(batch.image)     # the first time, the whole ring that it lies in
    pinned.release()
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


class PinnedRing:
    """One per ring, of the process that has the GPU, once the workers are forked. Where it fails, copies are slower."""

    def __init__(self, cudart: Any):
        self.cudart, self.pointer = cudart, 0
        self._ring: torch.UntypedStorage | None = None  # kept while it is pinned

    def pin(self, image: torch.Tensor) -> None:
        """Pin all shared memory that `image` is a part of, the first time. A batch with gaps is a copy, not shared."""
        if self._ring is not None or not image.is_shared():
            return
        self._ring = image.untyped_storage()
        pointer = self._ring.data_ptr()
        if self.cudart.cudaHostRegister(pointer, self._ring.nbytes(), 0) == self.cudart.cudaError.success:
            self.pointer = pointer
        else:
            with suppress(RuntimeError, AssertionError):  # CUDA tells an error again at the next kernel: let it be this
                torch.zeros(1, device="cuda")

    def release(self) -> None:
        """Unpin. Called when nothing is copied any more."""
        if self.pointer:
            self.cudart.cudaHostUnregister(self.pointer)
            self.pointer = 0
