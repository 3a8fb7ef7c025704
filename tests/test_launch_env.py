"""Who a rank is, as each launcher says it, and what half-set environments are told."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.launching.failure import RankError
from common.launching.launch_env import JOB_PORTS, Launch, first_host, is_first, tasks_without_srun

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
            "MASTER_PORT": "4000", "TORCHELASTIC_RUN_ID": "x"}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4",
         "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
         "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_no_launcher_is_a_world_of_one():
    launch = Launch.from_env({"MASTER_ADDR": "node1", "SLURM_JOB_ID": "17", "SLURM_PROCID": "0"})  # a batch script's
    assert (launch.rank, launch.size, launch.launcher) == (0, 1, "")


def test_torchrun():
    launch = Launch.from_env(TORCHRUN)
    assert launch == Launch(3, 4, 1, "node1", 4000, "torchrun", local_size=2)
    assert launch.num_nodes == 2


def test_torchrun_within_srun_is_torchruns():
    assert Launch.from_env(SLURM | TORCHRUN).launcher == "torchrun"


def test_srun():
    launch = Launch.from_env(SLURM)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 4, 1, 2)
    assert (launch.launcher, launch.master_addr, launch.num_nodes) == ("Slurm", "gpu07", 2)
    assert launch.master_port in JOB_PORTS


def test_port_of_srun_is_the_same_for_all_ranks_and_another_for_another_step_or_job():
    ports = {Launch.from_env(SLURM | {"SLURM_PROCID": str(rank)}).master_port for rank in range(4)}
    ports |= {Launch.from_env(SLURM | other).master_port for other in ({"SLURM_STEP_ID": "3"}, {"SLURM_JOB_ID": "18"})}
    assert len(ports) == 3


def test_named_address_and_port_win():
    launch = Launch.from_env(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "555"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 555)


def test_ranks_of_an_uneven_node():
    env = SLURM | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_LOCALID": "0"}
    assert [Launch.from_env(env | {"SLURM_NODEID": str(node)}).local_size for node in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("nodes, first", [
    ("node1", "node1"), ("node1,node2", "node1"), ("gpu[07-09,12],login", "gpu07"), ("gpu[3,5]", "gpu3"),
    ("rack[1-2]n[004-007],x", "rack1n004"), ("a-b-[1-2]", "a-b-1"), ("n1-ib.example", "n1-ib.example")])
def test_first_host_of_slurms_short_form(nodes: str, first: str):
    assert first_host(nodes) == first


@pytest.mark.parametrize("env, name", [(OPEN_MPI, "Open MPI"), (MPICH, "MPICH")])
def test_mpirun(env: dict[str, str], name: str):
    launch = Launch.from_env(env | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})  # mpirun's daemon is a task of Slurm
    assert launch == Launch(1, 2, 1, "127.0.0.1", 29500, name, local_size=2)


def test_mpirun_on_several_nodes_needs_the_address():
    env = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="does not say where rank 0 is; MASTER_ADDR"):
        Launch.from_env(env)
    assert Launch.from_env(env | {"MASTER_ADDR": "node1"}).master_addr == "node1"


@pytest.mark.parametrize("env, missing", [
    (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"), (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK"),
    (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR, MASTER_PORT"),
    (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID"),
    (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
    ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT")])
def test_half_set_environment_names_what_is_missing(env: dict[str, str], missing: str):
    with pytest.raises(UserError, match=f"but not {missing};"):
        Launch.from_env(env)


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "-1"}, {"LOCAL_RANK": "-1"}])
def test_impossible_place(change: dict[str, str]):
    with pytest.raises(RankError, match="impossible place") as caught:
        Launch.from_env(TORCHRUN | change)
    assert not caught.value.told  # the other ranks may be in their places


@pytest.mark.parametrize("env, name", [
    *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
    *((SLURM, name) for name in ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")),
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE")])
def test_not_a_number(env: dict[str, str], name: str):
    with pytest.raises(UserError, match=f"not a number: 'x'; {name}"):
        Launch.from_env(env | {name: "x"})


@pytest.mark.parametrize("name, value", [
    *(("MASTER_PORT", value) for value in ("0", "-1", "65536", "99999", "70000000000")), ("LOCAL_WORLD_SIZE", "0")])
def test_out_of_range(name: str, value: str):
    with pytest.raises(UserError, match=f"out of range: {value}; {name}; give a number from 1 to"):
        Launch.from_env(TORCHRUN | {name: value})


@pytest.mark.parametrize("env, each", [
    (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, True),  # --gpus-per-task=1
    (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, False),
    (SLURM | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, False),  # two ranks, one GPU
    (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0"}, False),
    (without(TORCHRUN, "TORCHELASTIC_RUN_ID") | {"CUDA_VISIBLE_DEVICES": "0"}, True)])  # a wrapper around srun
def test_one_visible_gpu_for_each_rank(env: dict[str, str], each: bool):
    assert Launch.from_env(env).one_device_each is each


def test_set_env_leaves_torchruns_names():
    env: dict[str, str] = {}
    Launch.from_env(SLURM).set_env(env)
    assert [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", "4", "1", "2"]
    assert env["MASTER_ADDR"] == "gpu07" and int(env["MASTER_PORT"]) in JOB_PORTS
    assert Launch.from_env(env).rank == 3


def test_who_speaks_before_the_ranks_have_met():
    assert is_first({}) and is_first(TORCHRUN | {"RANK": "0"}) and not is_first(TORCHRUN)
    assert is_first(TORCHRUN | {"LOCAL_RANK": "x"}, on_node=True) and is_first(TORCHRUN | {"RANK": ""})
    assert not is_first(SLURM) and is_first(SLURM | {"SLURM_PROCID": "0"})
    assert is_first(SLURM | {"SLURM_LOCALID": "0"}, on_node=True) and not is_first(SLURM, on_node=True)


def test_several_tasks_without_srun():
    assert tasks_without_srun({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == 4
    assert tasks_without_srun({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}) == 0
    assert tasks_without_srun(SLURM) == tasks_without_srun({}) == 0
