"""Resuming in one process, in every sampling mode: the bits of a run that never stopped, and nothing read in vain."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import train_dp
import train_single
from common import batch_dataset, checkpoint, dataset
from common.config import TrainConfig
from common.distributed import World
from common.errors import UserError
from common.indexing import reader
from tests.helpers import rows, run, write_shards
from tests.kill_runs import differences, effective, same

DEVICE = torch.device("cpu")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single")
    write_shards(path / "shards", (9, 4, 7, 8))
    write_shards(path / "val", (5, 6))
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of sums depends on their number, and torchrun's ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def command_line(folder: Path, output: str, *flags: object) -> list[str]:
    """The flags of a run; later ones win."""
    data = ("-s", folder / "shards", "--val_path", folder / "val", "--output", folder / output)
    line = [*data, "--arch", "tiny", "--image_size", 32, "-b", 4, "--n_epochs", 2, "--seed", 3, "-lr", 1e-3,
            "--trace", "save", *flags]
    return [str(part) for part in line]


def train(folder: Path, output: str, *flags: object, script: ModuleType = train_single) -> Path:
    """Call a script's own function, as its command line would."""
    config = TrainConfig.from_command_line("", command_line(folder, output, *flags))
    script.train(config, World(0, 1, 0, DEVICE), [DEVICE])
    return folder / output


