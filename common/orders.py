"""`--mix queue`: the parts of batches that are wanted next; the worker that is ready first takes the first of them.

    orders = Orders(mixing, multiprocessing.get_context(), num_slots=3)
    orders.next(epoch)                  # a worker: the number of the part to make
    orders.filled(pieces, steps)        # the main process: places the orders, and sorts what comes back
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from multiprocessing.queues import SimpleQueue

from common.collate import MadePiece
from common.mixing import Mix
from common.sampling import Step


class Orders:
    """A worker waits until there is room for a part in the ring of batches, which has `num_slots`.

    A part is made of samples of its own epoch, so a worker that is ahead at an epoch's end waits for the others:
    there is a queue for each epoch that may be under way at once.
    """

    def __init__(self, mixing: Mix, context: BaseContext, num_slots: int):
        self.mixing, self.num_slots = mixing, num_slots
        self._queues: list[SimpleQueue[int | None]] = [context.SimpleQueue() for _ in range(num_slots)]

    def next(self, epoch: int) -> int | None:
        """The number of the part to make. None: no more are wanted. Called by workers."""
        return self._of(epoch).get()

    def filled(self, pieces: Iterator[MadePiece], steps: Iterator[Step]) -> Iterator[MadePiece]:
        """The pieces, which come as they get ready, by number. Ask for those of the next step only when the batch
        before is finished with: its slot of the ring is then written again."""
        steps, ahead = itertools.tee(steps)
        early: dict[int, MadePiece] = {}
        self._place(itertools.islice(ahead, self.num_slots - 1))
        for step in steps:
            self._place(itertools.islice(ahead, 1))
            for number in self.mixing.numbers(step):
                while number not in early:
                    piece = next(pieces)
                    early[piece.number] = piece
                yield early.pop(number)

    def close(self) -> None:
        """Let all workers go, those that wait included. Called by the main process, before it ends them."""
        for queue in self._queues:
            for _ in range(self.mixing.num_workers):
                queue.put(None)
            queue.close()

    def _place(self, steps: Iterator[Step]) -> None:
        for step in steps:
            for number in self.mixing.numbers(step):
                self._of(step.epoch).put(number)

    def _of(self, epoch: int) -> SimpleQueue[int | None]:
        return self._queues[epoch % len(self._queues)]
