"""Runs that are stopped, killed, broken or moved to other worlds, and go on: through the commands that users type."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, Result, abort, command, end, run, start, trace
from tests.kill_runs import Job, differences, effective, kill_and_finish, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and the undisturbed runs that others are held against."""
    path = tmp_path_factory.mktemp("resume")
    prepare(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The run of two ranks, exact."""
    job = Job(folder / "undisturbed-2", 2, "exact")
    end(job.start(), 300).check()
    return job.folder


def disturbed(job: Job, plan: dict, *flags: object, torchrun: tuple[str, ...] = ()) -> Result:
    """Start a job once with a disturbance, and see that nothing of it is left."""
    line = job.line(*flags)
    script = line.index(str(ROOT / "train_ddp.py"))
    line[script:script] = [*torchrun, str(ROOT / "tests" / "disturbed.py")]
    result = end(start(line, SHARDWISE_JOB=str(job.folder), DISTURB=json.dumps(plan)), 200)
    assert not job.processes()
    return result


def status(job: Job) -> dict:
    return json.loads((job.folder / "status.json").read_text())


def errors(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("error: ")]


def last_steps(job: Job) -> set[tuple[int, int]]:
    """(epoch, step) of each rank's last row."""
    return {(lines[-1]["epoch"], lines[-1]["step"]) for lines in trace(job.folder).values()}


def test_a_stop_at_any_moment_saves_once_and_loses_nothing(folder: Path, undisturbed: Path) -> None:
    """One run, stopped in every phase by one rank, each start going on from the stop before."""
    job = Job(folder / "stopped", 2, "exact")
    for rank, place, deed, saves in ((1, "start", "TERM", 1), (0, "batch", "INT", 1), (1, "step", "USR1", 1),
                                     (0, "save", "TERM", 2), (1, "validation", "TERM", 2)):
        before = status(job)["attempts"][-1]["global_step"] if job.folder.exists() else 0
        result = disturbed(job, {"rank": rank, "at": place, "number": 0, "do": deed}).check()
        found = status(job)
        assert (found["state"], found["reason"], errors(result)) == ("stopped", None, []), (place, result)
        assert len(last_steps(job)) == 1, (place, trace(job.folder))
        assert result.out.count("saving last.pt") <= saves, (place, result.out)
        assert before < torch.load(job.folder / "last.pt", weights_only=True)["progress"]["global_step"], place
    end(job.start(), 200).check()
    assert list(differences(job.folder, undisturbed)) == []


@pytest.mark.parametrize("ranks, seed", [(2, 1), (3, 2)])
def test_kills_at_random_moments(folder: Path, undisturbed: Path, ranks: int, seed: int) -> None:
    reference = undisturbed
    if ranks != 2:
        job = Job(folder / f"undisturbed-{ranks}", ranks, "exact")
        end(job.start(), 300).check()
        reference = job.folder
    before = set(os.listdir("/dev/shm"))
    job = Job(folder / f"killed-{ranks}", ranks, "exact")
    done = kill_and_finish(job, 3, random.Random(seed))
    assert list(differences(job.folder, reference)) == [], done
    left, deadline = set(os.listdir("/dev/shm")) - before, time.monotonic() + 30  # or those of another test: they go
    while left & set(os.listdir("/dev/shm")):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_torchrun_restarts_its_own_run_without_a_flag(folder: Path, undisturbed: Path) -> None:
    """A rank is killed; with --max_restarts the launcher starts all again, and the run goes on from its checkpoint."""
    job = Job(folder / "restarted", 2, "exact")
    line = [part for part in job.line() if part not in ("--resume", "auto")]
    line.insert(line.index("--standalone"), "--max_restarts=2")
    script = line.index(str(ROOT / "train_ddp.py"))
    line.insert(script, str(ROOT / "tests" / "disturbed.py"))
    plan = {"rank": 1, "at": "step", "number": 11, "do": "KILL"}
    result = end(start(line, SHARDWISE_JOB=str(job.folder), DISTURB=json.dumps(plan)), 200).check()
    assert "resumed: epoch 1, step 2" in result.out
    assert len(status(job)["attempts"]) == 2
    assert list(differences(job.folder, undisturbed)) == []


def test_a_node_is_lost_and_comes_back(folder: Path) -> None:
    """Two launchers on this machine, each a node; one is killed, the other goes on; one is started again, and joins.

    Each epoch still holds each sample once. torchrun's own store is not shared: see common/launching/rendezvous.py.
    """
    job = Job(folder / "elastic", 1, "exact")
    parts = [part for part in job.line("--report_s", 0.1) if part not in ("--resume", "auto", "--standalone")]
    parts[parts.index("--nproc_per_node=1") : parts.index("--nproc_per_node=1")] = [
        "--nnodes=1:2", "--max_restarts=3", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}",
        f"--local_addr={os.uname().nodename}", "--rdzv_id=elastic",
        "--rdzv_conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    parts[parts.index("--n_epochs") + 1] = "400"
    nodes: list[subprocess.Popen] = []

    def start_node() -> None:
        nodes.append(start(parts, SHARDWISE_JOB=str(job.folder), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                           GLOO_SOCKET_IFNAME="lo"))

    def trains_with(world_size: int) -> None:
        """Wait until the latest attempt has that many ranks, and steps."""
        wait_for(lambda: latest(job.folder)[1] == world_size, nodes[0])

    try:
        start_node()
        trains_with(1)
        start_node()
        trains_with(2)
        nodes[1].kill()
        trains_with(1)
        start_node()
        trains_with(2)
        (job.folder / "stop").touch()
    except BaseException:
        abort(sorted(job.processes()))
        raise
    finally:
        results = [end(node, 200) for node in reversed(nodes)]
    assert [result.code for result in results] == [0, -signal.SIGKILL, 0], results
    wait_for(lambda: not job.processes())
    assert [place["global_step"] > 0 for place in status(job)["attempts"]][-3:] == [True] * 3
    run("common.trace", job.folder, "-s", folder / "shards").check()


def latest(output: Path) -> tuple[int, int]:
    """The last attempt that has done a step, and its world size."""
    lines = [path.read_text().rpartition("\n")[0].splitlines() for path in output.glob("trace/rank*.jsonl")]
    last_rows = (json.loads(rank[-1]) for rank in lines if rank)
    return max(((row["attempt"], row["world_size"]) for row in last_rows), default=(-1, 0))


def test_other_worlds_in_the_middle_of_an_epoch(folder: Path) -> None:
    """Two ranks, three, then one process with other workers and batch: each sample of the epoch is still used once."""
    jobs = [Job(folder / "worlds", ranks, "exact") for ranks in (2, 3)]
    end(jobs[0].start("--max_steps", 3), 200).check()
    end(jobs[1].start("--max_steps", 5), 200).check()
    flags = ("-b", 5, "-w", 0, "--n_epochs", 2)
    result = run("train_single.py", *jobs[0].flags, *flags).check()
    assert "resumed: epoch 0, step 5, 48 samples of the epoch done; 5 steps since the start" in result.out
    assert "n_epochs was 3, is 2" in result.out
    counts: dict[tuple[int, str, int], int] = {}
    for (_, epoch, _), row in effective(jobs[0].folder).items():
        for shard, count in zip(row["shard"], row["count"], strict=True):
            counts[epoch, shard, count] = counts.get((epoch, shard, count), 0) + 1
    assert set(counts.values()) == {1} and len(counts) == 2 * 57
    run("common.trace", jobs[0].folder, "-s", folder / "shards").check()


def test_a_killed_loader_worker_is_told_in_one_line(folder: Path) -> None:
    """Also while no batch is waited for: the run ends by itself, and the same command finishes it."""
    job = Job(folder / "worker", 0, "exact")
    process = start(command("train_single.py", *job.flags, "--n_epochs", 400), SHARDWISE_JOB=str(job.folder))
    try:
        wait_for(lambda: (job.folder / "last.pt").exists(), process)
        pids = [pid for pid, kind in job.processes().items() if kind == "worker"]
        os.kill(pids[0], signal.SIGKILL)
    finally:
        result = end(process, 60)
    assert result.check(1).err.count("\n") == 1, result.err
    assert errors(result)[0].startswith("error: a loader worker died"), result.err
    assert not job.processes() and status(job)["state"] == "failed"
    assert status(job)["reason"] == errors(result)[0].removeprefix("error: ")


def test_a_bad_sample_on_one_rank_ends_all_with_its_line(folder: Path) -> None:
    """One line, from that rank, with shard and key; nothing is left; status.json has the reason."""
    job = Job(folder / "bad" / "run", 2, "exact")
    prepare(folder / "bad")
    tar = folder / "bad" / "shards" / "test-0003.tar"
    data = tar.read_bytes()
    start_of_jpeg = data.index(b"\xff\xd8\xff", 3000)
    tar.write_bytes(data[: start_of_jpeg] + b"broken" + data[start_of_jpeg + 6 :])
    began = time.monotonic()
    result = end(job.start(), 200).check(1)
    assert time.monotonic() - began < 150
    assert len(errors(result)) == 1 and errors(result)[0].startswith("error: rank "), result.err
    assert "shard test-0003, key " in errors(result)[0]
    assert not job.processes()
    assert status(job)["state"] == "failed" and "shard test-0003, key " in status(job)["reason"]


def test_a_bug_and_a_silent_rank_end_all(folder: Path) -> None:
    """A bug keeps its traceback, and the others are silent; of a rank that does not answer, the others tell in time."""
    job = Job(folder / "broken", 2, "exact")
    result = disturbed(job, {"rank": 1, "at": "step", "number": 1, "do": "bug"}).check(1)
    assert errors(result) == [] and "ValueError: a bug" in result.err
    assert status(job)["state"] == "failed" and status(job)["reason"].startswith("rank 1 (")
    assert status(job)["reason"].endswith("ValueError: a bug")
    result = disturbed(job, {"rank": 1, "at": "step", "number": 1, "do": "sleep"}, "--timeout", 3).check(1)
    assert len(errors(result)) == 1, result.err
    assert "lost another rank in a collective, no answer within --timeout 3 s" in errors(result)[0]
    assert status(job)["state"] == "failed" and "--timeout 3 s" in status(job)["reason"]


def test_loader_workers_that_hang_are_told_in_time(folder: Path) -> None:
    """One line names rank, workers and host; the rank that waits for this one in a collective has nothing to add."""
    job = Job(folder / "hanging", 2, "exact")
    result = disturbed(job, {"rank": 1, "at": "worker", "number": 1, "do": "sleep"}, "--timeout", 3).check(1)
    (line,) = errors(result)
    assert line.startswith(f"error: rank 1 ({os.uname().nodename}): no batch came within --timeout 3 s; loader worker ")
    assert line.count("(pid ") == 2 and "Traceback" not in result.err.split("torch/distributed/")[0], result.err
    assert status(job)["reason"] == line.removeprefix("error: ")


def test_a_loss_that_is_no_number_stops_all_at_one_step(folder: Path) -> None:
    job = Job(folder / "infinite", 2, "exact")
    end(job.start("--max_steps", 2, "--optimizer", "sgd"), 200).check()
    before = (job.folder / "last.pt").read_bytes()
    result = end(job.start("--optimizer", "sgd", "-lr", "1e30"), 200).check(1)
    assert len(errors(result)) == 1 and "not finite" in errors(result)[0]
    assert "the last checkpoint is untouched" in errors(result)[0]
    assert (job.folder / "last.pt").read_bytes() == before
    assert len(last_steps(job)) == 1 and status(job)["state"] == "failed"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(ready: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    """Until something is so; not longer than a process lives."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.1)