MODES = {
    "exact": ("-w", 2),
    "no workers": ("-w", 0),
    "split": ("--sampling", "split", "-w", 2),
    "resampled": ("--sampling", "resampled", "-w", 3),
    "pooled": ("--sampling", "split", "--mix", "pooled", "-w", 2),
    "shuffle": ("--sampling", "resampled", "--mix", "shuffle", "-w", 3),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_the_one_never_stopped(folder: Path, mode: str) -> None:
    """Stopped in the first epoch, at its end, and in the second, with a small buffer so that shuffling matters."""
    flags = (*MODES[mode], "--shuffle", 5)
    whole = train(folder, f"{mode} whole", *flags)
    for max_steps in (2, 7, 10, 14):
        parts = train(folder, f"{mode} parts", *flags, "--max_steps", max_steps, "--resume", "auto")
    assert json.loads((parts / "status.json").read_text())["attempt"] == 3
    # A run that ends at --max_steps in mid-epoch is validated there, and that may be its best.
    assert [found for found in differences(parts, whole)
            if found not in ("metrics", "last.pt: best_top1") and not found.startswith("best.pt")] == []
    for output in (parts, whole):
        best = max(row["top1"] for row in rows(output / "metrics.jsonl") if row["kind"] == "val")
        saved = [torch.load(output / name, weights_only=True)["best_top1"] for name in ("best.pt", "last.pt")]
        assert saved == [best, best], output


def test_where_max_steps_ends_a_run_in_mid_epoch_the_best_is_kept(folder: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any of its three saves, and started again: the same files. Then nothing more comes of a start."""
    flags = ("-w", 0, "--max_steps", 3)
    whole, save, names = train(folder, "short", *flags), checkpoint.save, []
    assert torch.load(whole / "best.pt", weights_only=True)["progress"]["step"] == 3

    def killed(path: Path, state: dict) -> None:
        names.append(path.name)
        if names.count("killed") < 3 and len(names) in (1, 4, 7):
            names.append("killed")
            raise KeyboardInterrupt
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train(folder, "short killed", *flags, "--resume", "auto")
    for _ in range(2):
        parts = train(folder, "short killed", *flags, "--resume", "auto")
        assert list(differences(parts, whole)) == []
    assert names == ["last.pt", "killed", "last.pt", "best.pt", "killed", "best.pt", "last.pt", "killed", "best.pt",
                     "last.pt"]


def test_a_stop_before_validation_resumes_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = train_single.stop
    monkeypatch.setattr(stop, "requested", False)
    step = train_single.Stepper.train

    def stop_in_last(self: train_single.Stepper, batch: dataset.Step) -> object:  # type: ignore[name-defined]
        stop.requested = stop.requested or batch.step.last and batch.step.epoch == 0
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(train_single.Stepper, "train", stop_in_last)
        output = train(folder, "stopped")
    status = json.loads((output / "status.json").read_text())
    assert status["state"] == "stopped" and torch.load(output / "last.pt", weights_only=True)["epoch_done"]
    stop.requested = False
    train(folder, "stopped", "--resume", "auto")
    assert list(differences(output, train(folder, "never stopped"))) == []


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """Count the calls of a method."""
    calls, method = [0], getattr(owner, name)

    def call(*arguments: object) -> object:
        calls[0] += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_exact_reads_and_streams_decode_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, owner, name in (("exact", reader.ShardReader, "read"),
                              ("resampled", batch_dataset.BatchDataset, "_fill")):
        flags = ("--sampling", mode, "-w", 0)
        train(folder, f"counted {mode}", *flags, "--max_steps", 6)
        with monkeypatch.context() as patch:
            calls = counted(patch, owner, name)
            patch.setattr(train_single, "make_validation", lambda *arguments: None)
            train(folder, f"counted {mode}", *flags, "--max_steps", 7, "--resume", "auto")
        assert calls == [4 if mode == "exact" else 1], mode  # samples; batches


def refused(folder: Path, words: str) -> Callable[..., None]:
    """Go on from `first` with other flags, which is refused; the run stays as it was."""
    def go_on(*flags: object) -> None:
        before = (folder / "first" / "status.json").read_bytes()
        with pytest.raises(UserError, match=words):
            train(folder, "first", *flags)
        assert (folder / "first" / "status.json").read_bytes() == before
    return go_on


def test_what_must_match_and_what_may_differ(folder: Path, capsys: pytest.CaptureFixture) -> None:
    train(folder, "first", "--max_steps", 3)
    refused(folder, "already holds a run .*--resume auto")()
    refused(folder, "had seed 3, this one has 4; --resume")("--resume", "auto", "--seed", 4)
    refused(folder, "had shuffle 5000, this one has 0; --resume")("--resume", "auto", "--shuffle", 0)
    refused(folder, "had sampling exact, this one has split; --resume")("--resume", "auto", "--sampling", "split")
    write_shards(folder / "other", (9, 4, 7, 9))
    refused(folder, "had num_samples 28, this one has 29; --resume")("--resume", "auto", "-s", folder / "other")
    torch.save(torch.load(folder / "first" / "last.pt", weights_only=True)["model"], folder / "weights.pt")
    refused(folder, "it has no model, optimizer, .* with --weights FILE")("--resume", folder / "weights.pt")
    capsys.readouterr()
    train(folder, "elsewhere", "--resume", folder / "first" / "last.pt", "-b", 5, "-w", 1, "-lr", 1e-2, "--n_epochs", 3)
    printed = capsys.readouterr().out
    assert "resumed: epoch 0, step 3, 12 samples of the epoch done" in printed
    assert "resumed with other flags: lr was 0.001, is 0.01; n_epochs was 2, is 3; batch_size was 4, is 5" in printed
    assert torch.load(folder / "elsewhere" / "last.pt", weights_only=True)["progress"]["epoch"] == 3


def test_a_torchvision_model_loads_the_weights(folder: Path) -> None:
    import torchvision

    train(folder, "resnet", "--arch", "resnet18", "--max_steps", 1, "-w", 0)
    model = torchvision.models.resnet18(num_classes=2)
    model.load_state_dict(torch.load(folder / "resnet" / "last.pt", weights_only=True)["model"])


def test_all_three_scripts_go_on_from_each_other(folder: Path) -> None:
    """Nine ways in one run, a step each: the same samples, and weights as if one script had done it all."""
    for number, kind in enumerate("ssppddspds", start=1):
        flags = ("--max_steps", number, "--resume", "auto")
        if kind == "d":
            line = command_line(folder, "nine", *flags, "--sampling", "exact", "--device", "cpu")
            result = run("train_ddp.py", *line, ranks=1).check()
            assert f"{number - 1} steps since the start" in result.out
        else:
            train(folder, "nine", *flags, script={"s": train_single, "p": train_dp}[kind])
    parts, whole = folder / "nine", train(folder, "nine whole", "--max_steps", 10)
    saved, expected = (torch.load(path / "last.pt", weights_only=True) for path in (parts, whole))
    assert json.loads((parts / "status.json").read_text())["attempt"] == 9
    assert [name for name in ("progress", "model", "optimizer") if not same(saved[name], expected[name])] == []
    assert effective(parts) == effective(whole)


def test_a_disk_that_fills_during_a_save_stops_the_run_with_a_line(folder: Path, tmp_path: Path) -> None:
    """Three checkpoints fit (last, the one before, best), the temporary name of the next does not."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2700k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(UserError, match="cannot be written .No space left on device.; .*; the one before is kept"):
            train(folder, "disk/run", "--save_every", 3)
        found = checkpoint.newest(disk / "run")
        assert found is not None and found[0].name == "last.pt" and not list((disk / "run").glob("*.saving"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
