"""How ranks meet, and the line that says why they do not. Ranks are threads here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from common.errors import UserError
from common.launching import rendezvous
from common.launching.failure import RankError
from common.launching.launch_env import Launch
from common.launching.rendezvous import meet


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def launch(rank: int, size: int, port: int, address: str = "127.0.0.1", local_size: int | None = None) -> Launch:
    return Launch(rank, size, rank, address, port, "torchrun", local_size=local_size or size)


def all_meet(launches: list[Launch], timeout_seconds: float) -> list[object]:
    """What comes out of `meet` on each rank: a store or an error."""
    def one(launch: Launch) -> object:
        try:
            return meet(launch, timeout_seconds)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(launches)) as threads:
        return list(threads.map(one, launches))


def told(outcomes: list[object]) -> list[str]:
    """The lines that a user would see."""
    return [str(error) for error in outcomes if isinstance(error, UserError) and not getattr(error, "told", False)]


def test_all_ranks_share_one_store():
    port = free_port()
    stores = all_meet([launch(rank, 3, port) for rank in range(3)], 20)
    stores[1].set("key", "value")
    assert stores[2].get("key") == stores[0].get("key") == b"value"


def test_a_store_that_lives_on_mixes_no_meetings_up(monkeypatch: pytest.MonkeyPatch):
    """torchrun's store, as nodes leave and come: what is in it says nothing of how often each of them was started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for size in (2, 3, 3, 1, 2):
        stores = all_meet([launch(rank, size, store.port) for rank in range(size)], 20)
        assert not stores[0].check(["key"])
        stores[-1].set("key", "value")
        assert all(met.get("key") == b"value" for met in stores)
        (line,) = told(all_meet([launch(1, 2, store.port)], 0.3))  # a rank 1 that finds only what others have left
        assert f"rank 0 did not come within --timeout 0.3 s; 127.0.0.1:{store.port}, rank 1 of 2" in line
        assert all_meet([launch(0, 2, store.port)], 0.3)[0].told is False


def test_ranks_that_never_come_are_named_by_one():
    port = free_port()
    outcomes = all_meet([launch(rank, 4, port) for rank in (0, 2)], 1.5)
    assert all(isinstance(outcome, RankError) for outcome in outcomes)
    (line,) = told(outcomes)
    assert "did not come within --timeout 1.5 s: 1, 3 of 4" in line or "rank 0 has left" in line
    assert f"127.0.0.1:{port}" in line


def test_ranks_that_were_started_by_a_torchrun_that_is_dead_by_now(monkeypatch: pytest.MonkeyPatch):
    """A launcher that was killed while they were born: nothing else tells them. They do not wait for --timeout."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setattr(rendezvous, "AGENT_SECONDS", 1.0)
    port = free_port()
    (line,) = told(all_meet([launch(rank, 3, port) for rank in range(3)], 1e4))
    assert line.startswith("torchrun has left") and str(port) in line


def test_ranks_of_different_worlds():
    port = free_port()
    (line,) = told(all_meet([launch(0, 2, port), launch(1, 3, port)], 20))
    assert "ranks of different worlds" in line and "one of 2" in line and "one of 3" in line


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"the port is in use; 127.0.0.1:{port} .*--master_port or MASTER_PORT"):
            meet(launch(0, 1, port), 5)


def test_rank_0_is_not_there():
    port = free_port()
    outcomes = [all_meet([launch(rank, 3, port)], 1)[0] for rank in (1, 2)]
    (line,) = told(outcomes)  # of local rank 1: local rank 0 is who is missing
    assert line.startswith("rank 1 of 3 did not reach rank 0 within --timeout 1 s") and f"127.0.0.1:{port}" in line


@pytest.fixture()
def mute() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_something_else_answers_in_place_of_rank_0(mute: int):
    with pytest.raises(RankError, match=f"something else than rank 0 answers rank 1 of 2 .*127.0.0.1:{mute} from"):
        meet(launch(1, 2, mute), 0.5)


def test_something_else_answers_in_place_of_torchrun(monkeypatch: pytest.MonkeyPatch, mute: int):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    (line,) = told(all_meet([launch(rank, 2, mute) for rank in range(2)], 0.5))
    assert line.startswith("something else than torchrun answers rank 0 of 2") and str(mute) in line


@pytest.mark.parametrize("names, message", [
    ({"node1": "127.0.1.1", "node2": "10.0.0.2"}, "address of rank 0 is node2 itself .127.0.1.1.*MASTER_ADDR node1"),
    ({"node1": "10.0.0.1", "node2": "127.0.1.1"}, "node2 knows itself by a loopback address .*GLOO_SOCKET_IFNAME"),
    ({"node2": "10.0.0.2"}, "address of rank 0 is not known on node2 .*MASTER_ADDR node1")])
def test_addresses_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], message: str):
    def look_up(name: str) -> str:
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return names[name]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("common.launching.rendezvous._look_up", look_up)
    monkeypatch.setattr("common.launching.rendezvous._host", lambda: "node2")
    with pytest.raises(UserError, match=message):
        meet(launch(1, 2, 1, "node1", local_size=1), 1)


def test_one_node_may_be_loopback():
    port = free_port()
    assert not told(all_meet([launch(rank, 2, port, "localhost") for rank in range(2)], 20))


@pytest.mark.parametrize("address", ["no.such.host", "a..b"])
def test_a_name_that_does_not_resolve_is_told_at_once_on_one_node_too(address: str):
    with pytest.raises(UserError, match=f"address of rank 0 is not known .*; MASTER_ADDR {address}; give"):
        meet(launch(0, 1, free_port(), address), 1e4)
