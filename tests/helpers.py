"""What several tests need: small shards with real JPEGs, and the scripts started the way a user starts them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--arch", "tiny", "--image_size", "32", "--device", "cpu")
DUMP_SECONDS = 3.0  # for the stacks of all processes of a test that hangs


@functools.lru_cache(maxsize=512)
def jpeg(label: int, number: int, side: int = 48) -> bytes:
    """A JPEG that shows its label: a bright square whose place depends on it, on seeded noise."""
    pixels = np.random.default_rng([label, number]).integers(0, 120, (side, side + 8, 3), dtype=np.uint8)
    row, column = divmod(label % 4, 2)
    pixels[row * side // 2 : (row + 1) * side // 2, column * side // 2 : (column + 1) * side // 2] += 120
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a member, the same bytes every time."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path, sizes: Sequence[int] = (10, 3, 7), num_classes: int = 2, name: str = "test",
                 side: int = 48) -> Path:
    """Shards as the articles make them: name-0000.tar, …, and a json with two keys and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"{name}-{shard:04d}.tar", "w") as tar:
            for count in range(size):
                label = number % num_classes
                meta = {"write worker id": 0, "count": count, "category": f"class{label}", "label": label}
                add(tar, f"{number:06d}.jpg", jpeg(label, number, side))
                add(tar, f"{number:06d}.json", json.dumps(meta).encode())
                number += 1
    (folder / "info.json").write_text(json.dumps({"dataset size": number, "num_classes": num_classes}))
    return folder


@dataclass
class Result:
    """How a command ended. `out` and `err` are all ranks' together."""

    code: int
    out: str
    err: str

    def check(self, code: int = 0) -> Result:
        printed = f"--- stdout\n{self.out[-6000:]}\n--- stderr\n{self.err[-6000:]}"
        assert self.code == code, f"exit {self.code}, not {code}\n{printed}"
        return self


def command(script: str, *arguments: object, ranks: int = 0) -> list[str]:
    """The command line of a script; `ranks` > 0 puts torchrun before it."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, *([str(ROOT / script)] if script.endswith(".py") else ["-m", script]), *map(str, arguments)]


def start(line: list[str], cwd: Path = ROOT, **env: str) -> subprocess.Popen:
    """Start a command in a session of its own; its Python processes show their stacks when `end` has to abort them."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **os.environ, **env}
    return subprocess.Popen(line, cwd=cwd, env=environment, start_new_session=True, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: subprocess.Popen, seconds: float = 120) -> Result:
    """Wait, and on a timeout abort all of it and fail with what every rank has printed, and with all stacks."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        pids = descendants(process.pid)
        threading.Thread(target=abort, args=(pids,)).start()  # the dumps may be more than a pipe holds: read meanwhile
        out, err = process.communicate(timeout=DUMP_SECONDS + 20)
        printed = f"--- stdout\n{out[-6000:]}\n--- stderr, with the stacks of {len(pids)} processes\n{err[-60000:]}"
        raise AssertionError(f"still running after {seconds} s\n{printed}") from None
    return Result(process.returncode, out, err)


def abort(pids: list[int]) -> None:
    """Have each process print its stacks and end, children before parents; kill what has not within `DUMP_SECONDS`.

    All are frozen first: a parent would act on the end of its child, and take the others with it.
    """
    deadline = time.monotonic() + DUMP_SECONDS
    for pid in pids:
        send(pid, signal.SIGSTOP)
    for pid in reversed(pids):
        send(pid, signal.SIGABRT)
        send(pid, signal.SIGCONT)
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
    for pid in pids:
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended yet, waited for by its parent or not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descendants(pid: int) -> list[int]:
    """A process and all below it (torchrun's ranks have sessions of their own, so the group is not enough)."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def run(script: str, *arguments: object, ranks: int = 0, seconds: float = 120, cwd: Path = ROOT, **env: str) -> Result:
    """Start a script or `common.module` as a user does, and wait for its end."""
    return end(start(command(script, *arguments, ranks=ranks), cwd=cwd, **env), seconds)


def rows(path: Path) -> list[dict]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def trace(output: Path) -> dict[int, list[dict]]:
    """The recorded rows of every rank."""
    return {int(path.stem[4:]): rows(path) for path in sorted((output / "trace").glob("rank*.jsonl"))}


def global_batches(output: Path) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(epoch, step) -> the global batch, rank after rank, as (shard, count)."""
    batches: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for _, lines in sorted(trace(output).items()):
        for row in lines:
            batches.setdefault((row["epoch"], row["step"]), []).extend(zip(row["shard"], row["count"], strict=True))
    return batches
