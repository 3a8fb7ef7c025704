"""How the ranks of a run find each other, with one line for whatever keeps them apart.

    store = meet(launch, timeout_seconds=600)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size)
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from common.errors import UserError
from common.failure import RankError
from common.launch_env import Launch

POLL_SECONDS = 0.02


def meet(launch: Launch, timeout_seconds: float) -> dist.Store:
    """The store that all ranks share, once all have come. Every rank calls it.

    Raises UserError: an address that others cannot reach, a port in use, a rank that does not come in time,
    ranks that were told different world sizes. What several of them find out, the first one tells.
    """
    _check_addresses(launch)
    deadline = time.monotonic() + timeout_seconds
    store = _open_store(launch, timeout_seconds)
    try:
        store.set(f"came/{launch.rank}", f"{launch.size} on {_host()}")
        for rank in range(launch.size):
            _await(store, launch, rank, deadline, timeout_seconds)
    except UserError as error:
        raise RankError(str(error), told=store.add("errors", 1) > 1) from None
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise RankError(f"rank 0 has left ({reason}); {_place(launch)}; see its error", told=True) from None
    return store


def _host() -> str:
    return os.uname().nodename


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _open_store(launch: Launch, timeout_seconds: float) -> dist.Store:
    """Rank 0 serves it, or torchrun, whose store outlives the attempts and so has a part for each of them."""
    from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(launch.master_addr, launch.master_port, is_master=launch.rank == 0 and not from_agent,
                              timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise _refused(error, launch, timeout_seconds) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt{attempt}", store) if from_agent else store


def _refused(error: Exception, launch: Launch, timeout_seconds: float) -> UserError:
    """What kept this rank from the store."""
    if launch.rank == 0 and ("EADDRINUSE" in str(error) or "address already in use" in str(error).lower()):
        return UserError(f"the port is in use; {_place(launch)} on {_host()}; give another with --master_port or "
                         "MASTER_PORT (torchrun --standalone finds a free one)")
    reason = str(error).splitlines()[0][:120]
    return UserError(f"rank {launch.rank} of {launch.size} did not reach rank 0 within --timeout {timeout_seconds:g} s "
                     f"({reason}); {_place(launch)} from {_host()}; "
                     "check that rank 0 was started and that the address is its node's")


def _await(store: dist.Store, launch: Launch, rank: int, deadline: float, timeout_seconds: float) -> None:
    """Until a rank has come, and thinks of the world as this one does."""
    while not store.check([f"came/{rank}"]):
        if time.monotonic() >= deadline:
            missing = [str(other) for other in range(launch.size) if not store.check([f"came/{other}"])]
            shown = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
            raise UserError(f"ranks did not come within --timeout {timeout_seconds:g} s: {shown} of {launch.size}; "
                            f"{_place(launch)}; check that every node was started and reaches that address")
        time.sleep(POLL_SECONDS)
    size, _, host = store.get(f"came/{rank}").decode().partition(" on ")
    if int(size) != launch.size:
        raise UserError(f"ranks of different worlds: rank {rank} on {host} is one of {size}, "
                        f"rank {launch.rank} on {_host()} one of {launch.size}; "
                        "WORLD_SIZE, --nnodes or --nproc_per_node; start every node with the same numbers")


def _check_addresses(launch: Launch) -> None:
    """A loopback address leads nowhere from another node, and gloo listens where its own host name points."""
    if launch.num_nodes == 1:
        return
    try:
        master = socket.gethostbyname(launch.master_addr)
    except OSError as error:
        raise UserError(f"the address of rank 0 is not known on {_host()} ({error.strerror}); "
                        f"MASTER_ADDR {launch.master_addr}; give a name or number that every node knows") from None
    if master.startswith("127.") and _agent_is_here(launch):
        return  # several of torchrun's nodes on one machine
    if master.startswith("127.") and launch.master_addr != _host():
        raise UserError(f"the address of rank 0 is {_host()} itself ({master}), for {launch.num_nodes} nodes; "
                        f"MASTER_ADDR {launch.master_addr}; give the name of rank 0's node, as the other nodes know it")
    if _own_address().startswith("127.") and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise UserError(f"{_host()} knows itself by a loopback address ({_own_address()}), which no other node can "
                        "reach; /etc/hosts; mend it, or set GLOO_SOCKET_IFNAME to the network's interface "
                        "(ip -br addr lists them)")


def _agent_is_here(launch: Launch) -> bool:
    """Whether torchrun, which was there before its ranks, serves the store at an address of this machine."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((launch.master_addr, launch.master_port), timeout=3).close()
    except OSError:
        return False
    return True


def _own_address() -> str:
    try:
        return socket.gethostbyname(_host())
    except OSError:
        return ""  # gloo then looks for an address of its own
