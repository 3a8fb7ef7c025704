"""The three scripts through the front door: real tars, real JPEGs, torchrun; what they print, leave and prove."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.sampling import EpochOrder
from tests.helpers import TINY, Result, global_batches, rows, run, trace, write_shards

SIZES = (10, 3, 7)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 10, 3 and 7 samples, as the articles make them."""
    return write_shards(tmp_path_factory.mktemp("shards"), SIZES)


def train(ranks: int, shards: Path, output: Path, *arguments: object) -> Result:
    """One run, by `train_single.py` or by `train_ddp.py` under torchrun."""
    script = "train_ddp.py" if ranks > 1 else "train_single.py"
    line = ("-s", shards, *TINY, "--output", output, "--trace", "save", *arguments)
    return run(script, *line, ranks=ranks if ranks > 1 else 0).check()


def audit(output: Path) -> dict:
    """What `python -m common.trace` says; it must say that the promise was kept."""
    return json.loads(run("common.trace", output, "--json").check().out)


@pytest.mark.slow
def test_any_world_makes_the_same_global_batches(shards: Path, tmp_path: Path) -> None:
    """1, 2 and 3 ranks × 0, 1 and 3 workers at a global batch of 6: the order that the seed and the epoch fix."""
    for ranks in (1, 2, 3):
        for workers in (0, 1, 3):
            output = tmp_path / f"{ranks}x{workers}"
            train(ranks, shards, output, "--sampling", "exact", "-b", 6 // ranks, "-w", workers, "--n_epochs", 2,
                  "--seed", 1)
            batches = global_batches(output)
            for epoch in range(2):
                places = EpochOrder(SIZES, 5000, 1, epoch).locate(0, 20).tolist()
                order = [(f"test-{shard:04d}", place) for shard, place in places]
                planned = [order[start : start + 6] for start in (0, 6, 12, 18)]
                assert [batches[epoch, step] for step in range(4)] == planned
            assert len(batches) == 8
    audit(tmp_path / "3x3")
    assert {len(lines) for lines in trace(tmp_path / "3x3").values()} == {8}
    assert [len(trace(tmp_path / "3x3")[rank][3]["key"]) for rank in range(3)] == [1, 1, 0]  # the short batch of 2


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["split", "resampled"])
def test_ranks_take_equal_steps_where_shards_do_not_divide(shards: Path, tmp_path: Path, sampling: str) -> None:
    for ranks, workers in ((1, 3), (2, 2), (3, 0), (3, 3)):
        output = tmp_path / f"{ranks}x{workers}"
        train(ranks, shards, output, "--sampling", sampling, "-b", 2, "-w", workers, "--n_epochs", 2)
        assert {len(lines) for lines in trace(output).values()} == {2 * (20 // (2 * ranks))}
        assert all(len(row["key"]) == 2 for lines in trace(output).values() for row in lines)
        report = audit(output)
        assert report["verdict"] == "kept"
        if sampling == "split":  # within an epoch a shard belongs to one rank
            uses = {(row["epoch"], shard, row["rank"])
                    for lines in trace(output).values() for row in lines for shard in row["shard"]}
            assert len(uses) == len({use[:2] for use in uses})


def test_split_without_shuffling_is_the_articles_order(shards: Path, tmp_path: Path) -> None:
    """Workers take turns, each reading its own shards front to back."""
    two = write_shards(tmp_path / "two", (14, 14))
    train(1, two, tmp_path / "run", "--sampling", "split", "--shuffle", -1, "-b", 7, "-w", 2, "--n_epochs", 1)
    lines = trace(tmp_path / "run")[0]
    assert [row["worker"][0] for row in lines] == [0, 1, 0, 1]
    assert [row["count"] for row in lines] == [list(range(7)), list(range(7)), list(range(7, 14)), list(range(7, 14))]
    assert [set(row["shard"]) for row in lines] == [{"test-0000"}, {"test-0001"}] * 2


def test_ddp_shows_three_shards_and_dp_cuts_5_5_4(shards: Path, tmp_path: Path) -> None:
    ddp = run("train_ddp.py", "-s", shards, *TINY, "--sampling", "split", "--shuffle", -1, "-b", 2, "-w", 0,
              "--n_epochs", 1, "--trace", "print", "save", "--output", tmp_path / "ddp", ranks=3).check()
    first = {rank: lines[0]["shard"] for rank, lines in trace(tmp_path / "ddp").items()}
    assert first == {rank: [f"test-{rank:04d}"] * 2 for rank in range(3)}
    for rank in range(3):  # blocks are whole: the header is followed by its own rows
        header = f"[batch] epoch 0 step 0, cpu, rank {rank} of 3, input size (2, 3, 32, 32)\n"
        label = (0, 10, 13)[rank] % 2  # write_shards counts labels through all shards
        assert ddp.out.split(header)[1].splitlines()[1].split() == ["0", "0", f"test-{rank:04d}", "0", str(label)]
    dp = run("train_dp.py", "-g", 0, 1, 2, "-s", shards, *TINY, "-b", 14, "-w", 0, "--n_epochs", 1,
             "--trace", "print", "save", "--output", tmp_path / "dp").check()
    inside = [line for line in dp.out.splitlines() if line.startswith("[forward] epoch 0 step 0")]
    sizes = [line.rpartition("input size ")[2] for line in inside]
    assert sizes == ["(5, 3, 32, 32)", "(5, 3, 32, 32)", "(4, 3, 32, 32)"]
    assert [f"cpu replica {number}" in line for number, line in enumerate(inside)] == [True] * 3
    assert [row["replica"] for row in trace(tmp_path / "dp")[0]] == [[0] * 5 + [1] * 5 + [2] * 4, [0, 0, 1, 1, 2, 2]]
    assert "[done] epoch 0 step 0, cpu" in dp.out


@pytest.mark.slow
def test_three_ranks_compute_what_one_would(tmp_path: Path) -> None:
    """17 samples, global batch 6, SGD at lr 0.1: weights within 1e-5, the short tail, DP and micro-batches included."""
    shards = write_shards(tmp_path / "shards", (10, 3, 4))
    common = ("-s", shards, *TINY, "--sampling", "exact", "--optimizer", "sgd", "-lr", 0.1, "--n_epochs", 2,
              "--seed", 3, "-w", 1)
    runs = [("train_single.py", 0, ("-b", 6)), ("train_ddp.py", 2, ("-b", 3)), ("train_ddp.py", 3, ("-b", 2)),
            ("train_ddp.py", 3, ("-b", 2, "--accum", 2)), ("train_single.py", 0, ("-b", 6, "--accum", 4)),
            ("train_dp.py", 0, ("-b", 6, "-g", 0, 1)), ("train_dp.py", 0, ("-b", 6, "-g", 0, 1, 2))]
    weights = []
    for number, (script, ranks, arguments) in enumerate(runs):
        run(script, *common, *arguments, "--output", tmp_path / str(number), ranks=ranks).check()
        weights.append(torch.load(tmp_path / str(number) / "last.pt", weights_only=True)["model"])
    start = torch.load(tmp_path / "0" / "last.pt", weights_only=True)
    assert start["progress"] == {"epoch": 2, "step": 0, "global_step": 6, "position": 0}
    for other in weights[1:]:
        assert max((weights[0][name] - other[name]).abs().max().item() for name in other) < 1e-5


@pytest.mark.slow
def test_validation_is_the_same_to_the_last_digit_in_any_world(tmp_path: Path) -> None:
    """21 images on 1 to 4 ranks and 0 to 4 workers, and 3 images on 4 ranks: each once, one number."""
    shards = write_shards(tmp_path / "train", (12,))
    val, few = write_shards(tmp_path / "val", (9, 1, 11)), write_shards(tmp_path / "few", (3,))
    frozen = ("--sampling", "exact", "-lr", 0, "--n_epochs", 1, "--seed", 5)
    results, small = [], []
    for ranks, workers in ((1, 0), (1, 2), (2, 1), (3, 4), (4, 0)):
        output = tmp_path / f"{ranks}x{workers}"
        train(ranks, shards, output, "--val_path", val, *frozen, "-b", 4, "-w", workers)
        last = rows(output / "metrics.jsonl")[-1]
        results.append({name: last[name] for name in ("loss", "top1", "top5", "samples")})
    assert results == [results[0]] * 5 and results[0]["samples"] == 21
    for ranks in (1, 4):
        output = tmp_path / f"few{ranks}"
        train(ranks, shards, output, "--val_path", few, *frozen, "-b", 2)
        small.append({**rows(output / "metrics.jsonl")[-1], "step": 0})
    assert small[0] == small[1] and small[0]["samples"] == 3


@pytest.mark.slow
def test_batch_norm_buffers_are_rank_0s(shards: Path, tmp_path: Path) -> None:
    """A model with BatchNorm, ranks with one sample and with none: it trains, and saves rank 0's statistics."""
    val = write_shards(tmp_path / "val", (5,))
    run("train_ddp.py", "-s", shards, "--val_path", val, "--arch", "shufflenet_v2_x0_5",
        "--image_size", 32, "--device", "cpu", "--sampling", "exact", "-b", 6, "-w", 0, "--n_epochs", 1,
        "--output", tmp_path / "run", ranks=3, seconds=180).check()
    state = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    counted = {int(value) for name, value in state["model"].items() if name.endswith("num_batches_tracked")}
    assert counted == {2}  # the warm-up that comes before the first step leaves no trace
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["samples"] == 5


def test_same_seed_same_trace_same_weights_and_a_run_explains_itself(shards: Path, tmp_path: Path) -> None:
    states = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        result = train(1, shards, tmp_path / name, "-b", 6, "-w", 2, "--n_epochs", 2, "--seed", seed)
        states.append((global_batches(tmp_path / name), torch.load(tmp_path / name / "last.pt", weights_only=True)))
    assert states[0][0] == states[1][0] != states[2][0]
    for name, value in states[0][1]["model"].items():
        assert torch.equal(value, states[1][1]["model"][name])
    assert not torch.equal(states[0][1]["model"]["head.weight"], states[2][1]["model"]["head.weight"])
    output = tmp_path / "c"
    assert json.loads((output / "status.json").read_text())["state"] == "complete"
    config = json.loads((output / "config.json").read_text())
    assert config["config"]["seed"] == 8
    assert (config["plan"]["steps_per_epoch"], config["plan"]["global_batch"]) == (4, 6)
    lines = rows(output / "metrics.jsonl")
    assert [(row["kind"], row["epoch"], row["step"]) for row in lines] == [("train", 0, 4), ("train", 1, 8)]
    assert "global batch 6 = 6 × 1 ranks, 4 steps per epoch" in result.out and "seed 8" in result.out
    assert "\r" not in result.out + result.err
    assert list(output.glob("events.out.tfevents.*"))


def test_augmentation_differs_between_epochs_but_not_between_worlds(shards: Path) -> None:
    """The pixels themselves: equal for a sample at a position, whoever decodes it; other crops in the next epoch."""
    from common.assembly import train_loader
    from common.fields import Fields
    from common.plan import Plan
    from common.sampling import Progress
    from common.shards import ShardIndex
    from common.transforms import ImageTransform

    index = ShardIndex.open([str(shards)])

    def pixels(ranks: int, workers: int) -> dict[tuple[int, str, int], bytes]:
        found = {}
        for rank in range(ranks):
            plan = Plan.make(index, sampling="exact", mix="none", seed=0, shuffle=5000, epoch_samples=None,
                             batch_size=6 // ranks, world_size=ranks, num_workers=workers, num_epochs=2, max_steps=None)
            torch.manual_seed(rank), np.random.seed(workers)  # global generators must not matter
            transform = ImageTransform(32, "crop")
            for batch in train_loader(plan, index, rank, Progress(), Fields(), transform):
                for row in range(len(batch)):
                    found[batch.step.epoch, batch.shard[row], batch.count[row]] = batch.image[row].numpy().tobytes()
        return found

    one = pixels(1, 0)
    assert len(one) == 40 and one == pixels(2, 0) == pixels(3, 2)
    assert len(set(one.values())) == 40


def test_mistakes_are_one_line(shards: Path, tmp_path: Path) -> None:
    """What, where, what to do; exit 1, or 2 for bad usage; no traceback."""
    missing = tmp_path / "nothing"
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("-s", missing), 1, "no such shard"),
        (("-s", tmp_path), 1, "no shards"),
        (("-s", shards, "--arch", "resnet19"), 1, "no such model"),
        (("-s", shards, "-b", 0), 2, "--batch_size"),
        (("-s", shards, "--val_path", shards), 2, "--val_path"),
        (("-s", shards, "--frobnicate"), 2, "--frobnicate"),
        (("-s", shards, "--sampling", "split", "-b", 21), 1, "no full batch"),
        (("-s", shards, "--weights", "DEFAULT", "--arch", "resnet18"), 1, "no weights"),
        (("-s", shards, "--device", "cuda"), 1, "no CUDA device"),
    ]
    if torch.cuda.is_available():
        cases = cases[:-2]
    for arguments, code, words in cases:
        result = run("train_single.py", *arguments, cwd=tmp_path, TORCH_HOME=str(tmp_path)).check(code)
        lines = result.err.strip().splitlines()
        assert lines[-1].startswith("error: ") and words in lines[-1], result.err
        assert "Traceback" not in result.err and len([line for line in lines if line.startswith("error: ")]) == 1


def test_ddp_alone_is_a_world_of_one_and_ranks_fail_as_one(shards: Path, tmp_path: Path) -> None:
    alone = run("train_ddp.py", "-s", shards, *TINY, "-b", 5, "-w", 0, "--n_epochs", 1,
                "--output", tmp_path / "alone", LOCAL_WORLD_SIZE="two").check()  # of somebody else's
    assert "no launcher: a world of one" in alone.out
    failed = run("train_ddp.py", "-s", tmp_path / "nothing", *TINY, ranks=2)
    assert failed.code == 1
    told = [line.partition(";")[0] for line in failed.err.splitlines() if line.startswith("error: ")]
    assert told == ["error: no such shard"]
    assert "train_ddp.py\", line" not in failed.err  # no traceback of ours
