"""What the options of a run do: synthetic data, profiles, precision, determinism, and that each reaches the step."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F
from torchvision.models import resnet18

from common.assembly import train_loader
from common.config import TrainConfig
from common.distributed import World, single_process
from common.dummy import dummy_index
from common.errors import UsageError, UserError
from common.evaluation import Validation
from common.fields import Fields
from common.launching.device_settings import make_deterministic, set_up_device
from common.loader import Loader
from common.model import build_model, normalize
from common.plan import Plan
from common.sampling import Progress
from common.transforms import ImageTransform
from tests.helpers import TINY, command, descendants, rows, run, trace, write_shards
from train_single import train

CPU = torch.device("cpu")
DUMMY: dict[str, Any] = {"dummy": True, "num_workers": 0, "image_size": 32, "device": "cpu", "seed": 3}


def train_here(output: Path, **flags: Any) -> dict[str, Any]:
    """A run in this process; returns its last checkpoint."""
    with single_process(CPU) as world:
        train(TrainConfig(output=str(output), **flags), world, [CPU])
    return torch.load(output / "last.pt", weights_only=True)


def dummy_loader(num_samples: int, batch_size: int, ranks: int = 1, rank: int = 0, workers: int = 0) -> Loader:
    """The loader of a run with --dummy."""
    index = dummy_index(num_samples)
    plan = Plan.make(index, sampling="exact", mix="none", seed=3, shuffle=5000, epoch_samples=num_samples, num_epochs=2,
                     batch_size=batch_size, world_size=ranks, num_workers=workers, max_steps=None)
    return train_loader(plan, index, rank, Progress(), Fields(), ImageTransform(32))


def test_synthetic_samples_are_fixed_by_seed_epoch_and_position() -> None:
    def samples(ranks: int, workers: int) -> dict[tuple[int, str, int], tuple[bytes, int]]:
        found = {}
        for rank in range(ranks):
            for batch in dummy_loader(20, 6 // ranks, ranks, rank, workers):
                for i, place in enumerate(zip(batch.shard, batch.count, strict=True)):
                    found[batch.step.epoch, *place] = batch.image[i].numpy().tobytes(), int(batch.label[i])
        return found

    one = samples(1, 0)
    assert one == samples(2, 0) == samples(3, 2)
    assert len(one) == 40 and len({pixels for pixels, _ in one.values()}) == 40
    assert {label for _, label in one.values()} == set(range(10))
    values = np.frombuffer(b"".join(pixels for pixels, _ in one.values()), dtype=np.uint8)
    assert abs(values.mean() - 127.5) < 1 and abs(np.bincount(values, minlength=256).std()) < 40


def test_a_synthetic_epoch_of_any_size_costs_little_memory() -> None:
    assert dummy_index(2500).sizes.tolist() == [834, 833, 833] and dummy_index(1).sizes.tolist() == [1]
    large = dummy_index(10**9)
    assert large.num_samples == 10**9 and len(large.names) == 1000


@pytest.mark.slow
def test_dp_shows_what_each_replica_gets_of_synthetic_data(tmp_path: Path) -> None:
    """--dummy, --trace, --profile, --amp bf16 and --deterministic at once, with no shards anywhere."""
    result = run("train_dp.py", "-g", 0, 1, 2, "--dummy", "--epoch_samples", 42, *TINY, "-b", 14, "-w", 1,
                 "--n_epochs", 2, "--trace", "print", "save", "--profile", "--amp", "bf16", "--deterministic",
                 "--output", tmp_path / "run", cwd=tmp_path).check()
    assert result.out.count("cpu, rank 0 of 1, input size (14, 3, 32, 32)") == 6
    inside = re.findall(r"cpu replica (\d), rank 0 of 1, input size \((\d), 3, 32, 32\)", result.out)
    assert inside == [("0", "5"), ("1", "5"), ("2", "4")] * 6
    assert all(len(row["key"]) == 14 and set(row["shard"]) == {"dummy-0000"} for row in trace(tmp_path / "run")[0])
    assert run("common.trace", tmp_path / "run").check().out.splitlines()[-1].startswith("kept: every sample once")
    events = json.loads((tmp_path / "run" / "profile" / "rank00000.json").read_text())["traceEvents"]
    assert {"aten::convolution", "ProfilerStep#2"} <= {event.get("name") for event in events}
    board = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in board.Images("train/trace")] == [6]
    assert "start/first batch" in board.Tags()["images"]
    assert "profiler" not in result.err and "error" not in result.err.lower()


@pytest.mark.parametrize(("num_steps", "notes"), [
    (2, ["note: no profile: it begins with step 3 of a start; this had fewer"]), (3, [])])
def test_a_run_too_short_for_a_profile_says_so(tmp_path: Path, num_steps: int, notes: list[str]) -> None:
    done = run("train_single.py", "--dummy", "--epoch_samples", 2 * num_steps, *TINY, "-b", 2, "-w", 0, "--n_epochs", 1,
               "--profile", "--output", tmp_path / "run").check()
    assert [line for line in done.out.splitlines() if line.startswith("note: no profile")] == notes
    assert (tmp_path / "run" / "profile").exists() == (not notes)


@pytest.mark.slow
def test_two_ranks_draw_one_bar_and_profile_apart(tmp_path: Path) -> None:
    """On a terminal: totals of epochs and steps, from rank 0 alone, and nothing of it in stdout."""
    master, slave = pty.openpty()
    line = command("train_ddp.py", "--dummy", "--epoch_samples", 13, *TINY, "-b", 2, "-w", 0, "--n_epochs", 2,
                   "--profile", "--output", tmp_path / "run", ranks=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "60"}
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave, env=environment,
                               start_new_session=True, text=True)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while block := os.read(master, 65536):
            drawn += block
    try:
        out = process.communicate(timeout=60)[0]
    finally:
        for child in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
    os.close(master)
    assert process.returncode == 0, drawn.decode()
    bars = re.split(r"[\r\n]+", drawn.decode())
    assert any("4/4" in bar for bar in bars) and any("2/2" in bar for bar in bars)
    assert {total for bar in bars for total in re.findall(r"(?<![\d.])\d+/(\d+) ", bar)} == {"4", "2"}
    assert max(len(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", bar)) for bar in bars if "loss=" in bar) <= 80
    assert "\r" not in out
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [file.name for file in files] == ["rank00000.json", "rank00001.json"]
    for file in files:
        names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert any(str(name).startswith(("gloo:", "c10d::", "record_param_comms")) for name in names)


def test_smoothing_clipping_accumulation_decay_and_schedule_reach_the_step(tmp_path: Path) -> None:
    """Four steps of SGD against the same worked out by hand."""
    state = train_here(tmp_path / "run", **DUMMY, epoch_samples=24, batch_size=6, arch="tiny", n_epochs=1, lr=0.4,
                       optimizer="sgd", momentum=0.5, schedule="cosine", warmup_epochs=0.5, label_smoothing=0.1,
                       clip_grad=0.5, accum=3, weight_decay=0.1)
    module, _ = build_model("tiny", 10, "none", 3)
    parameters = dict(module.named_parameters())
    velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
    rates = [0.2, 0.4, 0.4, 0.2]  # half way up, up, then the cosine's first and middle of two
    for batch, rate in zip(dummy_loader(24, 6), rates, strict=False):
        loss = F.cross_entropy(module(normalize(batch.image)), batch.label, label_smoothing=0.1)
        slopes = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        norm = torch.stack([slope.square().sum() for slope in slopes.values()]).sum().sqrt()
        assert norm > 0.5  # it is clipped
        with torch.no_grad():
            for name, value in parameters.items():
                slope = slopes[name] * (0.5 / norm) + (0.1 * value if value.ndim > 1 else 0)
                velocity[name] = 0.5 * velocity[name] + slope
                value -= rate * velocity[name]
    for name, value in parameters.items():
        assert torch.allclose(state["model"][name], value, atol=2e-5), name


def test_a_torchvision_state_dict_is_fine_tuned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """1000 classes there, 10 here: the head starts anew and is said to, the rest is the file's, and learns."""
    torch.manual_seed(0)
    held = resnet18(num_classes=1000).state_dict()
    torch.save(held, tmp_path / "resnet18.pth")
    flags = {**DUMMY, "epoch_samples": 8, "batch_size": 4, "n_epochs": 1, "weights": str(tmp_path / "resnet18.pth")}
    still = train_here(tmp_path / "still", **flags, lr=0.0)["model"]
    words = f"the head (fc) starts anew: 1000 classes in {tmp_path / 'resnet18.pth'}, 10 here"
    assert words in capsys.readouterr().out
    assert all(torch.equal(still[name], value) for name, value in held.items()
               if not name.startswith("fc.") and "running" not in name and "num_batches" not in name)
    assert still["fc.weight"].shape == (10, 512)
    moved = train_here(tmp_path / "moved", **flags, lr=1e-3)["model"]
    assert not torch.equal(moved["conv1.weight"], held["conv1.weight"])


