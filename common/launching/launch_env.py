"""How a rank learns its part: from torchrun's variables, Slurm's (`srun python train_ddp.py`) or MPI's.

    torchrun --nproc_per_node=2 train_ddp.py ...        # RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun --ntasks-per-node=2 python train_ddp.py ...    # SLURM_PROCID and others
    mpirun -n 2 python train_ddp.py ...                 # OMPI_COMM_WORLD_RANK or PMI_RANK and others
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from common.errors import UserError
from common.launching.failure import RankError

Env = Mapping[str, str]

# Rank, number of ranks, rank within the node, ranks of the node. Slurm stands last: MPI's own daemons are tasks of it.
VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
SIGNS = {"torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "Open MPI": ("OMPI_COMM_WORLD_RANK",),
         "MPICH": ("MPI_LOCALRANKID",), "Slurm": ("SLURM_STEP_ID",)}  # any of them: this launcher started us
DEFAULT_PORT = 29500
PORTS = range(1, 1 << 16)
JOB_PORTS = range(15000, 30000)  # below the ports that the kernel hands out by itself


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `launcher` is empty where there is none."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    launcher: str = ""
    one_device_each: bool = False  # the launcher shows each rank its own GPU alone
    local_size: int = 1

    @classmethod
    def from_env(cls, env: Env) -> Launch:
        """Read the environment. Raises UserError for a half-set one, naming what is missing."""
        launcher = _launcher(env)
        if not launcher:
            return cls()
        needed = VARIABLES[launcher][:3]
        _demand(env, launcher, (*needed, "MASTER_ADDR", "MASTER_PORT") if launcher == "torchrun" else needed)
        rank, size, local_rank = (_number(env, name) for name in needed)
        if not 0 <= rank < size or local_rank < 0:
            raise RankError(f"impossible place: rank {rank} of {size}, local rank {local_rank}; {', '.join(needed)}; "
                            "start with torchrun or srun")
        local_size = _local_size(env, launcher, size)
        address = env.get("MASTER_ADDR") or _first_host(env, launcher, size, local_size)
        port = _number(env, "MASTER_PORT", PORTS) if env.get("MASTER_PORT") else _port(env, launcher)
        return cls(rank, size, local_rank, address, port, launcher, _one_device_each(env, local_size), local_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that take part, if all have as many ranks as this one."""
        return -(-self.size // self.local_size)

    def set_env(self, env: MutableMapping[str, str]) -> None:
        """Leave torchrun's names behind, for whoever reads them, such as webdataset's splitters."""
        env.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK=str(self.local_rank),
                   LOCAL_WORLD_SIZE=str(self.local_size))
        env.update(MASTER_ADDR=self.master_addr, MASTER_PORT=str(self.master_port))


def is_first(env: Env, on_node: bool = False) -> bool:
    """Whether this process should speak for all, or all on its node, where no rank is known yet: first, or alone.

    Where only a part of its place is known it speaks: two messages are better than none.
    """
    place = [env.get(name, "") for name in VARIABLES.get(_launcher(env), ())[:3]]
    return not place or not all(map(str.isdecimal, place)) or int(place[2 if on_node else 0]) == 0


def tasks_without_srun(env: Env) -> int:
    """Tasks of the Slurm job in whose batch script or shell this process was started, without srun; 0 elsewhere."""
    if _launcher(env) or not env.get("SLURM_JOB_ID"):
        return 0
    tasks = env.get("SLURM_NTASKS", "1")
    return int(tasks) if tasks.isdecimal() and int(tasks) > 1 else 0


def _launcher(env: Env) -> str:
    return next((name for name, signs in SIGNS.items() if any(env.get(sign) for sign in signs)), "")


def _demand(env: Env, launcher: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        found = [name for name in names if env.get(name)] or list(SIGNS[launcher])
        raise UserError(f"{launcher} or a script set {', '.join(found)} but not {', '.join(missing)}; the environment; "
                        "start with torchrun or srun, or unset them all for a world of one")


def _number(env: Env, name: str, among: range | None = None) -> int:
    try:
        number = int(env[name])
    except ValueError:
        raise UserError(f"not a number: {env[name]!r}; {name}; start with torchrun or srun, which set it") from None
    if among is not None and number not in among:
        raise UserError(f"out of range: {number}; {name}; give a number from {among[0]} to {among[-1]}")
    return number


def _local_size(env: Env, launcher: str, size: int) -> int:
    """Ranks on this node; where the launcher does not tell, all of them are."""
    name = VARIABLES[launcher][3]
    if not env.get(name):
        return size
    if launcher == "Slurm":
        return _tasks_of_node(env[name], _number(env, "SLURM_NODEID") if env.get("SLURM_NODEID") else 0)
    return _number(env, name, range(1, 1 << 31))


def _tasks_of_node(text: str, node: int) -> int:
    """Slurm's short form of the tasks of each node: "2(x3),1" is 2, 2, 2 and 1."""
    counts = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node < len(counts) else 1


def _first_host(env: Env, launcher: str, size: int, local_size: int) -> str:
    """Where rank 0 runs, and with it the store that all ranks meet at."""
    if size == local_size:
        return "127.0.0.1"
    if launcher == "Slurm" and (nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")):
        return first_host(nodes)
    raise UserError(f"{launcher} starts ranks on several nodes but does not say where rank 0 is; MASTER_ADDR; "
                    "set it to the name of rank 0's node for all ranks (mpirun -x MASTER_ADDR)")


def first_host(nodes: str) -> str:
    """The first name of Slurm's short form of a list of nodes.

    >>> first_host("gpu[07-09,12],login")
    'gpu07'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)


def _port(env: Env, launcher: str) -> int:
    """The port where nobody names one: every rank comes to the same, and another job or step to another."""
    if launcher != "Slurm":
        return DEFAULT_PORT
    job, step = (_number(env, name) if env.get(name) else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return JOB_PORTS[(7 * job + step) % len(JOB_PORTS)]


def _one_device_each(env: Env, local_size: int) -> bool:
    """Whether several ranks of this node see one GPU each, as with Slurm's --gpus-per-task=1.

    One GPU that all ranks of a node would have to share looks the same but for SLURM_GPUS_ON_NODE.
    """
    visible = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    shared = "TORCHELASTIC_RUN_ID" in env or env.get("SLURM_GPUS_ON_NODE") == "1"
    return len(visible) == 1 and local_size > 1 and not shared
