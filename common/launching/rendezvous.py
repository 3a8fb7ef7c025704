"""How the ranks of a run find each other, with one line for whatever keeps them apart.

    store = meet(launch, timeout_seconds=600)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size)

torchrun's store may outlive many meetings, and its nodes do not agree on how many there were (each counts the failures
of its own ranks). So a rank takes a number that nobody had before, and rank 0 answers each number with the name of this
meeting, which is rank 0's own number: what an earlier meeting left behind is never taken for this one's.

Elastic jobs (`torchrun --nnodes=1:2 --max_restarts=N`) go on without a node that is lost, which takes one restart of
each node that is left. For a node to come back, start every torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: the
store that it shares otherwise is announced only once, and who comes later waits for its address in vain. The node
that serves --rdzv_endpoint must live on.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from itertools import islice

import torch.distributed as dist

from common.errors import UserError
from common.launching.failure import RankError
from common.launching.launch_env import Launch

POLL_SECONDS = 0.02
AGENT_SECONDS = 10.0  # that torchrun on this node may take to answer


def meet(launch: Launch, timeout_seconds: float) -> dist.Store:
    """The store that all ranks share, once all have come. Every rank calls it.

    Raises UserError: an address that others cannot reach, a port in use, a rank that does not come in time,
    ranks that were told different world sizes. What several of them find out, the first one tells.
    """
    _check_addresses(launch)
    deadline = time.monotonic() + timeout_seconds
    hall, store, welcome = _open_store(launch, timeout_seconds), None, None
    try:
        if not _from_agent():
            store = hall
        else:
            number = hall.add("meetings/ranks", 1)
            welcome = _Welcome(hall, number) if launch.rank == 0 else None
            name = str(number) if welcome else _answer(hall, number, launch, deadline, timeout_seconds)
            store = dist.PrefixStore(f"meeting{name}", hall)
        store.set(f"came/{launch.rank}", f"{launch.size} on {_host()}")
        for rank in range(launch.size):
            _await(store, launch, rank, deadline, timeout_seconds, welcome)
    except UserError as error:
        if store is None:
            raise
        raise RankError(str(error), told=store.add("errors", 1) > 1) from None
    except (dist.DistError, RuntimeError) as error:
        raise _left(error, launch) from None
    return store


class _Welcome:
    """Rank 0's answers to the numbers of all ranks, those of earlier meetings too: nobody waits for them any more."""

    def __init__(self, hall: dist.Store, number: int):
        self.hall, self.name, self.answered = hall, str(number), 0

    def __call__(self) -> None:
        """Answer those who have come since."""
        newest = self.hall.add("meetings/ranks", 0)
        for number in range(self.answered + 1, newest + 1):
            self.hall.set(f"meetings/{number}", self.name)
        self.answered = newest


def _answer(hall: dist.Store, number: int, launch: Launch, deadline: float, timeout_seconds: float) -> str:
    """The name of the meeting, from rank 0."""
    while not hall.check([f"meetings/{number}"]):
        if time.monotonic() >= deadline:
            raise UserError(f"rank 0 did not come within --timeout {timeout_seconds:g} s; {_place(launch)}, "
                            f"rank {launch.rank} of {launch.size}; check that every node was started")
        time.sleep(POLL_SECONDS)
    return hall.get(f"meetings/{number}").decode()


