"""Signals that are remembered, repeated ones that end, and a wait that does not outlast a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.helpers import ROOT


def child(body: str, **env: str) -> subprocess.Popen:
    """A process that listens, says so, and goes on with `body`."""
    code = "import time, common.stop\nstop = common.stop.StopSignals.listen()\nprint('ready', flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", code + textwrap.dedent(body)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, env={**os.environ, **env})
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


WAIT = """
    while not stop.requested:
        time.sleep(0.01)
    print("stopping", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_remembered_and_ends_nothing(number: int) -> None:
    process = child(WAIT)
    for _ in range(3):  # launchers send it more than once
        process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("stopping\n", 0)


def test_the_second_ends_at_once_even_in_a_call_that_does_not_return() -> None:
    process = child("""
        common.stop.REPEAT_SECONDS = 0.5
        import torch.distributed as dist
        print("waiting", flush=True)
        dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])  # in C++, where handlers of Python wait
    """)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # the launcher's own repetition
    time.sleep(0.7)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    process.stdout.close()


def test_a_stop_from_before_the_wait_leaves_it_its_time() -> None:
    process = child("""
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(1)
        with stop.impatient(0.9):
            time.sleep(0.3)
        print("met", flush=True)
    """)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "met\n" and process.returncode == 0


def test_a_wait_for_others_ends_after_a_stop() -> None:
    process = child("""
        with stop.impatient(0.5):
            time.sleep(0.01)
        with stop.impatient(0.5):
            print("waiting", flush=True)
            time.sleep(600)
    """)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize("nodes, outcome", [("1", "stopping"), ("2", "gone")])
def test_a_rank_leaves_when_its_launcher_is_killed(nodes: str, outcome: str) -> None:
    """Of one node it saves first; of several it dies, and the others go on."""
    reading, writing = os.pipe()
    rank = "import os, time; from common.stop import StopSignals; stop = StopSignals.listen()\n" \
           f"os.write({writing}, b'ready.')\nwhile not stop.requested: time.sleep(0.01)\n" \
           f"os.write({writing}, b'stopping')"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], pass_fds=[{writing}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, pass_fds=[writing],
                               env={**os.environ, "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": nodes})
    os.close(writing)
    assert os.read(reading, 6) == b"ready."
    process.kill()
    process.wait()
    with os.fdopen(reading, "rb") as file:
        assert (file.read().decode() or "gone") == outcome  # the end of the file: nobody is left


def test_an_orphan_has_a_limited_time_to_save() -> None:
    reading, writing = os.pipe()
    rank = "import os, time, common.stop; common.stop.ORPHAN_SECONDS = 0.5\n" \
           f"stop = common.stop.StopSignals.listen(); os.write({writing}, b'ready.'); time.sleep(600)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], pass_fds=[{writing}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, pass_fds=[writing],
                               env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
    os.close(writing)
    assert os.read(reading, 6) == b"ready."
    process.kill()
    process.wait()
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b""
