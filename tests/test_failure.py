"""Who tells what went wrong: ranks that meet without torchrun, so that rank 0 keeps the store, and leave somehow."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.errors import UsageError, UserError
from common.launching.failure import RankError, SharedError, explain, leave, own_error
from common.launching.launch_env import Launch
from common.launching.rendezvous import meet
from tests.helpers import ROOT, TINY, end, run, start

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
        try:
            if where == "on main":
                world.on_main(lambda: fail(how))
            if where == "alone" and world.rank == rank:
                fail(how)
            if where != "at the end":
                world.sum([1.0])
            elif world.rank == rank:
                fail(how)
        except Exception as error:  # as `keep_records` does
            raise world.explain(error)

run_script(main, has_ranks=True)
"""
CASES = {  # rank, how, where -> whose line is expected, if any
    (0, "user", "alone"): "error: what; where; what to do",
    (1, "user", "alone"): "error: what; where; what to do",
    (1, "user", "at the end"): "error: what; where; what to do",
    (0, "user", "on main"): "error: what; where; what to do",
    (0, "bug", "on main"): None,
    (0, "bug", "alone"): None,
    (1, "bug", "alone"): None,
    (0, "killed", "on main"): "error: rank 1 lost another rank in a collective, the connection is closed",
    (1, "killed", "alone"): "error: rank 0 lost another rank in a collective, the connection is closed",
}


