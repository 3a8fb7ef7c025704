"""The flags: their list is frozen, their help tells the default, nonsense is refused with a line that names them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from common.config import RANGES, TrainConfig
from common.errors import UsageError

FLAGS = """
    shard_path val_path sampling shuffle mix epoch_samples image_field label_field image_size
    augment batch_size num_workers on_error max_errors cache_dir cache_size allow_pipe dummy arch
    weights n_epochs optimizer lr betas momentum weight_decay label_smoothing schedule warmup_epochs
    accum clip_grad max_steps amp channels_last compile sync_bn device gpu output resume save_every
    report_s report_growth trace seed deterministic evaluate predictions profile timeout
""".split()


def parse(*arguments: object, **defaults: Any) -> TrainConfig:
    return TrainConfig.from_command_line("a script", [str(argument) for argument in arguments], **defaults)


def test_the_list_of_flags_is_frozen() -> None:
    """Adding one is a decision: somebody has to want to turn it, and the README has to name it."""
    assert [field.name for field in dataclasses.fields(TrainConfig)] == FLAGS


def test_defaults_are_those_that_are_documented() -> None:
    config = parse()
    assert (config.batch_size, config.num_workers, config.n_epochs, config.lr) == (64, 2, 10, 1e-4)
    assert (config.shuffle, config.augment, config.mix, config.sampling) == (5000, "crop", "none", "exact")
    assert config.shard_path == ("./test_shards/",) and config.trace == () and config.gpu is None
    assert parse(sampling="resampled").sampling == "resampled"


def test_every_flag_has_a_help_with_its_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name}" in text
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"[{field.default}]" in text


def test_spellings(tmp_path: Path) -> None:
    config = parse("-s", "a", "b", "--val-path=c-d", "--n-epochs", 3, "-lr", "1e-3", "--betas", 0.8, 0.9, "-g", 2, 0,
                   "--trace", "print", "save", "--label-smoothing=0.1", "--channels-last", "-b", 8, "-w", 0)
    assert config.shard_path == ("a", "b") and config.val_path == ("c-d",) and config.n_epochs == 3
    assert config.lr == 1e-3
    assert config.betas == (0.8, 0.9) and config.gpu == (2, 0) and config.trace == ("print", "save")
    assert config.label_smoothing == 0.1 and config.channels_last and (config.batch_size, config.num_workers) == (8, 0)


@pytest.mark.parametrize(("arguments", "flag"), [
    (("-b", 0), "batch_size"), (("-w", -1), "num_workers"), (("--n_epochs", 0), "n_epochs"), (("--accum", 0), "accum"),
    (("--image_size", 0), "image_size"), (("--shuffle", -2), "shuffle"), (("-lr", -1), "lr"), (("-lr", "nan"), "lr"),
    (("-lr", "inf"), "lr"), (("--momentum", 1), "momentum"), (("--momentum", "nan"), "momentum"),
    (("--weight_decay", -1), "weight_decay"), (("--label_smoothing", 1), "label_smoothing"),
    (("--clip_grad", -1), "clip_grad"),
    (("--clip_grad", "inf"), "clip_grad"), (("--betas", 0.9, 1), "betas"), (("--betas", -0.1, 0.9), "betas"),
    (("--betas", "nan", 0.9), "betas"), (("--betas", 0.9), "--betas"),
    (("--seed", -1), "seed"), (("--seed", 1 << 63), "seed"),
    (("--report_growth", 0.9), "report_growth"), (("--timeout", 0), "timeout"), (("--max_steps", 0), "max_steps"),
    (("--save_every", 0), "save_every"), (("--max_errors", -1), "max_errors"),
    (("--warmup_epochs", 11), "warmup_epochs"),
    *((("-lr", number), f"{float(number)} is too small; --lr") for number in ("-1e-3", "-1E+3", "-.5", "-1.", "-inf")),
    (("-lr", "-nan"), "nan is no number; --lr"), (("-lr=-1e-3",), "-0.001 is too small; --lr"),
    (("--betas", "-1e-3", 0.9), "-0.001 0.9 out of range; --betas"), (("-w", "-1e3"), "invalid int value: '-1e3'"),
    *((("--timeout", seconds), "too large; --timeout") for seconds in ("1e6", "1e15", "inf")),
    (("--image_size", 10**6), "too large; --image_size"), (("--cache_size", "1e300"), "cache_size"),
    (("--shuffle", 10**20), "shuffle"), (("--dummy", "--epoch_samples", 10**20), "too large; --epoch_samples"),
    (("-w", 10**5), "too large; --num_workers"),
    (("-b", 2, "--accum", 3), "accum"), (("--cache_size", -1), "cache_size"),
    (("-g", 0, 0), "-g"), (("-g", -1), "-g"), (("--output", " "), "output"), (("--resume", ""), "resume"),
    (("--weights", ""), "weights"), (("-s", ""), "shard_path"), (("-s", "a", "--val_path", "b", ""), "val_path"),
    (("--mix", "queue"), "mix"), (("--epoch_samples", 9), "epoch_samples"), (("--epoch_samples", 0), "epoch_samples"),
    (("--sampling", "split", "--mix", "pooled", "-w", 0), "mix"),
    (("--sampling", "split", "--mix", "pooled", "-w", 3, "-b", 2), "mix"),
    (("--dummy",), "epoch_samples"), (("--dummy", "--epoch_samples", 9, "--sampling", "split"), "sampling split"),
    (("--dummy", "--epoch_samples", 9, "--val_path", "v"), "val_path"),
    (("--evaluate", "--weights", "w.pth"), "val_path"), (("--evaluate", "--val_path", "v"), "evaluate"),
    (("--evaluate", "--val_path", "v", "--resume", "auto"), "output"), (("--predictions", "p"), "predictions"),
    (("--sampling", "some"), "sampling"), (("--trace", "draw"), "trace"), (("--frobnicate",), "frobnicate"),
    (("--batch", 3), "--batch"), (("-b", "many"), "batch_size"), (("positional",), "positional")])
def test_nonsense_is_refused_in_a_line_that_names_the_flag(arguments: tuple, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*arguments)
    line = str(caught.value)
    assert flag in line and "\n" not in line and line.count(";") >= 2  # what; where; what to do


def test_every_number_has_a_range() -> None:
    numbers = {field.name for field in dataclasses.fields(TrainConfig)
               if str(field.type).removesuffix(" | None") in ("int", "float")}
    assert set(RANGES) == numbers


def test_validation_on_what_is_trained_on_is_found_out_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "train")
    for name in ("train", "train/", "./train/../train", "link"):
        with pytest.raises(UsageError, match="--val_path"):
            parse("-s", tmp_path / "train", "--val_path", f"{tmp_path}/{name}")
    parse("-s", tmp_path / "train", "--val_path", tmp_path / "train", "--evaluate", "--weights", "w")  # does not train


def test_dummy_data_has_one_order_in_every_script() -> None:
    assert parse("--dummy", "--epoch_samples", 9, sampling="resampled").sampling == "exact"
