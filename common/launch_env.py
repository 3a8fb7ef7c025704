"""How a rank learns its part: from torchrun's variables, Slurm's (`srun python train_ddp.py`) or MPI's.

    torchrun --nproc_per_node=2 train_ddp.py ...        # RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from common.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `launcher` is empty where there is none."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: str = ""
    one_device_each: bool = False  # the launcher shows each rank its own GPU alone

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Read the environment. A half-set one is an error that names what is missing."""
        found = [name for name in TORCHRUN if env.get(name)]
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(found):
            return cls()
        missing = [name for name in TORCHRUN if name not in found]
        if missing:
            raise UserError(f"a launcher set {', '.join(found)} but not {', '.join(missing)}; the environment; "
                            "start with torchrun, or unset them all for a world of one")
        try:
            rank, size, local_rank, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        except ValueError as error:
            raise UserError(f"not a number ({error}); RANK, WORLD_SIZE, LOCAL_RANK or MASTER_PORT; start with torchrun") from None
        if not 0 <= rank < size or local_rank < 0:
            raise UserError(f"impossible place: rank {rank} of {size}, local rank {local_rank}; the environment; start with torchrun")
        return cls(rank, size, local_rank, env["MASTER_ADDR"], port, "torchrun")

    def set_env(self, env: MutableMapping[str, str]) -> None:
        """Leave torchrun's names behind, for init_process_group and for what webdataset's splitters read."""
        env.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK=str(self.local_rank),
                   MASTER_ADDR=self.master_addr, MASTER_PORT=str(self.master_port))
