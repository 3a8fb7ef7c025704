"""Who tells what went wrong: ranks that meet without torchrun, so that rank 0 keeps the store, and leave somehow."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from common.errors import UserError
from common.failure import RankError, SharedError, explain, own_error
from tests.helpers import ROOT

RANK = """
import os, sys, time
import torch
from common.distributed import process_group
from common.entry import run_script
from common.errors import UserError

def fail(how):
    if how == "killed":
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    raise UserError("what; where; what to do") if how == "user" else ValueError("a bug")

def main():
    rank, how, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with process_group([torch.device("cpu")], 60) as world:
        if where == "on main":
            world.on_main(lambda: fail(how))
        if where == "alone" and world.rank == rank:
            fail(how)
        if where != "at the end":
            world.sum([1.0])
        elif world.rank == rank:
            fail(how)

run_script(main)
"""
CASES = {  # rank, how, where -> whose line is expected, if any
    (0, "user", "alone"): "error: what; where; what to do",
    (1, "user", "alone"): "error: what; where; what to do",
    (1, "user", "at the end"): "error: what; where; what to do",
    (0, "user", "on main"): "error: what; where; what to do",
    (0, "bug", "on main"): None,
    (0, "killed", "on main"): "error: rank 1 lost another rank in a collective, the connection is closed",
    (1, "killed", "alone"): "error: rank 0 lost another rank in a collective, the connection is closed",
}


@pytest.mark.slow
def test_one_rank_tells_and_all_leave() -> None:
    """All cases at once, two ranks each."""
    started: dict[tuple, list[subprocess.Popen]] = {}
    try:
        for case in CASES:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
                       "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            started[case] = [subprocess.Popen([sys.executable, "-c", RANK, *map(str, case)], cwd=ROOT, text=True,
                                              env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (0, 1)]
        for case, ranks in started.items():
            errors = [rank.communicate(timeout=150)[1] for rank in ranks]
            lines = [line for text in errors for line in text.splitlines() if line.startswith("error: ")]
            expected = CASES[case]
            assert len(lines) == (expected is not None), (case, errors)
            assert not lines or lines[0].startswith(str(expected)), (case, lines)
            assert [rank.returncode for rank in ranks] == [
                -signal.SIGKILL if case[:2] == (number, "killed") else 1 for number in (0, 1)], (case, errors)
            assert ("ValueError: a bug" in "".join(errors)) == (case[1] == "bug"), (case, errors)
    finally:
        for rank in (rank for ranks in started.values() for rank in ranks):
            rank.kill()


def test_what_an_error_becomes() -> None:
    """Without a store nobody can be asked: rank 1 speaks, since rank 0 took the store with it."""
    def explained(error: BaseException, rank: int) -> BaseException:
        return explain(error, rank=rank, timeout_seconds=7, token="x")

    for rank in (0, 1, 2):
        lost = explained(RuntimeError("[/src/gloo/tcp/pair.cc:545] Timed out waiting 7000ms for recv. More."), rank)
        assert isinstance(lost, RankError) and lost.told == (rank != 1)
        assert "no answer within --timeout 7 s (Timed out waiting 7000ms for recv)" in str(lost)
        assert explained(lost, rank) is lost
    assert "connection is closed" in str(explained(dist.DistNetworkError("Connection reset by peer"), 1))
    for bug in (ValueError("x"), RuntimeError("shapes do not match"), torch.OutOfMemoryError("gloo"),
                KeyboardInterrupt()):
        assert explained(bug, 1) is bug
    shared = SharedError("on all")
    assert explained(shared, 1) is shared and own_error(shared, 1, 2) is shared
    mine = UserError("bad image")
    assert own_error(mine, 0, 1) is mine
    assert str(own_error(mine, 1, 2)) == f"rank 1 ({os.uname().nodename}): bad image"