def _from_agent() -> bool:
    """Whether torchrun serves the store. It lives as long as torchrun does; that of rank 0 is of one meeting alone."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host() -> str:
    return os.uname().nodename


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _open_store(launch: Launch, timeout_seconds: float) -> dist.Store:
    """Rank 0 serves it, or torchrun. That of the only node is there before its ranks, or else it was killed."""
    alone = _from_agent() and os.environ.get("GROUP_WORLD_SIZE") == "1"
    seconds = min(timeout_seconds, AGENT_SECONDS) if alone else timeout_seconds
    try:
        return _connect(launch, seconds, timeout_seconds)
    except (dist.DistError, RuntimeError, ValueError) as error:
        if alone and not _answers(launch):
            raise _left(error, launch) from None
        raise _refused(error, launch, timeout_seconds) from None


def _connect(launch: Launch, seconds: float, timeout_seconds: float) -> dist.Store:
    """The store: `seconds` to find anybody there, `timeout_seconds` for an answer, which takes long under load.

    On a thread of its own: torch keeps no time limit once somebody has taken the connection who then says nothing.
    The thread is left behind then, as this process soon ends.
    """
    opened: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            opened.set_result(dist.TCPStore(
                launch.master_addr, launch.master_port, is_master=launch.rank == 0 and not _from_agent(),
                timeout=timedelta(seconds=seconds), wait_for_workers=False))
        except BaseException as error:  # raised again where it is waited for
            opened.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    with suppress(TimeoutError):
        return opened.result(timeout_seconds)
    raise RuntimeError("no answer")


def _refused(error: Exception, launch: Launch, timeout_seconds: float) -> UserError:
    """What kept this rank from the store. A rank of each node tells it: on the node of rank 0, the one after it."""
    if launch.rank == 0 and ("EADDRINUSE" in str(error) or "address already in use" in str(error).lower()):
        return UserError(f"the port is in use; {_place(launch)} on {_host()}; give another with --master_port or "
                         "MASTER_PORT (torchrun --standalone finds a free one)")
    reason, server = str(error).splitlines()[0][:120], "torchrun" if _from_agent() else "rank 0"
    told = launch.local_rank > (launch.local_rank == launch.rank and server == "rank 0")
    if _answers(launch):
        return RankError(f"something else than {server} answers rank {launch.rank} of {launch.size} ({reason}); "
                         f"{_place(launch)} from {_host()}; end it, or give all ranks another port with --master_port "
                         "or MASTER_PORT", told)
    return RankError(f"rank {launch.rank} of {launch.size} did not reach {server} within --timeout {timeout_seconds:g} "
                     f"s ({reason}); {_place(launch)} from {_host()}; "
                     f"check that {server} was started and that the address is its node's", told)


def _left(error: Exception, launch: Launch) -> RankError:
    """Who served the store is gone."""
    reason = str(error).splitlines()[0][:120]
    server = "torchrun" if _from_agent() else "rank 0"
    return RankError(f"{server} has left ({reason}); {_place(launch)}; see its error", told=launch.rank != 0)


def _await(store: dist.Store, launch: Launch, rank: int, deadline: float, timeout_seconds: float,
           welcome: _Welcome | None) -> None:
    """Until a rank has come, and thinks of the world as this one does."""
    while not store.check([f"came/{rank}"]):
        if welcome:
            welcome()
        if time.monotonic() >= deadline:
            absent = (str(other) for other in range(launch.size) if not store.check([f"came/{other}"]))
            missing = list(islice(absent, 9))
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
    try:
        master = _look_up(launch.master_addr)
    except (OSError, UnicodeError) as error:
        raise UserError(f"the address of rank 0 is not known on {_host()} ({getattr(error, 'strerror', error)}); "
                        f"MASTER_ADDR {launch.master_addr}; give a name or number that every node knows") from None
    if launch.num_nodes == 1 or (_is_loopback(master) and _from_agent() and _answers(launch)):
        return  # or several of torchrun's nodes, which was there before its ranks, on one machine
    if _is_loopback(master) and launch.master_addr != _host():
        raise UserError(f"the address of rank 0 is {_host()} itself ({master}), for {launch.num_nodes} nodes; "
                        f"MASTER_ADDR {launch.master_addr}; give the name of rank 0's node, as the other nodes know it")
    if _is_loopback(_own_address()) and not os.environ.get("GLOO_SOCKET_IFNAME"):
        raise UserError(f"{_host()} knows itself by a loopback address ({_own_address()}), which no other node can "
                        "reach; /etc/hosts; mend it, or set GLOO_SOCKET_IFNAME to the network's interface "
                        "(ip -br addr lists them)")


def _answers(launch: Launch) -> bool:
    """Whether anything takes connections where the store should be."""
    with suppress(OSError):
        socket.create_connection((launch.master_addr, launch.master_port), timeout=3).close()
        return True
    return False


def _look_up(name: str) -> str:
    """The first address of a host, IPv4 or IPv6."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _own_address() -> str:
    try:
        return _look_up(_host())
    except OSError:
        return ""  # gloo then looks for an address of its own
