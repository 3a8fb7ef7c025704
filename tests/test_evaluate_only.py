"""`--evaluate`: the same numbers as a run's own validation, each image once, in the order of the data, on any ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common.collate import Batch
from common.distributed import World
from common.errors import UserError
from common.evaluate_only import trained_weights
from common.evaluation import Validation
from common.predictions import Predictions
from common.sampling import Step
from tests.helpers import TINY, Result, jpeg, rows, run, write_shards
from tests.tars import write_tar

SIZES = (9, 1, 11)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards in train and val, and a run that has trained and validated on them."""
    folder = tmp_path_factory.mktemp("trained")
    write_shards(folder / "train", (8,)), write_shards(folder / "val", SIZES, num_classes=2)
    run("train_single.py", "-s", folder / "train", "--val_path", folder / "val", *TINY, "-b", 4, "-w", 0, "-lr", 0.01,
        "--n_epochs", 1, "--output", folder / "run").check()
    return folder


def evaluate(trained: Path, script: str, *arguments: object, ranks: int = 0) -> Result:
    return run(script, "--evaluate", "--val_path", trained / "val", *TINY, "-b", 4, *arguments, ranks=ranks)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.slow
def test_any_ranks_give_the_runs_own_numbers_and_a_line_per_image(trained: Path, tmp_path: Path) -> None:
    before, files = contents(trained / "run"), []
    own = rows(trained / "run" / "metrics.jsonl")[-1]
    last = trained / "run" / "last.pt"
    for number, (script, ranks, source) in enumerate((
            ("train_single.py", 0, ("--resume", "auto", "--output", trained / "run", "-w", 0)),
            ("train_ddp.py", 3, ("--resume", last, "-w", 2)),
            ("train_dp.py", 0, ("--weights", last, "-g", 0, 1, "-w", 1)))):
        files.append(tmp_path / f"{number}.jsonl")
        result = evaluate(trained, script, *source, "--predictions", files[-1], ranks=ranks).check()
        line = r"^validation loss (\S+), top1 (\S+) %, top5 (\S+) %, (\d+) samples; predictions: (\S+)$"
        said = re.findall(line, result.out, re.M)
        assert said == [(str(own["loss"]), str(own["top1"]), str(own["top5"]), "21", str(files[-1]))]
    lines = rows(files[0])
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert [(line["shard"], line["count"]) for line in lines] == [
        (f"test-{shard:04d}", count) for shard, size in enumerate(SIZES) for count in range(size)]
    assert [line["key"] for line in lines] == [f"{number:06d}" for number in range(21)]
    assert [line["label"] for line in lines] == [number % 2 for number in range(21)]
    assert 100 * sum(line["label"] == line["predicted"] for line in lines) / 21 == own["top1"]
    assert all(0.5 <= line["probability"] <= 1 for line in lines)
    assert contents(trained / "run") == before and sorted(path.name for path in tmp_path.iterdir()) == [
        "0.jsonl", "1.jsonl", "2.jsonl"]


