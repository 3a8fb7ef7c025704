"""The job files and srun on a real Slurm of two nodes, which tests/slurm/up.sh brings up on this machine.

Each start of four ranks takes ten seconds or more, so several questions are asked of one job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT, run, trace, write_shards

pytestmark = pytest.mark.slow
NAMESPACES = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true")
FLAGS = ("--arch", "tiny", "--image_size", "32", "--device", "cpu", "--sampling", "exact", "-b", "2", "-w", "1",
         "--n_epochs", "2", "--seed", "1", "--trace", "save")


def missing() -> str:
    """What this machine lacks for a cluster; empty where it lacks nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, for namespaces"
    if not shutil.which("slurmctld") and not shutil.which("apt-get"):
        return "needs slurmctld, or apt-get to install it"
    if not shutil.which("unshare") or subprocess.run(NAMESPACES, capture_output=True, timeout=20).returncode:
        return "needs the right to make namespaces"
    return ""


def commands() -> Iterator[bytes]:
    """The command lines of all processes of this machine, so of the nodes too."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


class Cluster:
    """A running cluster, and a project's folder on the file system that its nodes share."""

    def __init__(self, folder: Path, project: Path):
        self.folder, self.project = folder, project
        for name in ("launch", "common", "train_single.py", "train_dp.py", "train_ddp.py"):
            (project / name).symlink_to(ROOT / name)
        (project / ".venv/bin").mkdir(parents=True)
        (project / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")

    def call(self, *command: object, seconds: float = 120) -> str:
        """One of Slurm's commands, in the project's folder. Returns its output."""
        name, *arguments = map(str, command)
        environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
        done = subprocess.run([self.folder / "bin" / name, *arguments], cwd=self.project, env=environment,
                              timeout=seconds, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        assert done.returncode == 0, f"{name} {' '.join(arguments)}: exit {done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout

    def submit(self, *arguments: object) -> str:
        """sbatch; returns the number of the job."""
        return self.call("sbatch", "--parsable", *arguments).strip().splitlines()[-1]

    def shown(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def log(self, job: str) -> str:
        path = self.project / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job: str, what: Callable[[dict[str, str]], object], seconds: float = 200) -> dict[str, str]:
        """Until `what` is true of the job. Fails, with the job's log, after `seconds` or when the job ends before."""
        deadline = time.monotonic() + seconds
        while not what(shown := self.shown(job)):
            ended = shown["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"job {job}: {shown['JobState']}, {shown['Restarts']} restarts\n"
                                     f"{self.log(job)[-8000:]}")
            time.sleep(0.2)
        return shown

    def complete(self, job: str, seconds: float = 200) -> dict[str, str]:
        return self.wait(job, lambda shown: shown["JobState"] == "COMPLETED", seconds)

    def start_again(self, job: str, restarts: int) -> None:
        """Once a job has been queued again, let it start at once: Slurm waits for two minutes by itself.

        Slurm has a reason: the last word of the start before, from a daemon of that job, would end the new one.
        """
        self.wait(job, lambda shown: shown["JobState"] == "PENDING" and shown["Restarts"] == str(restarts))
        while any(command.startswith(f"slurmstepd: [{job}.".encode()) for command in commands()):
            time.sleep(0.2)
        self.call("scontrol", "update", f"JobId={job}", "TimeLimit=10", "StartTime=now")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no Slurm on this machine: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path: sockets lie in it
    up = subprocess.run(["bash", ROOT / "tests/slurm/up.sh", folder], capture_output=True, text=True, timeout=300)
    try:
        if up.returncode == 3:
            pytest.skip(f"no Slurm on this machine: its packages cannot be installed: {up.stderr[-300:]}")
        assert up.returncode == 0, up.stderr[-4000:]
        yield Cluster(folder, tmp_path_factory.mktemp("project"))
    finally:
        subprocess.run(["bash", ROOT / "tests/slurm/down.sh", folder], timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), (100, 150, 200, 151))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 × 2 ranks that srun starts by itself, without torchrun."""
    output = tmp_path_factory.mktemp("srun") / "run"
    out = cluster.call("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", sys.executable,
                       "train_ddp.py", "-s", shards, *FLAGS, "--output", output, seconds=240)
    assert out.count("complete: ") == 1, out
    return output


def weights(output: Path) -> dict[str, torch.Tensor]:
    return torch.load(output / "last.pt", weights_only=True)["model"]


def test_srun_without_torchrun(undisturbed: Path):
    status = json.loads((undisturbed / "status.json").read_text())
    assert status["state"] == "complete" and status["attempt"] == 0
    rows = trace(undisturbed)
    assert sorted(rows) == [0, 1, 2, 3] and {row["world_size"] for row in rows[3]} == {4}
    assert [len(rows[rank]) for rank in range(4)] == [2 * 76] * 4  # ceil(601 / 8) steps each
    run("common.trace", undisturbed).check(0)


def test_a_job_that_is_interrupted_three_times_ends_as_an_undisturbed_one(
        cluster: Cluster, shards: Path, undisturbed: Path):
    job = cluster.submit("--time=1", "--signal=B:USR1@50", "launch/ddp.sbatch", "-s", shards, *FLAGS)
    output = cluster.project / f"runs/train_ddp/slurm-{job}"

    def steps_done(attempt: int) -> None:
        path = output / "trace/rank00000.jsonl"
        cluster.wait(job, lambda shown: path.read_text().count(f'"attempt": {attempt},') >= 3)

    cluster.start_again(job, 1)  # the time limit came near
    steps_done(1)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.start_again(job, 2)
    steps_done(2)
    cluster.call("scontrol", "requeue", job)
    cluster.start_again(job, 3)
    shown = cluster.complete(job)

    assert shown["Restarts"] == "3" and shown["ExitCode"] == "0:0"
    log = cluster.log(job)
    told = [log.count(words) for words in ("the run is stopped", "queued again", "the run is complete")]
    assert told == [3, 2, 1], log  # the third time it was somebody else who put it in the queue
    status = json.loads((output / "status.json").read_text())
    assert (status["state"], status["attempt"]) == ("complete", 3)
    begun = [place["global_step"] for place in status["attempts"]]
    assert begun == sorted(set(begun)) and any(place["step"] for place in status["attempts"][1:])
    run("common.trace", output).check(0)
    found, expected = weights(output), weights(undisturbed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for rank in range(4):
        node = output / f"logs/node{rank // 2 + 1}"
        assert len(list(node.glob(f"*/attempt_0/{rank % 2}/stderr.log"))) == 4  # one for each start


def test_shards_that_one_node_lacks(cluster: Cluster, shards: Path):
    local = cluster.folder / "local"  # each node's own disk
    cluster.call("srun", "--nodelist=node1", "cp", "-r", shards, local / "shards")
    job = cluster.submit("launch/ddp.sbatch", "-s", local / "shards", *FLAGS)
    shown = cluster.wait(job, lambda shown: shown["JobState"] == "FAILED")
    assert shown["Restarts"] == "0"
    errors = re.findall(r"error: \d+ shards are not on .*", cluster.log(job))
    assert len(errors) == 1, cluster.log(job)
    assert f"4 shards are not on node2, where rank 2 runs: {local}/shards/" in errors[0]


def test_one_node_and_an_array_of_writers(cluster: Cluster, shards: Path, tmp_path: Path):
    for number in range(30):
        folder = tmp_path / "images" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests/slurm/up.sh", folder / f"{number}.jpg")
    options = ("--samples_per_shard", "4", "--verify", "none")
    flags = ("-s", shards, *FLAGS, "--max_steps", "3")
    jobs = [cluster.submit(f"launch/{name}.sbatch", *flags) for name in ("single", "dp")]
    images, parts = tmp_path / "images", tmp_path / "parts"
    array = cluster.submit("--array=0-2", "launch/make_shards.sbatch", images, parts, *options)
    run("common.make_shards", images, tmp_path / "one", *options, "--name", "parts", "-w", "1").check(0)
    for job, name in zip(jobs, ("single", "dp"), strict=True):
        cluster.complete(job)
        status = json.loads((cluster.project / f"runs/train_{name}/slurm-{job}/status.json").read_text())
        assert status["state"] == "complete"
    (finish,) = re.findall(r"Submitted batch job (\d+)", cluster.log(f"{array}-0"))
    cluster.complete(finish)
    by_one, by_all = ({path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".idx")}
                      for folder in (tmp_path / "one", parts))
    assert len(by_one) == 2 * 8 and by_one == by_all
    described = [json.loads((folder / "info.json").read_text())["shards"] for folder in (tmp_path / "one", parts)]
    assert described[0] == described[1]
