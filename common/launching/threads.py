"""How many threads torch takes for one operation: the cores of a node, shared by its ranks.

torchrun gives each rank one thread where nobody chose, which leaves cores idle; without it each rank
takes all cores, and they get in each other's way.

    OMP_NUM_THREADS=4 torchrun ...        # whoever sets it decides
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

Seat = tuple[str, tuple[int, ...]]  # a host, and the cores there that a rank may use, by number


def own_seat() -> Seat:
    """Where this process runs."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return os.uname().nodename, tuple(sorted(cores))


def share_cores(seats: Sequence[Seat], rank: int) -> None:
    """Set torch's threads for this rank, unless somebody has. `seats` are those of all ranks."""
    if not chosen(os.environ):
        host, cores = seats[rank]
        number = fair_share(cores, [other for name, other in seats if name == host], os.environ)
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)


def fair_share(cores: Sequence[int], neighbours: Sequence[Sequence[int]], env: Mapping[str, str]) -> int:
    """Threads for a rank on `cores`. `neighbours` are the cores of each rank of its node, itself included.

    Ranks that are bound to cores of their own share with nobody. Slurm may have granted less than it binds to.
    """
    num_sharing = sum(1 for other in neighbours if set(cores) & set(other))
    granted = env.get("SLURM_CPUS_ON_NODE", "")
    num_cores = min(len(cores), int(granted)) if granted.isdecimal() else len(cores)
    return max(1, num_cores // max(num_sharing, 1))


def chosen(env: Mapping[str, str]) -> bool:
    """Whether somebody set OMP_NUM_THREADS: torchrun sets it to 1 by itself, and then its own environment lacks it."""
    if not env.get("OMP_NUM_THREADS"):
        return False
    if env["OMP_NUM_THREADS"] != "1" or "TORCHELASTIC_RUN_ID" not in env:
        return True
    with suppress(OSError):
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        return any(line.startswith(b"OMP_NUM_THREADS=") for line in started_with)
    return True
