"""Checkpoints: whole or the one before, nothing executed, and words for whatever a file turns out to be."""

from __future__ import annotations

import copy
import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from common import checkpoint
from common.access.storage import Storage
from common.errors import UserError
from common.optim import build_optimizer
from common.plan import Plan
from common.running.resume import take_over
from common.running.state import State
from common.shards import ShardIndex
from tests.helpers import ROOT, write_shards

METER = {"value": 1.0, "total": 2.0, "weight": 2.0}
PLACE = {"epoch": 0, "step": 9, "global_step": 9, "position": 90}
STATE = {"model": {}, "optimizer": {}, "scaler": {}, "epoch_done": False, "best_top1": -1.0, "progress": PLACE,
         "rng": torch.get_rng_state(), "meters": {"loss": METER, "top1": METER}, "config": {},
         "plan": {"seed": 1, "epoch_samples": 90}}


def state(value: float) -> dict:
    return {**STATE, "model": {"weight": torch.full((3000,), value)}}


def value_of(path: Path) -> float:
    return float(checkpoint.load(path)["model"]["weight"][0])


def test_the_one_before_is_kept_and_a_plain_load_reads_it(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        checkpoint.save(tmp_path / "last.pt", state(value))
    checkpoint.save(tmp_path / "best.pt", state(9))
    checkpoint.save(tmp_path / "best.pt", state(10))
    assert value_of(tmp_path / "last.pt") == 3
    assert value_of(tmp_path / "last.prev.pt") == 2
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.prev.pt", "last.pt"]
    assert torch.load(tmp_path / "best.pt", weights_only=True)["model"]["weight"].tolist() == [10.0] * 3000


def test_what_a_killed_save_leaves_is_removed_and_not_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "last.pt", state(1))
    (tmp_path / "last.pt.saving").write_bytes(b"half")
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path) == ["last.pt"]
    os.replace(tmp_path / "last.pt", tmp_path / "last.prev.pt")  # killed between the two renames
    found = checkpoint.newest(tmp_path, set_aside=True)
    assert found is not None and found[0].name == "last.prev.pt"


@pytest.mark.parametrize("damage", ["empty", "half", "end", "bit"])
def test_a_damaged_last_gives_way_to_the_one_before(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture) -> None:
    for value in (1, 2):
        checkpoint.save(tmp_path / "last.pt", state(value))
    whole = (tmp_path / "last.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    bad = {"empty": b"", "half": whole[: len(whole) // 2], "end": whole[:-9], "bit": bytes(flipped)}
    (tmp_path / "last.pt").write_bytes(bad[damage])
    found = checkpoint.newest(tmp_path, set_aside=True)
    assert found is not None and found[0].name == "last.prev.pt" and found[1]["model"]["weight"][0] == 1
    printed = capsys.readouterr().out
    assert printed.startswith("warning: the checkpoint is damaged") and printed.count("\n") == 1
    assert str(tmp_path / "last.pt") in printed and "going on from last.prev.pt" in printed
    checkpoint.save(tmp_path / "last.pt", state(3))  # the damaged one does not push out the good one
    assert value_of(tmp_path / "last.prev.pt") == 1 and value_of(tmp_path / "last.pt") == 3


def test_two_damaged_ones_are_an_error_and_none_is_a_start(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for value in (1, 2):
        checkpoint.save(tmp_path / "last.pt", state(value))
    for name in ("last.pt", "last.prev.pt"):
        (tmp_path / name).write_bytes(b"PK\3\4 torn")
    with pytest.raises(UserError, match="last.pt.*last.prev.pt.*remove them to start anew"):
        checkpoint.newest(tmp_path)


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.canary),))


@pytest.mark.parametrize("format", ["zip", "old", "pickle"])
def test_a_bomb_is_refused_and_does_not_go_off(tmp_path: Path, format: str) -> None:
    path, canary = tmp_path / "last.pt", tmp_path / "canary"
    bomb = {**state(1), "extra": Bomb(canary)}
    if format == "pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=2))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=format == "zip")
    with pytest.raises(UserError, match="more than tensors and plain containers, and is not loaded"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="no checkpoint can be loaded"):
        checkpoint.newest(tmp_path)
    assert not canary.exists()


def test_files_that_are_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": {}, "optimizer": {}}, path)
    with pytest.raises(UserError, match="it has no scaler, progress, .*plan; .*model.pt; start .* with --weights FILE"):
        checkpoint.load_for_resume(path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(UserError, match="not a checkpoint but a Tensor"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "nothing.pt")
    with pytest.raises(UserError, match=f"a folder and not a checkpoint; .*with --output {tmp_path} --resume auto"):
        checkpoint.load(tmp_path)
    for text, reason in (("", "it is empty"), ("epoch 1\n", "it is no file of torch.save")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"damaged .{reason}.; .*model.pt"):
            checkpoint.load(path)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UserError, match="a named pipe, not a file"):  # which would be waited for
        checkpoint.load(tmp_path / "pipe.pt")


def test_a_file_that_cannot_be_read_is_told_with_the_systems_words(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "last.pt").touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match="the checkpoint cannot be read .Permission denied.; .*last.pt; mend that"):
        checkpoint.load(tmp_path / "last.pt")


