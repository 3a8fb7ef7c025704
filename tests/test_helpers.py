"""A test that hangs must show where: every process of it, a worker that ignores signals and its parent alike."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import end, start

RANK = """
import multiprocessing, signal, time

def worker_hangs():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)

def rank_waits(worker):
    worker.join()

worker = multiprocessing.get_context("fork").Process(target=worker_hangs)
worker.start()
rank_waits(worker)
"""


def test_the_stacks_of_all_processes_are_seen() -> None:
    launcher = f"import subprocess, sys\ndef launcher_waits():\n  subprocess.run([sys.executable, '-c', {RANK!r}])\n" \
               "launcher_waits()"
    process = start([sys.executable, "-c", launcher])
    with pytest.raises(AssertionError) as failed:
        end(process, 2)
    message = str(failed.value)
    assert "still running after 2 s" in message and "ready" in message
    assert all(f"in {name}\n" in message for name in ("worker_hangs", "rank_waits", "launcher_waits")), message
