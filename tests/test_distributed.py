"""The world that a rank gets: alone, with its device, and with ranks that were started differently."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

from common.distributed import World, choose_devices, own_device, process_group, single_process
from common.errors import UserError
from common.launching.launch_env import Launch
from tests.helpers import ROOT, TINY, end, start, write_shards

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", number) for number in range(2)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def ranks(size: int, script: str, *flags: object, **env: str) -> list:
    """The processes of a world, without a launcher; `flags` is one list for each."""
    environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    return [start([sys.executable, str(ROOT / script), *map(str, arguments)],
                  **environment, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank, arguments in enumerate(flags)]


def test_a_world_of_one_needs_nobody():
    with single_process(CPU) as world:
        assert world.is_main and world.device_ids is None
        assert world.sum([1.5, 2.0]) == [1.5, 2.0] and world.gather("a") == ["a"] and world.broadcast("b") == "b"
        world.barrier()
        assert world.on_main(lambda: 3) == 3


def test_memory_that_ran_out_is_told_in_words():
    with pytest.raises(UserError, match=r"machine is out of memory .can't allocate memory.*; -b, -w or --image_size"), \
            single_process(CPU):
        torch.zeros(10**15)
    with pytest.raises(UserError, match="device is out of memory .CUDA out of memory.*; --batch_size"), \
            single_process(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB\nmore")
    with pytest.raises(RuntimeError, match="a bug"), single_process(CPU):
        raise RuntimeError("a bug")


def test_an_error_of_rank_0s_work_or_of_any_rank_reaches_all():
    world = World(0, 1, 0, CPU)
    with pytest.raises(UserError, match="what; where"):
        world.agree(UserError("what; where"))
    world.agree(None)

    def fail() -> None:
        raise UserError("cannot; here")

    with pytest.raises(UserError, match="cannot; here"):
        world.on_main(fail)


def test_no_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with process_group([CPU], timeout_seconds=10) as world:
        assert (world.rank, world.size) == (0, 1)
    assert "a world of one (this Slurm job has 4 tasks: srun python ...)" in capsys.readouterr().out


def test_device_of_a_rank():
    assert own_device([CPU] * 3, Launch(1, 2, 1, local_size=2)) == CPU
    assert own_device(GPUS, Launch(3, 4, 1, local_size=2)) == GPUS[1]
    assert own_device(GPUS[:1], Launch(3, 4, 3, local_size=4, one_device_each=True)) == GPUS[0]
    with pytest.raises(UserError, match="more ranks than devices: local rank 3, 1 visible; --nproc_per_node"):
        own_device(GPUS[:1], Launch(3, 4, 3, local_size=4))


def test_devices_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_devices("auto", None) == [CPU] and choose_devices("cpu", (0, 1, 2)) == [CPU] * 3
    with pytest.raises(UserError, match="no CUDA device is visible; --device cuda"):
        choose_devices("cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("auto", (1,)) == [GPUS[1]] and choose_devices("cuda", None) == GPUS
    with pytest.raises(UserError, match="no such GPU: 2, 2 visible; -g"):
        choose_devices("auto", (0, 2))


@pytest.mark.slow
def test_ranks_with_different_flags_end_with_one_line(tmp_path: Path):
    flags = ["-s", write_shards(tmp_path / "shards"), *TINY, "-w", "0", "--output", tmp_path / "run"]
    processes = ranks(2, "train_ddp.py", [*flags, "-lr", "0.1"], [*flags, "-lr", "0.2"])
    results = [end(process, 60).check(1) for process in processes]
    errors = [line for result in results for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--lr is 0.1 on rank 0" in errors[0] and "0.2 on rank 1" in errors[0]
    assert not any("Traceback" in result.err for result in results)
    assert not (tmp_path / "run").exists()
