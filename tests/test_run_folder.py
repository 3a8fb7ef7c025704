"""The folder of a run: which one it is after a restart, what it refuses, what it keeps when files are torn."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.assembly import open_run
from common.distributed import World
from common.errors import UserError
from common.files import read_json, write_atomic
from common.processes import age_seconds
from common.running import relaunch
from common.running.relaunch import is_restart, launch_name
from common.running.run_folder import RunFolder

START = {"epoch": 0, "step": 0, "global_step": 0, "position": 0}
LATER = {"epoch": 1, "step": 3, "global_step": 13, "position": 24}
PLAN = {"sampling": "exact", "world_size": 2}


def open_default(env: dict[str, str], command: tuple[str, ...] = ("train.py",), resume: bool = False) -> RunFolder:
    return RunFolder.open("train_ddp", None, resume, env=env, command=command)


def torchrun(count: int, run_id: str = "job", port: int = 29500) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(count),
            "MASTER_ADDR": "node1", "MASTER_PORT": str(port)}


def slurm(count: int, job: str = "7", step: str = "0") -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(count), "SLURM_STEP_ID": step}


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch):
    """Says which torchrun agent starts the processes from now on."""
    def become(name: str) -> None:
        for module in ("common.running.relaunch", "common.running.run_folder"):
            monkeypatch.setattr(f"{module}.agent_name", lambda env: name if "TORCHELASTIC_RUN_ID" in env else "")
    return become


# Which folder

def test_default_folders_of_one_second_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20250131-120000")
    names = [open_default({}).path for _ in range(3)]
    assert [str(name) for name in names] == [f"runs/train_ddp/20250131-120000{suffix}" for suffix in ("", "-1", "-2")]
    assert all(name.is_dir() for name in names)


def test_default_folders_of_processes_at_once_differ(tmp_path: Path) -> None:
    program = "from common.running.run_folder import RunFolder\nprint(RunFolder.open('s', None, False, env={}).path)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        names = [process.communicate(timeout=60)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()
    assert len(set(names)) == 4 and all((tmp_path / name).is_dir() for name in names)


@pytest.mark.parametrize("launcher", [torchrun, slurm, lambda count: {**torchrun(count), **slurm(0)}])
def test_restart_finds_the_default_folder_again(launcher) -> None:
    first = open_default(launcher(0))
    other = open_default({})
    again = open_default(launcher(1))
    assert again.path == first.path != other.path
    assert (first.restarted, again.restarted) == (False, True)


def test_restart_may_go_on_in_a_folder_that_holds_a_run() -> None:
    first = open_default(torchrun(0))
    first.start_attempt(START)
    assert open_default(torchrun(1)).start_attempt(LATER) == 1
    assert open_default(torchrun(2)).start_attempt(LATER) == 2


def test_new_launch_under_an_old_name_gets_a_new_folder(agent) -> None:
    agent("monday")
    monday = open_default(torchrun(0, "job")).path
    agent("tuesday")
    tuesday = open_default(torchrun(0, "job"))
    assert tuesday.path != monday and not tuesday.restarted
    assert open_default(torchrun(1, "job")).path == tuesday.path
    assert open_default(slurm(0)).path != open_default(slurm(0)).path


def test_two_launches_under_one_name_at_once_keep_their_folders(agent) -> None:
    paths = {}
    for name in ("a", "b"):
        agent(name)
        paths[name] = open_default(torchrun(0)).path
    for name in ("a", "b", "a"):
        agent(name)
        assert open_default(torchrun(1)).path == paths[name]


def test_rank_0_may_move_to_another_node(agent) -> None:
    agent("node1")
    path = open_default(torchrun(0)).path
    agent("node2")
    assert open_default(torchrun(1)).path == path


def test_nodes_that_join_restart_the_workers_without_a_count(agent) -> None:
    agent("node1")
    folder = open_default(torchrun(0))
    folder.start_attempt(START)
    again = open_default(torchrun(0))
    assert again.restarted and again.path == folder.path
    named = RunFolder.open("train_ddp", folder.path, False, env=torchrun(0))
    assert named.restarted
    agent("node9")
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.open("train_ddp", folder.path, False, env=torchrun(0))
    for known in ({"agents": ["node9", "node1"]}, {"counted": True}):  # rank 0's agent is new, another rank's is not
        assert RunFolder.open("train_ddp", folder.path, False, env=torchrun(0), **known).restarted
    joined = RunFolder.open("train_ddp", None, False, env=torchrun(0), command=("train.py",), agents=["node1"])
    assert joined.restarted and joined.path == folder.path
    assert not open_default(torchrun(0)).restarted


def test_runs_of_one_requeued_job_are_told_apart_by_their_command() -> None:
    paths = {lr: open_default(slurm(0), ("train.py", "-lr", lr)).path for lr in ("0.1", "0.2")}
    for lr, path in paths.items():
        assert open_default(slurm(1), ("train.py", "-lr", lr)).path == path
    third = open_default(slurm(1), ("train.py", "-lr", "0.3"))
    assert third.path not in paths.values() and not third.restarted
    assert open_default(slurm(1, step="4")).path not in paths.values()


def test_launch_name() -> None:
    def name(env: dict[str, str]) -> str:
        return launch_name(env, ["train.py"])

    assert name({}) == "" and name({"RANK": "0"}) == ""
    assert name(torchrun(0, "none", 1)) == name(torchrun(3, "none", 1)) != name(torchrun(0, "none", 2))
    assert name(torchrun(0, "job", 1)) == name(torchrun(1, "job", 2)) != name(torchrun(0, "job2", 1))
    assert name(slurm(0)) == name(slurm(2))
    assert len({name(slurm(0)), name(slurm(0, job="8")), name(slurm(0, step="1"))}) == 3
    assert "/" not in name(torchrun(0, "a/../b c")) and len(name(torchrun(0, "x" * 500))) < 120


def test_is_restart() -> None:
    assert not any(map(is_restart, [{}, torchrun(0), slurm(0), {"SLURM_RESTART_COUNT": ""}]))
    assert all(map(is_restart, [torchrun(1), slurm(2), {**torchrun(0), **slurm(1)}]))


def test_agent_name_is_the_parent_under_torchrun_only() -> None:
    assert relaunch.agent_name({}) == ""
    name = relaunch.agent_name(torchrun(0))
    assert f"-{os.getppid()}-" in name and name == relaunch.agent_name(torchrun(1))


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"a": '])
def test_torn_registry_means_a_new_folder(torn: str) -> None:
    first = open_default(slurm(0)).path
    registry, = first.parent.glob(".launch-*")
    registry.write_text(torn)
    assert open_default(slurm(1)).path != first


def test_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    RunFolder.open("train_dp", output, False, env={})
    RunFolder.open("train_dp", output, False, env={})  # empty still
    for name in ("config.json", "status.json", "last.pt"):
        (output / name).touch()
        with pytest.raises(UserError) as error:
            RunFolder.open("train_dp", output, False, env={})
        assert name in str(error.value) and str(output) in str(error.value) and "--resume auto" in str(error.value)
        assert not RunFolder.open("train_dp", output, True, env={}).restarted
        assert RunFolder.open("train_dp", output, False, env=slurm(1)).restarted
        (output / name).unlink()


def test_a_run_that_failed_before_its_first_step_left_nothing_to_refuse(tmp_path: Path) -> None:
    """A typo that is found once the folder is made: the corrected command takes the same folder."""
    folder = RunFolder.open("train_ddp", tmp_path, resume=False, env={})
    folder.start_attempt(START)
    folder.write_config({"plan": PLAN})
    folder.finish("failed", "no such file; --weights x.pt")
    RunFolder.open("train_ddp", tmp_path, resume=False, env={})
    for name, text in (("metrics.jsonl", '{"attempt": 0}\n'), ("best.pt", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="already holds a run"):
            RunFolder.open("train_ddp", tmp_path, resume=False, env={})
        (tmp_path / name).unlink()
    folder.finish("stopped")
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.open("train_ddp", tmp_path, resume=False, env={})


def test_folder_with_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert RunFolder.open("train_dp", tmp_path, False, env={}).path == tmp_path


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/nowhere"), Path("/proc/self")):
        with pytest.raises(UserError) as error:
            RunFolder.open("train_dp", path, False, env={})
        assert str(path) in str(error.value) and "--output" in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="cannot write"):
        open_default({})


# Status and config

def test_attempts_count_the_starts(tmp_path: Path) -> None:
    for attempt, place in enumerate([START, START, LATER]):
        folder = RunFolder.open("train_dp", tmp_path, True, env={})
        assert folder.start_attempt(place) == attempt == folder.attempt
        assert read_json(tmp_path / "status.json")["state"] == "running"
    folder.finish("stopped")
    status = {"state": "stopped", "attempt": 2, "reason": None, "attempts": [START, START, LATER]}
    assert read_json(tmp_path / "status.json") == status


def test_finish_keeps_the_reason_and_a_restart_drops_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start_attempt(START)
    folder.finish("failed", "no space")
    assert read_json(tmp_path / "status.json")["reason"] == "no space"
    RunFolder(tmp_path).finish("failed", "before it began")
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["reason"], status["attempts"]) == ("failed", "before it began", [START])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]
    RunFolder(tmp_path).start_attempt(LATER)
    assert read_json(tmp_path / "status.json")["reason"] is None


def test_failure_before_the_first_start_leaves_an_empty_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    RunFolder.open("train_dp", output, False, env={}).finish("failed", "no such shard")
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("torn", [None, "", '{"state": "run', "[1]", '{"attempt": 1}', '{"attempts": [0, 1]}'])
def test_torn_status_is_made_up_from_the_config(tmp_path: Path, torn: str | None) -> None:
    for place in (START, LATER):
        folder = RunFolder(tmp_path)
        folder.start_attempt(place)
        folder.write_config({"script": "train_dp", "config": {}, "plan": PLAN})
    (tmp_path / "status.json").unlink()
    if torn is not None:
        (tmp_path / "status.json").write_text(torn)
    assert RunFolder(tmp_path).start_attempt(LATER) == 2
    assert read_json(tmp_path / "status.json")["attempts"] == [START, LATER, LATER]


def test_torn_status_and_config_never_count_an_attempt_twice(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "trace").mkdir()
    rows = [json.dumps({"attempt": attempt, "key": ["k" * 1000] * 10}) for attempt in (0, 1, 4)]
    (tmp_path / "trace/rank00003.jsonl").write_text("\n".join(rows * 200) + '\n{"attempt": 9, "ke')
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "attempt": 2}\n\n')
    assert RunFolder(tmp_path).start_attempt(LATER) == 5
    assert read_json(tmp_path / "status.json")["attempts"] == [LATER] * 6


def test_config_keeps_the_plan_of_every_attempt(tmp_path: Path) -> None:
    plans = [{**PLAN, "world_size": size} for size in (2, 3, 1)]
    for attempt, plan in enumerate(plans):
        folder = RunFolder(tmp_path)
        folder.start_attempt(START)
        if attempt != 1:  # killed before it was written
            for written in [{}, plan][attempt > 0 :]:  # the last one counts
                trace = ["save"] if attempt else []
                folder.write_config({"script": "train_ddp", "config": {"trace": trace}, "plan": written})
    config = read_json(tmp_path / "config.json")
    assert (config["script"], config["config"], config["plan"]) == ("train_ddp", {"trace": ["save"]}, plans[2])
    traced = [(plans[0], False), (plans[2], True), (plans[2], True)]
    assert config["plans"] == [{**plan, "traced": value} for plan, value in traced]


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, '{"older": 1}')
    with open(path) as reader:
        write_atomic(path, "{}\n")
        assert reader.read() == '{"older": 1}'  # replaced, not overwritten

    def no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match=r"No space left on device.*status\.json.*--output"):
        write_atomic(path, "x" * 100)
    assert path.read_text() == "{}\n" and list(tmp_path.iterdir()) == [path]

    folder = RunFolder(tmp_path)
    folder._status = {"attempt": 0}
    folder.finish("failed", "the disk is full")  # must not hide why
    with pytest.raises(UserError):
        folder.finish("complete")


def test_auto_says_where_it_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    alone = World(0, 1, 0, torch.device("cpu"))
    new, saved = open_run(alone, "train_single", None, "auto")
    assert saved is None and capsys.readouterr().out == (
        f"no checkpoint in {new.path} (a new folder: --resume auto looks in --output): "
        "the run starts from the beginning\n")
    open_run(alone, "train_single", str(tmp_path / "named"), "auto")
    assert capsys.readouterr().out == f"no checkpoint in {tmp_path / 'named'}: the run starts from the beginning\n"
    open_run(alone, "train_single", str(tmp_path / "other"), "none")
    assert capsys.readouterr().out == ""


# Stop

def test_stop_file_is_seen_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.take_stop_file()
    (tmp_path / "stop").touch()
    assert folder.take_stop_file() and not folder.take_stop_file()
    assert not (tmp_path / "stop").exists()
    (tmp_path / "stop").mkdir()
    assert folder.take_stop_file()


def test_stop_file_that_comes_too_late_does_not_stop_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.start_attempt(START)
    (tmp_path / "stop").touch()
    folder.finish("complete")
    assert not RunFolder(tmp_path).take_stop_file()
    (tmp_path / "stop").touch()
    folder.finish("failed", "a rank was killed")  # torchrun may start it again
    assert folder.take_stop_file()


def test_stop_file_from_before_the_launch_means_an_earlier_run(
        tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(seconds_ago: float, **launch: object) -> bool:
        (tmp_path / "stop").touch()
        os.utime(tmp_path / "stop", (time.time() - seconds_ago,) * 2)
        RunFolder(tmp_path, **launch).start_attempt(START)
        return (tmp_path / "stop").exists()

    ages = {os.getppid(): 500.0}
    monkeypatch.setattr("common.running.run_folder.age_seconds", lambda pid=None: ages.get(pid, 100.0))
    assert left(50)  # it came while the run was starting
    assert capsys.readouterr().out == ""
    assert not left(200)
    assert "stop was there before this run: taken away" in capsys.readouterr().out
    assert left(200, restarted=True)  # asked for before torchrun or Slurm started it again, and not heard yet
    assert left(200, agent="node1") and not left(600, agent="node1")  # torchrun was there before its ranks


def test_age_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.3)
        assert 0.2 < age_seconds(process.pid) < age_seconds()
        process.communicate(b"\n")
    assert age_seconds(process.pid) == 0.0
