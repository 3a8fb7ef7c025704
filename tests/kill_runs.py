"""Kill processes of short runs at random moments, start the same command again, and demand the undisturbed run's bits.

A rank, a loader worker or the launcher gets a SIGKILL while the job starts, trains, validates or saves; twice in a
run, as a rule. What must be equal in the end: weights, optimiser, meters, the best checkpoint, every rank's trace.
And after each kill the job is gone within 30 seconds, processes and shared memory.

    python -m tests.kill_runs --kills 200 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers import TINY, command, end, rows, start, trace, write_shards

GONE_SECONDS = 30.0
RUN_SECONDS = 300.0
MODES = ("exact", "exact", "exact", "split", "resampled", "pooled", "shuffle")


@dataclass
class Job:
    """A command, the folder of its run, and a mark in the environment by which its processes are found."""

    folder: Path
    ranks: int
    mode: str

    @property
    def flags(self) -> list[object]:
        """The same every time: `--resume auto` finds nothing at first."""
        mixed = self.mode in ("pooled", "shuffle")
        sampling = ("split", "--mix", self.mode, "--shuffle", "4") if mixed else (self.mode,)
        data = self.folder.parent
        return [*TINY, "-s", data / "shards", "--val_path", data / "val", "-b", 4, "--sampling", *sampling,
                "-lr", "1e-3", "--n_epochs", 3, "--save_every", 2, "--seed", 7, "--trace", "save",
                "--output", self.folder, "--resume", "auto"]

    def line(self, *flags: object) -> list[str]:
        """The command; later flags win."""
        return command("train_ddp.py", *self.flags, *flags, ranks=self.ranks)

    def start(self, *flags: object) -> subprocess.Popen:
        """Start it, marked."""
        return start(self.line(*flags), SHARDWISE_JOB=str(self.folder))

    def processes(self) -> dict[int, str]:
        """Living processes of the job: pid -> launcher, rank or worker."""
        mark, found = f"SHARDWISE_JOB={self.folder}".encode(), {}
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError, IndexError):
                    alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if alive and mark in (process / "environ").read_bytes().split(b"\0"):
                        found[int(process.name)] = (process / "cmdline").read_text()
        parents = {pid: _parent(pid) for pid in found}
        kinds = {pid: "launcher" for pid, line in found.items() if "torch.distributed.run" in line}
        for pid in set(found) - set(kinds):
            kinds[pid] = "worker" if parents[pid] in found and kinds.get(parents[pid]) != "launcher" else "rank"
        return kinds


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def prepare(folder: Path) -> None:
    """The data that all jobs read."""
    write_shards(folder / "shards", sizes=(9, 4, 7, 8, 6, 5, 10, 8))
    write_shards(folder / "val", sizes=(9, 8))


def kill_one(job: Job, process: subprocess.Popen, rng: random.Random) -> str:
    """Wait for a random moment, kill a random process of the job, wait until the job is gone. Returns what was done."""
    kind = rng.choice(("rank", "rank", "worker", "launcher"))
    phase = rng.choice(("start", "run", "run", "run"))
    before, delay = _size(job), rng.uniform(0, 6) if phase == "start" else rng.uniform(0, 2.5) ** 2 / 2.5
    deadline = time.monotonic() + 120
    while phase == "run" and _size(job) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(delay)
    alive = job.processes()
    pids = sorted(pid for pid, other in alive.items() if other == kind) or sorted(alive)
    if not pids or process.poll() is not None:
        return f"{phase} {delay:.2f} s: came too late"
    pid = rng.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while left := job.processes():
        if time.monotonic() - killed > GONE_SECONDS:
            raise AssertionError(f"{phase} {delay:.2f} s, killed {alive[pid]}: {left} live after {GONE_SECONDS:g} s")
        time.sleep(0.1)
    return f"{phase} {delay:.2f} s: killed {alive[pid]}, gone after {time.monotonic() - killed:.1f} s"


def _size(job: Job) -> int:
    return sum(path.stat().st_size for path in job.folder.glob("trace/rank*.jsonl"))


def kill_and_finish(job: Job, num_kills: int, rng: random.Random) -> list[str]:
    """Start, kill, start again, …, as often as asked or until a start comes to its end; then once to the end."""
    done = []
    for _ in range(num_kills):
        process = job.start()
        try:
            done.append(kill_one(job, process, rng))
        finally:
            result = end(process, RUN_SECONDS)
        if "too late" in done[-1]:
            break  # the run is complete
        if "Traceback" in result.err.split("torch/distributed/")[0]:
            done[-1] += f", a traceback:\n{result.err}"
    end(job.start(), RUN_SECONDS).check()
    assert not job.processes()
    return done


def effective(output: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """(rank, epoch, step) -> the row that counts, its attempt left out. Later ones replace later steps."""
    begun = json.loads((output / "status.json").read_text())["attempts"]
    places = [(place["epoch"], place["step"]) for place in begun]
    found = {}
    for rank, lines in trace(output).items():
        for row in lines:
            place, attempt = (row["epoch"], row["step"]), row.pop("attempt")
            if all(place < later for later in places[attempt + 1 :]):
                assert (rank, *place) not in found, f"rank {rank} records {place} twice"
                found[(rank, *place)] = row
    return found


def differences(output: Path, undisturbed: Path) -> Iterator[str]:
    """In what a run differs from one that nobody disturbed."""
    for name in ("last.pt", "best.pt"):
        one, two = (torch.load(folder / name, weights_only=True) for folder in (output, undisturbed))
        for part in ("model", "optimizer", "scaler", "progress", "meters", "best_top1", "epoch_done", "rng"):
            if not same(one[part], two[part]):
                yield f"{name}: {part}"
    if effective(output) != effective(undisturbed):
        yield "trace"
    one, two = ([row for row in rows(folder / "metrics.jsonl") if row["kind"] == "val"]
                for folder in (output, undisturbed))
    for row in [*one, *two]:
        row.pop("attempt")
    if one != two:
        yield "metrics"
    steps = [(row["kind"], row["step"]) for row in rows(output / "metrics.jsonl")]
    if len(set(steps)) < len(steps):
        yield "metrics: steps twice"
    if json.loads((output / "status.json").read_text())["state"] != "complete":
        yield "status"
    if any(output.glob("*.saving")):
        yield "leftovers"


def same(one: Any, two: Any) -> bool:
    """Equal to the last bit, in containers too."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def main() -> int:
    """Returns 1 if a run came out different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per_run", type=int, default=2, help="kills of a run before it may end [2]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on from [0]")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs are kept (a temporary one)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill_runs-"))
    prepare(folder)
    before, references, num_bad, num_kills, number = set(os.listdir("/dev/shm")), {}, 0, 0, args.first
    while num_kills < args.kills:
        rng = random.Random(f"{args.seed}/{number}")
        ranks, mode = 2 + number % 2, rng.choice(MODES)
        if (ranks, mode) not in references:
            references[ranks, mode] = reference = Job(folder / f"undisturbed-{ranks}-{mode}", ranks, mode)
            end(reference.start(), RUN_SECONDS).check()
        job = Job(folder / f"run-{number:04d}", ranks, mode)
        done = kill_and_finish(job, args.per_run, rng)
        wrong = list(differences(job.folder, references[ranks, mode].folder))
        num_bad += bool(wrong)
        num_kills += sum("killed" in text for text in done)
        print(f"run {number}, {ranks} ranks, {mode}: {'; '.join(done)}: {', '.join(wrong) or 'equal'} "
              f"({num_kills} kills)", flush=True)
        number += 1
    left = set(os.listdir("/dev/shm")) - before
    print(f"{number - args.first} runs, {num_kills} kills, {num_bad} runs differ; "
          f"new in /dev/shm: {sorted(left) or 'nothing'}")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
