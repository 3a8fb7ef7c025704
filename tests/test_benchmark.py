"""The benchmark's command line on tiny shards, and its arithmetic. Times are never judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common import benchmark
from common.benchmarks.loader import Input, shares, what_limits
from common.benchmarks.stages import STAGES, Clock, stage_seconds
from common.benchmarks.step import verdict_of
from common.sampling import EpochOrder, deal
from common.transforms import ImageTransform
from tests.benchmarks import run as claims
from tests.helpers import ROOT, jpeg, write_shards

SMALL = ("-b", "4", "--images", "12", "--image_size", "32", "--device", "cpu", "--json")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("benchmark"))


def last_line(capsys: pytest.CaptureFixture) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_command_as_the_readme_has_it(shards: Path) -> None:
    line = [sys.executable, "-m", "common.benchmark", "-s", str(shards), "-w", "1", "2", *SMALL]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert set(found["per_workers"]) == {"1", "2"}
    assert (
        found["images_per_second"]
        == max(found["per_workers"].values())
        == found["per_workers"][str(found["num_workers"])]
        > 0
    )
    assert set(found["shares"]) == {*STAGES, "wait"} and sum(found["shares"].values()) == pytest.approx(1)
    assert found["limit"].startswith("limit: ") and found["limit"] in result.stdout


@pytest.mark.parametrize("sampling, mix", [("split", "pooled"), ("resampled", "queue")])
def test_streams_and_mixes(shards: Path, sampling: str, mix: str, capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["-s", str(shards), "-w", "2", "--sampling", sampling, "--mix", mix, "--trace", *SMALL]) == 0
    assert last_line(capsys)["images_per_second"] > 0


def test_step(shards: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["-s", str(shards), "-w", "1", "--step", "--arch", "tiny", "--num-steps", "3", *SMALL]
    assert benchmark.main(arguments) == 0
    found = last_line(capsys)
    assert (
        found["synthetic_images_per_second"] > 0
        and found["loader_images_per_second"] > 0
        and 0 <= found["data_wait"] <= 1
    )


def test_stages_are_those_of_the_loader(shards: Path) -> None:
    data = Input.open([str(shards)], batch_size=4, image_size=32)
    before = ImageTransform.prepare, ImageTransform.finish
    seconds = stage_seconds(data.loader, ImageTransform(32, skip_rows=True), 8, torch.device("cpu"))
    assert set(seconds) == set(STAGES) and all(value > 0 for value in seconds.values())
    assert (ImageTransform.prepare, ImageTransform.finish) == before


def test_clock_counts_an_inner_stage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 5.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    clock = Clock()
    inner = clock.timed("decode", lambda: None)
    clock.timed("collate", inner)()
    clock.timed("read", lambda: None)()
    assert clock.seconds == {"decode": 3.0, "collate": 7.0, "read": 1.0}


def test_shares_and_what_limits() -> None:
    seconds = {"read": 10e-6, "decode": 600e-6, "crop+resize": 200e-6, "collate": 90e-6, "transfer": 0.0}
    share = shares(seconds, num_workers=2, rate=2000)  # a worker has 1000 µs an image
    assert share == pytest.approx(
        {"read": 0.01, "decode": 0.6, "crop+resize": 0.2, "collate": 0.09, "transfer": 0, "wait": 0.1}
    )
    assert "-w up to 8" in what_limits({1: 1000, 2: 2000}, share, cores=8)
    assert "decode takes 60%" in what_limits({1: 1000, 2: 2000}, share, cores=2)
    waiting = shares(seconds, num_workers=8, rate=2000)
    assert waiting["wait"] == pytest.approx(0.775)
    assert "wait for one of 2 cores" in what_limits({2: 1900, 8: 2000}, waiting, cores=2)


def test_verdict_on_a_step() -> None:
    assert "does not wait" in verdict_of(synthetic=100, loader=500, real=99, wait=0.01)
    assert "starves" in verdict_of(synthetic=1000, loader=500, real=490, wait=0.5)
    assert "same cores" in verdict_of(synthetic=400, loader=500, real=250, wait=0.4)


def test_plan_shows_the_samples_of_one_workers_batch(capsys: pytest.CaptureFixture) -> None:
    arguments = [
        "--plan",
        "--shards",
        "50",
        "--samples_per_shard",
        "20",
        "--ranks",
        "3",
        "--workers",
        "4",
        "-b",
        "8",
        "--shuffle",
        "100",
        "--seed",
        "5",
        "--rank",
        "1",
        "--worker",
        "2",
        "--epoch",
        "1",
        "--step",
        "6",
        "--json",
    ]
    assert benchmark.main(arguments) == 0
    found = last_line(capsys)
    # 42 steps per epoch (1000 / 24): the first step from 42 + 6 on that is 2 modulo 4 is 50, step 8 of its epoch.
    start = 8 * 24 + deal(24, 3)[1]
    assert (found["global_step"], found["step"], found["positions"]) == (50, 8, [start, start + 8])
    order = EpochOrder(np.full(50, 20), window=100, seed=5, epoch=1)
    assert found["samples"] == order.locate(start, start + 8).tolist()
    assert 0 < found["plan_bytes"] < 1 << 20


def test_plan_of_a_million_shards_is_small(capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["--plan", "--shards", "1000000", "--ranks", "4096", "--shuffle", "0", "--json"]) == 0
    assert last_line(capsys)["plan_bytes"] < 64e6


@pytest.mark.parametrize(
    "place", [("--rank", "3"), ("--worker", "4"), ("--step", "42"), ("--step", "41", "--worker", "3")]
)
def test_plan_says_where_there_is_no_such_batch(place: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    assert (
        benchmark.main(
            [
                "--plan",
                "--shards",
                "50",
                "--samples_per_shard",
                "20",
                "--ranks",
                "3",
                "--workers",
                "4",
                "-b",
                "8",
                *place,
            ]
        )
        == 1
    )
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments", [(), ("-s", "x", "--mix", "pooled"), ("-s", "x", "-w", "0"), ("-s", "x", "--images", "0")]
)
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as leaving:
        benchmark.main(arguments)
    assert leaving.value.code == 2


def test_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["-s", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_claims_are_held_against_ratios_within_the_rounds(
        shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Contenders of which one gets slower with the machine, one is not installed, and make_shards and tar for real."""
    answers = {"ours": [100.0, 50.0, 25.0], "ours, trace": [99.0, 49.0, 26.0]}

    def measure(command: list[str]) -> float | None:
        if command[0] == "none":
            return None
        return answers["ours, trace" if "--trace" in command else "ours"].pop(0)

    monkeypatch.setattr(claims, "measure", measure)
    monkeypatch.setattr(claims, "COPIED_BYTES", 1)
    for number in range(3):
        image = tmp_path / "images" / "cat" / f"{number}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(jpeg(0, number))
    monkeypatch.setattr(sys, "argv", ["run.py", str(shards), "--images", str(tmp_path / "images"), "--rounds", "3",
                                      "--peers-python", "none", "--only", "ours", "ours, trace", "dali"])
    claims.main()
    lines = capsys.readouterr().out.splitlines()
    assert "ours, trace / ours: 0.990 (0.98 to 1.04), claimed 0.98: kept" in lines
    assert sum(line.startswith("make_shards / tar: ") for line in lines) == 1
    medians = json.loads(lines[-1])
    assert set(medians) == {"ours", "ours, trace", "make_shards", "tar"} and medians["ours"] == 50


def test_a_contender_that_fails_is_left_out(capsys: pytest.CaptureFixture) -> None:
    assert claims.measure([sys.executable, "-c", "print('{\"images_per_second\": 7.5}')"]) == 7.5
    assert claims.measure([sys.executable, "-c", "raise ImportError('nvidia.dali')"]) is None
    assert "nvidia.dali" in capsys.readouterr().err