def test_bf16_computes_on_the_cpu_and_fp16_says_that_it_does_not(tmp_path: Path) -> None:
    flags = {**DUMMY, "arch": "tiny", "epoch_samples": 8, "batch_size": 4, "n_epochs": 1, "optimizer": "sgd", "lr": 0.1}
    full, half = (train_here(tmp_path / amp, **flags, amp=amp)["model"] for amp in ("none", "bf16"))
    differences = [(full[name] - half[name]).abs().max().item() for name in full]
    assert 0 < max(differences) < 0.1 and all(value.dtype == torch.float32 for value in half.values())
    with pytest.raises(UsageError, match="--amp fp16; use --amp bf16"):
        train_here(tmp_path / "fp16", **flags, amp="fp16")
    with pytest.raises(UsageError, match="--sync_bn; use torchrun and train_ddp.py on GPUs"):
        train_here(tmp_path / "sync", **flags, sync_bn=True)
    assert not (tmp_path / "fp16").exists() and not (tmp_path / "sync").exists()


@pytest.fixture
def restored() -> Iterator[None]:
    """torch's switches as they were."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_deterministic_turns_every_switch(restored: None) -> None:
    world = World(0, 1, 0, CPU)
    set_up_device(world, deterministic=False, amp="bf16", sync_bn=False)
    assert torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: float16, SyncBatchNorm and NCCL need one")
def test_cuda_paths(tmp_path: Path) -> None:
    """float16 with its scaler, SyncBatchNorm, channels-last and determinism, twice to the same bits."""
    states = []
    for name in ("a", "b"):
        run("train_ddp.py", "--dummy", "--epoch_samples", 64, "--image_size", 64, "-b", 8, "--n_epochs", 1,
            "--amp", "fp16", "--sync_bn", "--channels_last", "--deterministic", "--seed", 1, "--profile",
            "--output", tmp_path / name, ranks=min(torch.cuda.device_count(), 2), seconds=300).check()
        states.append(torch.load(tmp_path / name / "last.pt", weights_only=True))
    assert states[0]["scaler"]["scale"] > 1
    assert all(torch.equal(value, states[1]["model"][key]) for key, value in states[0]["model"].items())
    assert rows(tmp_path / "a" / "metrics.jsonl")[-1]["epoch"] == 0


@pytest.mark.parametrize("when", ["warm_up", "train"])
def test_what_has_no_deterministic_algorithm_is_told(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("some_backward_cuda does not have a deterministic implementation, but you set …")

    monkeypatch.setattr(f"common.step.Stepper.{when}", refuse)
    with pytest.raises(UserError, match="some_backward_cuda gives other bits.*--deterministic"):
        train_here(tmp_path / "run", **DUMMY, arch="tiny", epoch_samples=8, batch_size=4, n_epochs=1)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_a_machine_that_cannot_compile_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "no-compiler"),))
    words = r"^the model cannot be compiled \(.*\); --compile; install a C\+\+ compiler"
    with pytest.raises(UserError, match=words) as told:
        train_here(tmp_path / "run", **DUMMY, arch="tiny", epoch_samples=8, batch_size=4, n_epochs=1, compile=True)
    assert "\n" not in str(told.value)
    torch.compiler.reset()


@pytest.mark.parametrize(("classes", "val_classes", "words"), [
    (["a", "b"], ["a", "b", "c"], "3 classes, the model knows 2"),
    (["a", "b"], ["b", "a"], "class 0 is b .* and a in")])
def test_validation_labels_mean_what_they_mean_in_training(
        tmp_path: Path, classes: list[str], val_classes: list[str], words: str) -> None:
    for name, known in (("train", classes), ("val", val_classes)):
        write_shards(tmp_path / name, (4,), num_classes=len(known))
        (tmp_path / name / "info.json").write_text(json.dumps({"num_classes": len(known), "classes": known}))
    flags = {**DUMMY, "dummy": False, "arch": "tiny", "batch_size": 2, "n_epochs": 1}
    with pytest.raises(UserError, match=words):
        train_here(tmp_path / "run", **flags, shard_path=(str(tmp_path / "train"),), val_path=(str(tmp_path / "val"),))


def test_a_validation_set_may_lack_the_last_classes(tmp_path: Path) -> None:
    write_shards(tmp_path / "train", (6,), num_classes=3), write_shards(tmp_path / "val", (4,), num_classes=1)
    train_here(tmp_path / "run", **{**DUMMY, "dummy": False}, arch="tiny", batch_size=2, n_epochs=1,
               shard_path=(str(tmp_path / "train"),), val_path=(str(tmp_path / "val"),))
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["samples"] == 4
    narrow = Validation(lambda: iter(()), 1, num_classes=1, classes=("a",))
    assert narrow.matched(3, ("a", "b", "c")).num_classes == 3  # the model may answer with any of them
