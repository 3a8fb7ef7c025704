"""This process's place among the others (`World`), and the two ways to get one: alone, or in a process group.

    with process_group(choose_devices("auto", None), timeout_seconds=600) as world:     # under torchrun or srun
        print(world.rank, world.size, world.device)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import UserError
from common.launch_env import Launch

T = TypeVar("T")


class PeerLost(UserError):
    """Another rank is gone: the reason is for that rank to tell. `told` says whether somebody did."""

    told = True


@dataclass(frozen=True)
class World:
    """One process among `size`. With a size of one, every collective returns at once."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout_seconds: float = 600.0
    _waits: Iterator[int] = field(default_factory=count, repr=False, compare=False)  # every rank counts the same ones

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, the only one that draws and writes the run's files."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """What DistributedDataParallel wants to know: the CUDA device, None on the CPU."""
        return [self.device.index] if self.device.type == "cuda" else None

    def sum(self, values: list[float]) -> list[float]:
        """Add up each of some small numbers over the ranks, in float64. Every rank calls it."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def on_main(self, function: Callable[[], T]) -> T:
        """Call on rank 0 alone and give every rank the result; a UserError is raised on all of them.

        The others wait for as long as it takes: work such as a scan may be longer than a collective's timeout.
        """
        outcome: tuple[Any, str | None] = (None, None)
        if self.is_main:
            try:
                outcome = function(), None
            except UserError as error:
                outcome = None, str(error)
        self._wait_for_main()
        value, message = self.broadcast(outcome)
        if message is not None:
            raise UserError(message)
        return value

    def agree(self, error: UserError | None) -> None:
        """Raise on every rank if any rank brings an error: the first one's words. Every rank calls it."""
        messages = [message for message in self.gather(str(error) if error else None) if message]
        if messages:
            raise UserError(messages[0])

    def _wait_for_main(self) -> None:
        """Until rank 0 is here, in short waits on the store, each far below the group's timeout."""
        if self.size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        number = next(self._waits)
        if self.is_main:
            store.set(f"main/{number}", b"here")
            return
        while not store.check([f"main/{number}"]):
            time.sleep(0.02)


@contextmanager
def single_process(device: torch.device) -> Iterator[World]:
    """A world of one."""
    yield World(rank=0, size=1, local_rank=0, device=device)


@contextmanager
def process_group(devices: list[torch.device], timeout_seconds: float) -> Iterator[World]:
    """Join the other ranks: gloo for tensors on the CPU, NCCL for those on a GPU. Every rank calls it.

    Who this rank is comes from torchrun's variables, or from Slurm's or MPI's; without any it is alone.
    """
    launch = Launch.from_env(os.environ)
    world = World(launch.rank, launch.size, launch.local_rank, _own_device(devices, launch), timeout_seconds)
    if not launch.launcher:
        print("no launcher: a world of one (several ranks: torchrun --nproc_per_node=N)", flush=True)
        yield world
        return
    launch.set_env(os.environ)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    _init(world, launch)
    try:
        yield world
        world.barrier()  # rank 0 keeps the store: it must not leave first
    except BaseException as error:
        raise _explain(error, world) from error
    dist.destroy_process_group()


def choose_devices(device: str, gpu: Sequence[int] | None) -> list[torch.device]:
    """The devices that `--device` and `-g` name; without a GPU, the CPU as often as `-g` names an id."""
    num_devices = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if device == "cuda" and not num_devices:
        raise UserError("no CUDA device is visible; --device cuda; use --device cpu, or check CUDA_VISIBLE_DEVICES and the driver")
    if not num_devices:
        return [torch.device("cpu")] * len(gpu or [0])
    missing = [number for number in gpu or () if number >= num_devices]
    if missing:
        raise UserError(f"no such GPU: {missing[0]}, {num_devices} visible; -g; name ids from 0 to {num_devices - 1}")
    return [torch.device("cuda", number) for number in gpu or range(num_devices)]


def _own_device(devices: list[torch.device], launch: Launch) -> torch.device:
    """The device of a rank: the one that belongs to its local rank, or the only one that the launcher made visible."""
    if devices[0].type == "cpu":
        return devices[0]
    if len(devices) == 1 and launch.one_device_each:
        return devices[0]
    if launch.local_rank >= len(devices):
        raise UserError(f"more ranks than devices: local rank {launch.local_rank}, {len(devices)} visible; --nproc_per_node; "
                        f"start {len(devices)} a node (Slurm: make --gpus-per-task and --ntasks-per-node agree), or use --device cpu")
    return devices[launch.local_rank]


def _init(world: World, launch: Launch) -> None:
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=world.timeout_seconds))
    except (dist.DistError, RuntimeError, ValueError) as error:
        place = f"{launch.master_addr}:{launch.master_port}"
        reason = str(error).splitlines()[0][:160]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise UserError(f"the port is in use; {place}; give another --master_port, or torchrun --standalone finds a free one") from None
        raise UserError(f"rank {world.rank} of {world.size} did not meet the others within --timeout {world.timeout_seconds:g} s "
                        f"({reason}); {place} on {os.uname().nodename}; check that every node started and reaches that address") from None


def _explain(error: BaseException, world: World) -> BaseException:
    """Turn a broken collective into one line, and see that one rank alone says what went wrong."""
    lost = not isinstance(error, UserError) and _is_lost_peer(error)
    if not lost and not isinstance(error, Exception):
        return error
    first = _tell_first(f"rank {world.rank} ({os.uname().nodename}): {error}")
    if not lost:
        if isinstance(error, UserError) and not first:
            return PeerLost(str(error))
        return error
    reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    hint = f"no answer within --timeout {world.timeout_seconds:g} s" if timed_out else "the connection is closed"
    found = PeerLost(f"rank {world.rank} lost another rank in a collective, {hint} ({reason}); on {os.uname().nodename}; "
                     "look for the first error above, or at the launcher's report (a killed process leaves no words)")
    found.told = not first
    return found


def _is_lost_peer(error: BaseException) -> bool:
    words = ("connection closed", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting", "socket", "store")
    return isinstance(error, (dist.DistError, RuntimeError)) and any(word in str(error).lower() for word in words)


def _tell_first(message: str) -> bool:
    """Whether this rank is the first that reports an error, by the group's store; without a store it is."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=3))
        return store.add("errors", 1) == 1
    return False  # the store left with rank 0: that one has told
