"""Memory of the loader: it stays what it was for any number of epochs, and a shuffle buffer holds compressed bytes."""

from __future__ import annotations

import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from common.collate import Batch
from common.loader import Loader
from common.mixing import Mix
from common.shards import ShardIndex
from tests.helpers import descendants, jpeg, write_shards
from tests.tars import write_tar
from tests.test_dataset import make_dataset, make_source, private_bytes

EPOCHS, EARLY = 50, 10
ALLOWED = 2e6  # bytes by which a process may grow in 40 epochs of 40 small images; one image a time left is 6 MB
NUM_BUFFERED, SIDE = 1500, 240


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("kind", ["exact", "split", "resampled"])
def test_memory_stays_flat(tmp_path: Path, kind: str) -> None:
    """The main process and each worker, with at most 256 descriptors: the tenth epoch against the last of fifty."""
    index = ShardIndex.open([str(write_shards(tmp_path, (13, 10, 17)))])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))  # also what other tests of this process have not let go of
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 240, limits[1]))
    used: dict[int, dict[int, int]] = {}

    def look(batch: Batch) -> None:
        if batch.step.epoch not in used:
            used[batch.step.epoch] = {pid: resident_bytes(pid) for pid in descendants(os.getpid())}

    try:
        for batch in Loader(make_dataset(make_source(index, kind, epochs=EPOCHS, batch=10), 2, batch=10), 2):
            look(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    early, late = used[EARLY], used[EPOCHS - 1]
    assert len(early) >= 3 and early.keys() == late.keys()
    assert all(late[pid] - early[pid] < ALLOWED for pid in early), (early, late)


def fill_buffer(source: Any, sent: Any) -> None:
    before = private_bytes()
    _, samples = next(iter(source.pieces(0, 1, Mix("none", 4, 1, 3))))
    next(iter(samples))  # the buffer is filled before it gives out any
    held = private_bytes() - before
    sent.send(held)


def test_a_shuffle_buffer_holds_compressed_bytes(tmp_path: Path) -> None:
    image = jpeg(0, 0, side=SIDE)
    members = [(f"{number:05d}.{name}", data) for number in range(2 * NUM_BUFFERED)
               for name, data in (("jpg", image), ("json", b'{"label": 0}'))]
    write_tar(tmp_path / "t.tar", members)
    source = make_source(ShardIndex.open([str(tmp_path)]), "split", window=NUM_BUFFERED, batch=4)
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe()
    worker = context.Process(target=fill_buffer, args=(source, sent))
    worker.start()
    assert received.poll(60)
    held = received.recv()
    worker.join()
    compressed, decoded = NUM_BUFFERED * len(image), NUM_BUFFERED * SIDE * (SIDE + 8) * 3
    assert 0.5 * compressed < held < 1.5 * compressed + 5e6 < decoded / 2, (compressed, held, decoded)
