"""The code blocks of README's "Where to change what" do what they say, put where it says, in runs of the script."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_single
from common import loop, sampling, trace
from common.config import TrainConfig
from common.distributed import World
from common.tracing import promise
from tests.helpers import ROOT, global_batches, jpeg, rows, write_shards
from tests.tars import write_tar

CPU = torch.device("cpu")
PAGE = (ROOT / "README.md").read_text().partition("## Where to change what")[2]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def recipe(name: str) -> Any:
    """What the block that defines `name` defines."""
    block, = [block for block in BLOCKS if re.search(rf"^(class|def) {name}\b", block, re.M)]
    assert len(block.splitlines()) <= 10
    values: dict[str, Any] = {}
    exec(compile(block, name, "exec"), values)
    return values[name]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    def run(*flags: object) -> Path:
        if not (tmp_path / "shards").exists():
            write_shards(tmp_path / "shards", (9, 4, 7))
            write_shards(tmp_path / "val", (5, 6))
        line = ["-s", tmp_path / "shards", "--val_path", tmp_path / "val", "--arch", "tiny", "--image_size", 32,
                "-b", 4, "-w", 0, "--n_epochs", 1, "--seed", 3, "--trace", "save", "--output", tmp_path / "run", *flags]
        config = TrainConfig.from_command_line("", list(map(str, line)))
        train_single.train(config, World(0, 1, 0, CPU), [CPU])
        return tmp_path / "run"
    return run


def test_all_blocks_are_tried() -> None:
    assert len(BLOCKS) == 5


def test_augmentation(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    jitter = recipe("Jitter")(32, "center")
    one, two, again = (torch.empty(3, 32, 32, dtype=torch.uint8) for _ in range(3))
    for key, out in ((1, one), (2, two), (1, again)):
        jitter(jpeg(0, 0), key, out)
    assert torch.equal(one, again) and not torch.equal(one, two)
    monkeypatch.setattr(train_single, "ImageTransform", recipe("Jitter"))
    train()


def test_model(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    net = recipe("Net")
    monkeypatch.setattr(train_single, "build_model", lambda arch, num_classes, *rest: (net(num_classes), []))
    saved = torch.load(train() / "best.pt", weights_only=True)["model"]
    assert saved["4.weight"].shape == (2, 128)
    net(2).load_state_dict(saved)


def test_sampling_order(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order, usual = recipe("Backwards"), sampling.EpochOrder((9, 4, 7), 5000, 3, 0).locate(0, 20).tolist()
    monkeypatch.setattr(sampling, "EpochOrder", order)
    monkeypatch.setattr(promise, "EpochOrder", order)
    output = train("--on_error", "stop")
    used = [sample for _, batch in sorted(global_batches(output).items()) for sample in batch]
    assert used == [(f"test-{shard:04d}", place) for shard, place in reversed(usual)]
    assert trace.main([str(output)]) == 0


def test_field(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ages = (3, 40, 17.5, 18, 70, 9, 30, 12)
    for folder in ("shards", "val"):
        write_tar(tmp_path / folder / "t.tar", [
            (f"{number}.{name}", data) for number, age in enumerate(ages)
            for name, data in (("jpg", jpeg(0, number)), ("json", b'{"label": 0}'), ("age.txt", str(age).encode()))])
    monkeypatch.setattr(train_single, "Fields", recipe("Adults"))
    row, = rows(train("--shuffle", -1, "-b", 8, "--label_field", "age.txt") / "trace" / "rank00000.jsonl")
    assert row["label"] == [int(age >= 18) for age in ages]


def test_metric(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    balanced, evaluate = recipe("balanced"), loop.evaluate
    assert balanced(torch.tensor([[3, 1, 0], [0, 2, 2], [0, 0, 0]])) == 62.5

    def evaluated(*arguments: Any) -> dict[str, Any] | None:
        result = evaluate(*arguments)
        return result and result | {"balanced": balanced(result["confusion"].counts)}

    monkeypatch.setattr(loop, "evaluate", evaluated)
    row = rows(train() / "metrics.jsonl")[-1]
    assert row["kind"] == "val" and 0 <= row["balanced"] <= 100
    assert f", balanced {row['balanced']:.4g} %, 11 samples" in capsys.readouterr().out
