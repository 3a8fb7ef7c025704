"""This process's place among the others (`World`), and the two ways to get one: alone, or in a process group.

    with process_group(choose_devices("auto", None), timeout_seconds=600) as world:     # under torchrun or srun
        print(world.rank, world.size, world.device)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import UserError
from common.launching.failure import RankError, SharedError, explain, leave, own_error, told_memory
from common.launching.launch_env import Launch, tasks_without_srun
from common.launching.rendezvous import meet
from common.launching.threads import own_seat, share_cores
from common.stop import StopSignals

T = TypeVar("T")
STOP_SECONDS = 10.0  # that a rank asked to stop goes on waiting for the others at the start


@dataclass(frozen=True)
class World:
    """One process among `size`. With a size of one, every collective returns at once."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout_seconds: float = 600.0
    patient: Any = None  # the ranks as a group without a timeout

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

    def broadcast(self, value: T, group: Any = None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=group)
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
        value, message = self.broadcast(outcome, self.patient)
        if message is not None:
            raise SharedError(message)
        return value

    def agree(self, error: UserError | None) -> None:
        """Raise on every rank if any rank brings an error: the first one's words. Every rank calls it."""
        messages = [message for message in self.gather(str(error) if error else None) if message]
        if messages:
            raise SharedError(messages[0])

    def explain(self, error: BaseException) -> BaseException:
        """What to raise in place of an error, so that one rank alone tells it, in words where memory ran out."""
        if (told := told_memory(error)) is not None:
            error = self.own_error(told)
        if self.size == 1:
            return error
        return explain(error, rank=self.rank, timeout_seconds=self.timeout_seconds)

    def own_error(self, error: Exception) -> Exception:
        """An error that the other ranks do not have: it names this one."""
        return own_error(error, self.rank, self.size)


@contextmanager
def single_process(device: torch.device) -> Iterator[World]:
    """A world of one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(rank=0, size=1, local_rank=0, device=device)
    try:
        yield world
    except Exception as error:
        explained = world.explain(error)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def process_group(devices: list[torch.device], timeout_seconds: float,
                  stop: StopSignals | None = None) -> Iterator[World]:
    """Join the other ranks: gloo for tensors on the CPU, NCCL for those on a GPU. Every rank calls it.

    Who this rank is comes from torchrun's variables, or from Slurm's or MPI's; without any it is alone.
    A `stop` while it waits for ranks that do not come ends it soon.
    """
    launch = Launch.from_env(os.environ)
    world = World(launch.rank, launch.size, launch.local_rank, own_device(devices, launch), timeout_seconds)
    if not launch.launcher:
        tasks = tasks_without_srun(os.environ)
        several = f"this Slurm job has {tasks} tasks: srun python" if tasks else "several: torchrun --nproc_per_node=N"
        print(f"no launcher: a world of one ({several} ...)", flush=True)
        dist.init_process_group(_backend(world), store=dist.HashStore(), rank=0, world_size=1)  # DDP asks for a group
        with single_process(world.device) as alone:
            yield alone
        dist.destroy_process_group()
        return
    launch.set_env(os.environ)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    with stop.impatient(STOP_SECONDS) if stop else nullcontext():
        _init(world, launch)
    try:
        if world.size > 1:
            world = replace(world, patient=dist.new_group(backend="gloo", timeout=timedelta(days=30)))
        share_cores(world.gather(own_seat()), world.rank)
        yield world
        world.barrier()  # rank 0 keeps the store: it must not leave first
    except BaseException as error:
        explained = world.explain(error)
        object.__setattr__(world, "patient", None)  # the last reference: its connections close now, for others to see
        leave(world.rank, world.size)
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()


def choose_devices(device: str, gpu: Sequence[int] | None) -> list[torch.device]:
    """The devices that `--device` and `-g` name; without a GPU, the CPU as often as `-g` names an id."""
    num_devices = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if device == "cuda" and not num_devices:
        raise UserError("no CUDA device is visible; --device cuda; "
                        "use --device cpu, or check CUDA_VISIBLE_DEVICES and the driver")
    if not num_devices:
        return [torch.device("cpu")] * len(gpu or [0])
    missing = [number for number in gpu or () if number >= num_devices]
    if missing:
        raise UserError(f"no such GPU: {missing[0]}, {num_devices} visible; -g; name ids from 0 to {num_devices - 1}")
    return [torch.device("cuda", number) for number in gpu or range(num_devices)]


def own_device(devices: list[torch.device], launch: Launch) -> torch.device:
    """The device of a rank: the one that belongs to its local rank, or the only one that the launcher made visible."""
    if devices[0].type == "cpu":
        return devices[0]
    if len(devices) == 1 and launch.one_device_each:
        return devices[0]
    if launch.local_rank >= len(devices):
        raise RankError(f"more ranks than devices: local rank {launch.local_rank}, {len(devices)} visible; "
                        f"--nproc_per_node; start {len(devices)} a node (Slurm: make --gpus-per-task and "
                        "--ntasks-per-node agree), or use --device cpu", told=launch.local_rank > len(devices))
    return devices[launch.local_rank]


def _backend(world: World) -> str:
    return "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"


def _init(world: World, launch: Launch) -> None:
    try:
        store = meet(launch, world.timeout_seconds)
        dist.init_process_group(_backend(world), store=store, rank=world.rank, world_size=world.size,
                                timeout=timedelta(seconds=world.timeout_seconds))
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise UserError(f"rank {world.rank} of {world.size} met the others and cannot connect to them within --timeout "
                        f"{world.timeout_seconds:g} s ({reason}); {os.uname().nodename}; "
                        "check firewalls between the nodes, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME") from None