@pytest.mark.parametrize("name, value, words", [
    ("plan", {}, "the seed of its plan is None"), ("plan", {"seed": "x"}, "the seed of its plan is x"),
    ("plan", {"seed": 1}, "the epoch_samples of its plan is None"), ("plan", None, "its plan is a NoneType and no"),
    ("plan", {"seed": torch.zeros(2)}, "the seed of its plan is a Tensor"), ("config", None, "its config is a None"),
    ("rng", [], "its rng is a list"),
    ("meters", {}, "loss of its meters is None"), ("meters", {"loss": METER, "top1": {"value": 1}}, "top1 of its"),
    ("best_top1", "x", "its best_top1 is a str and not a float"), ("epoch_done", 1, "its epoch_done is a int"),
    ("progress", [], "its progress is a list"), ("progress", PLACE | {"more": 1}, "its progress is .*'more': 1"),
    ("progress", PLACE | {"position": -1}, "its progress is .*'position': -1"),
    ("progress", PLACE | {"epoch": "x"}, "its progress is .*'epoch': 'x'"),
    ("progress", PLACE | {"position": 91}, "its progress is at position 91 of an epoch of 90 samples")])
def test_contents_that_no_run_has_left_name_the_field(tmp_path: Path, name: str, value: object, words: str) -> None:
    torch.save({**STATE, name: value}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=f"cannot go on from this file, .*{words}.*; .*last.pt; take another"):
        checkpoint.load_for_resume(tmp_path / "last.pt")
    torch.save(STATE, tmp_path / "last.pt")
    assert checkpoint.load_for_resume(tmp_path / "last.pt").keys() == STATE.keys()


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(1), tmp_path / "last.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert value_of(tmp_path / "last.pt") == 1


def test_a_full_disk_is_one_line_and_leaves_the_old_one(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import resource, sys, torch
        from pathlib import Path
        from common import checkpoint
        from common.errors import UserError
        path = Path(sys.argv[1])
        checkpoint.save(path, {"model": torch.zeros(10)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.save(path, {"model": torch.zeros(1_000_000)})
        except UserError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "last.pt")], cwd=ROOT, capture_output=True,
                          text=True, timeout=100)
    assert done.stdout.startswith("the checkpoint cannot be written (File too large)"), done.stderr
    assert done.stdout.count("\n") == 1 and "the one before is kept" in done.stdout
    assert os.listdir(tmp_path) == ["last.pt"]
    assert len(checkpoint.load(tmp_path / "last.pt")["model"]) == 10
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_no_permission_is_told_with_the_systems_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "last.pt", state(1))

    def refuse(*names: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint.os, "fsync", refuse)
    with pytest.raises(UserError, match="cannot be written .Permission denied.; .*last.pt; the one before is kept"):
        checkpoint.save(tmp_path / "last.pt", state(2))
    assert os.listdir(tmp_path) == ["last.pt"] and value_of(tmp_path / "last.pt") == 1


def test_weights_that_are_no_numbers_are_not_saved() -> None:
    module = torch.nn.Linear(2, 2)
    checkpoint.check_finite(module)
    with torch.no_grad():
        module.bias[1] = float("inf")
    with pytest.raises(UserError, match="not finite .bias.; nothing is saved"):
        checkpoint.check_finite(module)


def test_no_prefix_of_any_wrapper_is_saved() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert list(checkpoint.bare_state(torch.nn.DataParallel(module))) == ["0.weight", "0.bias"]


def make_plan(tmp_path: Path, **changes: object) -> Plan:
    index = ShardIndex.open([str(tmp_path / "shards")])
    values: dict = {"sampling": "exact", "mix": "none", "seed": 1, "shuffle": 5, "epoch_samples": None, "batch_size": 2,
                    "world_size": 2, "num_workers": 2, "num_epochs": 3, "max_steps": None}
    return Plan.make(index, **{**values, **changes})


