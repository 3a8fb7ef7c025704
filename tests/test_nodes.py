"""Settings and shards that are not the same on every node."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.distributed import World
from common.errors import UserError
from common.launching.nodes import check_same_settings, check_shards


class Ranks:
    """A gather between threads, each of which takes the place of a rank."""

    def __init__(self, size: int):
        self.values, self.barrier = [None] * size, threading.Barrier(size, timeout=10)

    def world(self, rank: int, local_rank: int = 0) -> SimpleNamespace:
        def gather(value):
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values

        world = SimpleNamespace(rank=rank, size=len(self.values), local_rank=local_rank, gather=gather)
        world.agree = lambda error: World.agree(world, error)
        return world

    def call(self, functions) -> list[str | None]:
        """What each rank's function raises."""
        def one(rank, function):
            try:
                function(self.world(rank))
            except UserError as error:
                errors[rank] = str(error)

        errors: list[str | None] = [None] * len(self.values)
        threads = [threading.Thread(target=one, args=item) for item in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return errors


def test_equal_settings_pass():
    settings = {"lr": 0.1, "shard_path": ("a", "b")}
    assert Ranks(3).call([lambda world: check_same_settings(world, settings)] * 3) == [None] * 3


def test_what_differs_is_named_on_every_rank():
    def settings(**values):
        return lambda world: check_same_settings(world, {"lr": 0.1, "batch_size": 4, "output": "x"} | values)

    errors = Ranks(3).call([settings(), settings(), settings(lr=0.2, output="y")])
    assert len(set(errors)) == 1 and errors[0] is not None
    assert "--lr is 0.1 on rank 0" in errors[0] and "0.2 on rank 2" in errors[0]
    assert "--output is 'x'" in errors[0] and "batch_size" not in errors[0]


def test_no_password_is_told():
    def settings(password: str, shards: str = "a"):
        url = f"https://user:{password}@host/{shards}.tar?token={password}"
        return lambda world: check_same_settings(world, {"shard_path": (url,), "val_path": ()})

    for other, words in ((settings("guess"), "the password"), (settings("s3cret", "b"), "https://host/b.tar")):
        errors = Ranks(2).call([settings("s3cret"), other])
        assert words in errors[0] and "s3cret" not in errors[0] and "guess" not in errors[0]


def test_the_gpu_is_each_ranks_own():
    assert Ranks(2).call([lambda world: check_same_settings(world, {"gpu": (world.rank,)})] * 2) == [None, None]


def test_shards_that_one_node_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.tar").touch()
    paths = [str(tmp_path / "a.tar"), str(tmp_path / "b.tar"), str(tmp_path / "no" / "c.tar"), "https://host/d.tar"]
    errors = Ranks(2).call([lambda world: check_shards(world, paths[:1]), lambda world: check_shards(world, paths)])
    assert errors[0] == errors[1] is not None
    assert "2 shards are not on " in errors[0] and "where rank 1 runs" in errors[0] and paths[1] in errors[0]


@pytest.mark.parametrize("size, local_rank", [(1, 0), (2, 1)])
def test_rank_0_alone_or_another_rank_of_a_node_looks_for_nothing(size: int, local_rank: int):
    world = SimpleNamespace(rank=0, size=size, local_rank=local_rank, agree=lambda error: [][0] if error else None)
    check_shards(world, ["/nowhere/a.tar"])