@pytest.mark.slow
@pytest.mark.parametrize("served_by", ["rank 0", "torchrun"])
def test_one_rank_tells_and_all_leave(served_by: str) -> None:
    """All cases at once, two ranks each; the store is rank 0's, or one that lives on, with an older meeting's words."""
    started: dict[tuple, list[subprocess.Popen]] = {}
    stores = {case: old_store() for case in CASES} if served_by == "torchrun" else {}
    try:
        for case in CASES:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[case].port if stores else free_port()),
                   "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": str(bool(stores))}
            started[case] = [start([sys.executable, "-c", RANK, *map(str, case)], RANK=str(rank), LOCAL_RANK=str(rank),
                                   **env) for rank in (0, 1)]
        for case, ranks in started.items():
            results = [end(rank, 150) for rank in ranks]
            errors = [result.err for result in results]
            lines = [line for text in errors for line in text.splitlines() if line.startswith("error: ")]
            expected = CASES[case]
            assert len(lines) == (expected is not None), (case, errors)
            assert not lines or lines[0].startswith(str(expected)), (case, lines)
            assert [result.code for result in results] == [
                -signal.SIGKILL if case[:2] == (number, "killed") else 1 for number in (0, 1)], (case, errors)
            assert "".join(errors).count("ValueError: a bug") == (case[1] == "bug"), (case, errors)
    finally:
        for rank in (rank for ranks in started.values() for rank in ranks):
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [(0,), (0, 1), (0, 2), (1, 2)])
def test_of_three_ranks_one_that_is_left_tells(killed: tuple[int, ...]) -> None:
    """They meet at rank 0, which takes the store with it."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    how = [["-1", "user", "alone"] if rank not in killed else [str(rank), "killed", "alone"] for rank in range(3)]
    started = [start([sys.executable, "-c", RANK, *how[rank]], RANK=str(rank), LOCAL_RANK=str(rank), **env)
               for rank in range(3)]
    results = [end(rank, 150) for rank in started]
    lines = [line for result in results for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "lost another rank in a collective, the connection is closed" in lines[0], results
    assert [result.code for result in results] == [-signal.SIGKILL if rank in killed else 1 for rank in range(3)]


def test_every_process_that_is_a_run_of_its_own_tells() -> None:
    """Of ranks that fail alike the first one does; who has no such first one beside it does, too."""
    cases = {
        ("train_single.py", "-b", "0", "RANK=1"): (2, "--batch_size"),  # one of several runs that srun started
        ("train_ddp.py", "LOCAL_RANK=1"): (1, "set LOCAL_RANK but not RANK"),
        ("train_single.py", "RANK=1", "WORLD_SIZE=2", "TORCHELASTIC_RUN_ID=x"): (2, "--nproc_per_node"),
        ("train_ddp.py", "-b", "0", "RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1"): (2, ""),
    }
    started = {case: start([sys.executable, *(word for word in case if "=" not in word)],
                           **dict(word.split("=") for word in case if "=" in word)) for case in cases}
    for case, (code, words) in cases.items():
        result = end(started[case], 150)
        lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
        assert result.code == code and len(lines) == bool(words) and words in "".join(lines), (case, result)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def old_store() -> dist.TCPStore:
    """A store as torchrun serves it, in which two ranks have met before, and failed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [Launch(rank, 2, rank, "127.0.0.1", store.port, "torchrun", local_size=2) for rank in (0, 1)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        for met in threads.map(lambda launch: meet(launch, 20), launches):
            met.add("failed", 1)
    return store


STUCK = """
import signal, time
import train_ddp
from common.entry import run_script
from common.errors import UserError
from common.step import Stepper

def train(self, batch, usual=Stepper.train):
    if batch.step.global_step < 2:
        return usual(self, batch)
    if self.world.rank == 1:
        raise UserError("a bad sample; shard x; mend it")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)

Stepper.train = train
run_script(train_ddp.main, has_ranks=True)
"""


@pytest.mark.slow
def test_a_failure_is_recorded_though_rank_0_waits_for_its_gpu(tmp_path: Path) -> None:
    """As it does behind NCCL's kernels when another rank is gone, until torchrun ends it. Else Slurm would queue the
    failed job again, since all that it sees is a run that was cut off."""
    (tmp_path / "stuck.py").write_text(STUCK)
    result = run(str(tmp_path / "stuck.py"), "--dummy", "--epoch_samples", 64, *TINY, "-b", 4, "-w", 0, "--output",
                 tmp_path / "run", ranks=2, PYTHONPATH=str(ROOT))
    assert result.code == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" and "a bad sample; shard x; mend it" in status["reason"]


def test_a_shared_error_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps the store for the others to read from; those that have left need it no more."""
    store, slept = dist.HashStore(), []
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("common.launching.failure.time.sleep", slept.append)
    for rank in (2, 1, 0):
        assert isinstance(explain(SharedError("on all"), rank=rank, timeout_seconds=7), SharedError)
        leave(rank, 3)
    assert not slept and store.get("why") == b"on all"


def test_what_an_error_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a store nobody can be asked: the first rank of a node speaks."""
    monkeypatch.setenv("MASTER_PORT", f"none of {os.getpid()}")
    def explained(error: BaseException, rank: int) -> BaseException:
        return explain(error, rank=rank, timeout_seconds=7)

    for rank in (0, 1, 2):
        lost = explained(RuntimeError("[/src/gloo/tcp/pair.cc:545] Timed out waiting 7000ms for recv. More."), rank)
        assert isinstance(lost, RankError) and lost.told == (rank != 0)
        assert "no answer within --timeout 7 s (Timed out waiting 7000ms for recv)" in str(lost)
        assert explained(lost, rank) is lost
    assert "connection is closed" in str(explained(dist.DistNetworkError("Connection reset by peer"), 1))
    for bug in (ValueError("x"), RuntimeError("shapes do not match"), torch.OutOfMemoryError("gloo"),
                KeyboardInterrupt()):
        assert explained(bug, 1) is bug
    usage = UsageError("fp16 on the CPU; --amp")
    assert explained(usage, 1) is usage  # with its exit code
    mistake = explained(RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a000"), 0)
    assert re.match(r"rank 0 \(.*\): NCCL failed \(Duplicate GPU detected : rank 0 and rank 1 both on", str(mistake))
    gone = explained(RuntimeError("NCCL error\nLast error:\nsocketProgress: Connection closed by remote peer node2"), 0)
    assert "lost another rank" in str(gone)
    shared = SharedError("on all")
    assert explained(shared, 1) is shared and own_error(shared, 1, 2) is shared
    mine = UserError("bad image")
    assert own_error(mine, 0, 1) is mine
    assert str(own_error(mine, 1, 2)) == f"rank 1 ({os.uname().nodename}): bad image"
