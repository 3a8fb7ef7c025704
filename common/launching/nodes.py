"""What must be alike wherever a rank runs: the settings it was started with, and the shards it sees.

    check_same_settings(world, dataclasses.asdict(config))
    check_shards(world, index.paths)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from common.access.urls import is_remote, shown_settings
from common.distributed import World
from common.errors import UserError
from common.launching.failure import SharedError

OWN = ("gpu",)  # settings that may differ from rank to rank


def check_same_settings(world: World, settings: Mapping[str, Any]) -> None:
    """Compare the settings of all ranks, and torch's version. Every rank calls it.

    Raises SharedError on all of them that names what differs, both values and where. Costs one hash in a gather.
    """
    values = {name: repr(value) for name, value in settings.items() if name not in OWN}
    values["version of torch"] = str(torch.__version__)
    digests = world.gather(hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    settings = {name: repr(value) for name, value in shown_settings(settings).items() if name in values}
    everywhere = world.gather((os.uname().nodename, values | settings))
    (first_host, first), found = everywhere[0], []
    for name in dict.fromkeys(name for _, other in everywhere for name in other):
        for rank, (host, other) in enumerate(everywhere):
            if other.get(name) != first.get(name):
                shown = name if " " in name else f"--{name}"
                found.append(f"{shown} is {first.get(name)} on rank 0 ({first_host}) "
                             f"and {other.get(name)} on rank {rank} ({host})")
                break
    what = ", ".join(found) or "the password or the query of a URL"  # which are not shown
    raise SharedError(f"the ranks were started differently: {what}; the command of each node; "
                      "give all of them the same flags and the same software")


def check_shards(world: World, paths: Iterable[str]) -> None:
    """Look for shards on every node, since rank 0 alone has read their index. Every rank calls it.

    Raises SharedError on all ranks that names the node. A folder is listed once, by one rank of each node.
    """
    error = None
    if world.size > 1 and world.local_rank == 0:
        missing = _missing(paths)
        if missing:
            error = UserError(f"{len(missing)} shards are not on {os.uname().nodename}, where rank {world.rank} runs: "
                              f"{missing[0]}; -s or --val_path; put them on a file system that all nodes share, "
                              "or copy them to this node too")
    world.agree(error)


def _missing(paths: Iterable[str]) -> list[str]:
    """The local ones of `paths` that do not exist here."""
    names: dict[str, set[str]] = {}
    missing = []
    for path in paths:
        if is_remote(path):
            continue
        folder, name = os.path.split(path)
        if folder not in names:
            try:
                names[folder] = set(os.listdir(folder or "."))
            except OSError:
                names[folder] = set()
        if name not in names[folder]:
            missing.append(path)
    return missing