def test_a_plan_that_must_not_differ_names_field_and_both_values(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", (10, 10, 10))
    for changes, name, was, now in (({"seed": 2}, "seed", 1, 2), ({"shuffle": 0}, "shuffle", 5, 0),
                                    ({"sampling": "split"}, "sampling", "exact", "split")):
        saved = make_plan(tmp_path).as_dict()
        with pytest.raises(UserError, match=f"had {name} {was}, this one has {now}; --resume"):
            make_plan(tmp_path, **changes).check_resumed(saved)
    for changes in ({"world_size": 3}, {"num_workers": 0}, {"batch_size": 1}, {"num_epochs": 9}, {"max_steps": 5}):
        make_plan(tmp_path, **changes).check_resumed(make_plan(tmp_path).as_dict())
    for sampling in ("split", "resampled"):
        saved = make_plan(tmp_path, sampling=sampling).as_dict()
        make_plan(tmp_path, sampling=sampling, num_epochs=9).check_resumed(saved)
        for name, was, now in (("world_size", 2, 3), ("num_workers", 2, 1), ("batch_size", 2, 3),
                               ("epoch_samples", 30, 20), ("mix", "none", "queue")):
            with pytest.raises(UserError, match=f"had {name} {was}, this one has {now}; --resume"):
                make_plan(tmp_path, sampling=sampling, **{name: now}).check_resumed(saved)
    saved = make_plan(tmp_path).as_dict()
    write_shards(tmp_path / "shards", (10, 10, 11))
    with pytest.raises(UserError, match="had num_samples 30, this one has 31"):
        make_plan(tmp_path).check_resumed(saved)


def test_other_data_under_the_same_names_and_numbers_is_refused(tmp_path: Path) -> None:
    """Shards packed anew, or classes renamed: positions and labels of the old run would mean other images."""
    folder = write_shards(tmp_path / "shards", (10, 10))
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "classes": ["cat", "dog"]}))
    saved = make_plan(tmp_path).as_dict()
    make_plan(tmp_path).check_resumed(saved)
    (folder / "info.json").write_text(json.dumps({"num_classes": 2, "classes": ["cat", "wolf"]}))
    with pytest.raises(UserError, match="had class 1 dog, this one has wolf; --resume"):
        make_plan(tmp_path).check_resumed(saved)
    (folder / "info.json").write_text(json.dumps({"num_classes": 2}))  # nothing is said of names
    make_plan(tmp_path).check_resumed(saved)
    one, two = sorted(folder.glob("*.tar"))
    with open(two, "ab") as file:
        file.write(bytes(10240))
    with pytest.raises(UserError, match="other shards under the same names: .* had bytes_digest"):
        make_plan(tmp_path).check_resumed(saved)
    storage = Storage(str(tmp_path / "cache"), allow_pipe=True)
    assert ShardIndex.open([f"pipe:cat {one}"], storage=storage).bytes_digest is None


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", (10, 10, 10))
    plan, state = make_plan(tmp_path), State()
    state.loss.update(0.1, 3)
    state.top1.update(30.0, 7)
    state.best_top1, state.epoch_done = 12.5, True
    torch.save({**state.as_dict(), "plan": plan.as_dict()}, tmp_path / "state.pt")
    again = State.from_checkpoint(checkpoint.load(tmp_path / "state.pt"), plan)
    assert again.as_dict() == state.as_dict() and again.loss.mean == state.loss.mean and again.top1.mean == 30.0


CONFIG = {"arch": "tiny", "optimizer": "adam", "lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.99), "n_epochs": 2}


def taken_over(shape: tuple[int, ...] | None = None, **changes: object) -> tuple[list[str], torch.optim.Optimizer]:
    """Save a step of Adam with CONFIG, go on with `changes` to it."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.9, 0.99))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {},
             "rng": torch.get_rng_state(), "config": CONFIG}
    if shape:
        saved["optimizer"]["state"][0]["exp_avg"] = torch.zeros(shape)
    other = torch.nn.Linear(2, 2)
    new = torch.optim.Adam(other.parameters(), lr=0.1, betas=(0.5, 0.5), weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled="amp" in changes)
    notes = list(take_over(saved, {**CONFIG, **changes}, other, new, scaler))
    assert torch.equal(other.weight, module.weight)
    assert torch.equal(new.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    return notes, new


def test_flags_of_the_new_start_hold_and_are_said() -> None:
    notes, optimizer = taken_over(lr=0.01, betas=(0.5, 0.5))
    assert notes == ["resumed with other flags: lr was 0.1, is 0.01; betas was 0.9 0.99, is 0.5 0.5"]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.5) and optimizer.param_groups[0]["weight_decay"] == 0.5
    assert taken_over()[0] == []
    assert taken_over(amp="fp16")[0] == []  # a scaler begins anew where there was none


@pytest.mark.parametrize("name, value", [("arch", "resnet18"), ("optimizer", "adamw")])
def test_another_model_or_optimiser_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"had {name} {CONFIG[name]}, this one has {value}; --{name}"):
        taken_over(**{name: value})


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("before, after", [(torch.contiguous_format, torch.channels_last),
                                           (torch.channels_last, torch.contiguous_format)])
def test_a_resume_with_another_memory_format_goes_on_with_the_same_state(
        name: str, before: torch.memory_format, after: torch.memory_format) -> None:
    """Fused kernels walk through memory: moments laid out otherwise than their weights would go to other weights."""
    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        module(torch.arange(75.0).view(1, 3, 5, 5).sin()).square().sum().backward()
        optimizer.step()
        return module.weight.detach().clone()

    torch.manual_seed(0)
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=before)
    optimizer, scaler = build_optimizer(module, name, lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    step(module, optimizer)
    saved = copy.deepcopy({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {},
                           "rng": torch.get_rng_state(), "config": CONFIG})
    other = torch.nn.Conv2d(3, 4, 3).to(memory_format=after)
    new = build_optimizer(other, name, lr=0.1)
    list(take_over(saved, CONFIG, other, new, scaler))
    torch.testing.assert_close(step(other, new), step(module, optimizer))


def test_an_optimiser_of_other_shapes_is_refused() -> None:
    with pytest.raises(UserError, match=r"another model .* .exp_avg of the optimiser is .3,. for weights .2, 2"):
        taken_over(shape=(3,))
