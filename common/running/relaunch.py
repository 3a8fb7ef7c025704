"""Which folder a run had before its launcher started it again: torchrun after a failure, Slurm after a requeue.

An explicit --output names the folder itself. The default name holds the time, so each launch leaves
`runs/<script>/.launch-<name>`, from which the next start of the same launch finds the folder.

    folder = find_folder(Path("runs/train_ddp"), os.environ, sys.argv, [agent])      # None: nothing to go on with
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.files import read_json, write_atomic
from common.processes import started_at

Env = Mapping[str, str]


def is_restart(env: Env) -> bool:
    """Whether torchrun or Slurm says that it starts this run again."""
    return any(env.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def agent_name(env: Env) -> str:
    """torchrun's agent, the parent of this process: host, pid and, where /proc tells, when it started. Else empty.

    The same agent starting us again is a restart even where the count stays 0, as it does when nodes join or leave.
    """
    if "TORCHELASTIC_RUN_ID" not in env:
        return ""
    return f"{os.uname().nodename}-{os.getppid()}-{started_at(os.getppid())}"


def launch_name(env: Env, command: Sequence[str]) -> str:
    """What names a launch, the same after a restart; empty where no launcher would start it again.

    Slurm keeps the job's number over a requeue. torchrun's run id is unique unless the user sets it, or the
    rendezvous is static ("none"), where address and port are fixed instead. The command tells apart
    several runs of one job.
    """
    run_id = env.get("TORCHELASTIC_RUN_ID")
    if env.get("SLURM_JOB_ID"):
        parts = ["slurm", env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "")]
    elif run_id == "none":
        parts = ["torchrun", env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")]
    elif run_id:
        parts = ["torchrun", run_id]
    else:
        return ""
    digest = hashlib.sha256("\0".join([*parts, *command]).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, parts)))[:80] + "-" + digest


def find_folder(parent: Path, env: Env, command: Sequence[str], agents: Sequence[str] = ("",),
                counted: bool = False) -> Path | None:
    """The folder in `parent` that this launch had before.

    The registry maps agents to folders, the latest last. If one of `agents`, those of all ranks, is in it, the run goes
    on with its folder; others take the latest if a launcher has `counted` a restart (the agent of rank 0 is lost, or
    Slurm has requeued the job).
    """
    folders = _folders(parent, env, command)
    for agent in agents:
        if agent in folders and (agent or counted):
            return parent / str(folders[agent])
    if folders and counted:
        return parent / str(list(folders.values())[-1])
    return None


def remember_folder(path: Path, env: Env, command: Sequence[str]) -> None:
    """Keep the folder of a new launch for `find_folder`. Nothing happens where no launcher would ask."""
    if name := launch_name(env, command):
        folders = {**_folders(path.parent, env, command), agent_name(env): path.name}
        write_atomic(path.parent / f".launch-{name}", json.dumps(folders) + "\n")


def _folders(parent: Path, env: Env, command: Sequence[str]) -> dict[str, str]:
    name = launch_name(env, command)
    return read_json(parent / f".launch-{name}") if name else {}