@pytest.mark.slow
def test_mistakes_are_one_line(trained: Path, tmp_path: Path) -> None:
    model = torch.load(trained / "run" / "last.pt", weights_only=True)["model"]
    head = next(name for name in reversed(model) if name.endswith("weight"))
    model[head], model[head.replace("weight", "bias")] = torch.zeros(5, model[head].shape[1]), torch.zeros(5)
    torch.save(model, tmp_path / "five.pth")
    cases = ((("--weights", tmp_path / "five.pth"), "do not fit the model"),  # a new head would have learnt nothing
             (("--resume", trained / "run" / "last.pt", "--arch", "resnet18"), "last.pt; give the --arch"),
             (("--weights", trained / "run" / "last.pt", "--predictions", tmp_path / "no" / "p"), "--predictions"))
    for arguments, words in cases:
        result = evaluate(trained, "train_single.py", "-w", 0, *arguments).check(1)
        assert words in result.err and len(result.err.splitlines()) == 1, result.err
    nothing = Validation(lambda: iter(()), 0, 2)
    with pytest.raises(UserError, match="no checkpoint; --output"):
        trained_weights(alone(), nothing, "auto", str(tmp_path), "none")
    with pytest.raises(UserError, match="a folder and not a checkpoint; .*--resume auto"):
        trained_weights(alone(), nothing, str(tmp_path), None, "none")
    with pytest.raises(UserError, match="no such checkpoint; "):
        trained_weights(alone(), nothing, str(tmp_path / "no.pt"), None, "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["five.pth"]


def test_labels_mean_what_the_model_learnt(tmp_path: Path) -> None:
    """A checkpoint says what its classes are called: another order is refused, fewer classes are taken."""
    torch.save({"model": {}, "plan": {"num_classes": 3, "classes": ["a", "b", "c"]}}, tmp_path / "last.pt")
    file = str(tmp_path / "last.pt")
    fewer = Validation(lambda: iter(()), 0, 2, ("a", "b"))
    for resume, weights in ((file, "none"), ("none", file)):
        assert trained_weights(alone(), fewer, resume, None, weights)[1].num_classes == 3
        with pytest.raises(UserError, match="class 1 is c in the validation set and b in the training set"):
            trained_weights(alone(), Validation(lambda: iter(()), 0, 2, ("a", "c")), resume, None, weights)


def alone() -> World:
    return World(0, 1, 0, torch.device("cpu"))


def batch() -> Batch:
    image, label = torch.zeros(2, 3, 1, 1, dtype=torch.uint8), torch.tensor([1, 0])
    return Batch(image, label, Step(0, 0, 0, 0, 2), [0, 0], ["s", "s"], [0, 1], ["a", "b"])


def test_answers_that_are_no_numbers_and_ties(tmp_path: Path) -> None:
    file = Predictions(tmp_path / "p", alone())
    file.add(batch(), torch.tensor([[float("nan"), 1.0], [2.0, 2.0]]))
    file.add(None, None)
    file.finish()
    assert [(row["predicted"], row["probability"]) for row in rows(tmp_path / "p")] == [(None, None), (0, 0.5)]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").write_text("older")
    file = Predictions(tmp_path / "p", alone())
    assert file._file is not None
    file._file.close()
    file._file = open("/dev/full", "w")
    with pytest.raises(UserError, match="No space left.*--predictions"), file:
        file.add(batch(), torch.zeros(2, 2))
        file.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["p"] and (tmp_path / "p").read_text() == "older"


def test_a_validation_that_did_not_end_leaves_nothing(tmp_path: Path) -> None:
    with Predictions(tmp_path / "p", alone()) as file:
        file.add(batch(), torch.zeros(2, 2))
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file_for_predictions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory.*--predictions"):
        Predictions(tmp_path, alone())


@pytest.mark.slow
def test_bad_images_count_as_in_training(trained: Path, tmp_path: Path) -> None:
    """Two of rank 1's are broken: skipped, said and listed; too many at --max_errors 1, on both ranks, nothing left."""
    write_tar(tmp_path / "val" / "t.tar", [
        (f"{number:03d}.{name}", data) for number in range(20)
        for name, data in (("jpg", b"broken" if number in (4, 5) else jpeg(0, number)), ("cls", b"0"))])
    (tmp_path / "run").mkdir()
    arguments = ("--evaluate", "--val_path", tmp_path / "val", *TINY, "-b", 4, "-w", 1, "--weights",
                 trained / "run" / "last.pt", "--on_error", "skip", "--predictions", tmp_path / "run" / "p.jsonl")
    said = "2 samples: 2 not an image"
    result = run("train_ddp.py", *arguments, "--max_errors", 2, ranks=2).check()
    listed = tmp_path / "run" / "p.errors.jsonl"
    assert f"skipped {said}; {listed}" in result.out.splitlines() and ", 18 samples; predictions: " in result.out
    assert [(row["rank"], row["shard"], row["count"]) for row in rows(listed)] == [(1, "t", 4), (1, "t", 5)]
    assert [row["count"] for row in rows(tmp_path / "run" / "p.jsonl")] == [0, 1, 2, 3, *range(6, 20)]
    (tmp_path / "run" / "p.jsonl").unlink()
    result = run("train_ddp.py", *arguments, "--max_errors", 1, ranks=2).check(1)
    line, = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: more than --max_errors 1 samples could not be used, {said} (such as "), line
    assert f"; {listed}; python -m common.check_shards finds them all: mend" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["p.errors.jsonl"] and len(rows(listed)) == 2
    result = run("train_single.py", *arguments[:-4], "--on_error", "stop", *arguments[-2:]).check(1)
    assert "count 4" in result.err and not list((tmp_path / "run").iterdir())
