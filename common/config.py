"""`TrainConfig`: every choice of a run in one frozen place. The command line is generated from its fields.

    python train_single.py --help
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import UsageError
from common.flags import flag, parse, underscored

_data, _model, _optimisation = (partial(flag, group=name) for name in ("data", "model", "optimisation"))

RANGES: dict[str, tuple[float, float]] = {  # of numbers: from the first up to, not including, the second
    **dict.fromkeys(("batch_size", "n_epochs", "accum", "epoch_samples", "max_steps", "save_every"), (1, 10**12)),
    **dict.fromkeys(("weight_decay", "warmup_epochs", "clip_grad", "lr", "report_s"), (0, math.inf)),
    "shuffle": (-1, 10**12), "max_errors": (0, 10**12), "cache_size": (0, 10**12), "num_workers": (0, 1000),
    "image_size": (1, 1 << 16), "report_growth": (1, math.inf), "timeout": (1, 10**6),  # sockets wait for 24 days
    "momentum": (0, 1), "label_smoothing": (0, 1), "seed": (0, 1 << 63),
}


@dataclass(frozen=True)
class TrainConfig:
    """All flags of the three scripts. Rejects nonsense with a line that names the flag."""

    shard_path: tuple[str, ...] = _data(
        ("./test_shards/",), "shards to train on: folders, tars, glob or brace patterns", "-s")
    val_path: tuple[str, ...] = _data((), "shards to validate on after every epoch (none)")
    sampling: str = _data(
        "exact", "exact: every sample once per epoch; split: shards dealt to ranks and workers; "
        "resampled: shards drawn with replacement", choices=("exact", "split", "resampled"))
    shuffle: int = _data(
        5000, "samples to shuffle among: width of a window (exact), buffer of a worker (split, resampled); "
        "-1 keeps the shards' order")
    mix: str = _data(
        "none", "join what several workers read into one batch (split, resampled)",
        choices=("none", "pooled", "shuffle", "queue"))
    epoch_samples: int | None = _data(
        None, "samples that an epoch counts, over all ranks (split, resampled, dummy; the size of the data set)")
    image_field: str | None = _data(None, "field that holds the image (the first sample decides)")
    label_field: str | None = _data(None, "field that holds the label (json, else cls)")
    image_size: int = _data(224, "side of the training images, pixels")
    augment: str = _data(
        "crop", "crop: random resized crop and flip; center: resize and centre crop", choices=("crop", "center"))
    batch_size: int = _data(
        64, "samples per step of one process: of one rank in DDP, of all replicas together in DP", "-b")
    num_workers: int = _data(2, "loader processes per rank; 0 reads in the main process", "-w")
    on_error: str = _data("stop", "a sample that cannot be used: stop, or skip and count it", choices=("stop", "skip"))
    max_errors: int = _data(100, "different samples skipped, over all ranks, after which the run stops")
    cache_dir: str | None = _data(
        None, "folder for plain copies of remote or compressed shards: exact sampling and validation need them (none)")
    cache_size: float | None = _data(
        None, "largest size of --cache_dir, GB; what is unused for longest goes (no limit)")
    allow_pipe: bool = _data(False, "run the commands that pipe: shards are")
    dummy: bool = _data(False, "synthetic data instead of shards: --epoch_samples of them, in the order of exact")

    arch: str = _model("resnet18", "a torchvision classification model by name, or tiny")
    weights: str = _model("none", "none, DEFAULT (torchvision's) or a file")

    n_epochs: int = _optimisation(10, "epochs")
    optimizer: str = _optimisation("adam", "optimiser", choices=("adam", "adamw", "sgd"))
    lr: float = _optimisation(1e-4, "learning rate", "-lr")
    betas: tuple[float, float] = _optimisation((0.9, 0.999), "betas of adam and adamw")
    momentum: float = _optimisation(0.9, "momentum of sgd")
    weight_decay: float = _optimisation(0.0, "weight decay, not applied to norms and biases")
    label_smoothing: float = _optimisation(0.0, "label smoothing, 0 to 1")
    schedule: str = _optimisation("constant", "learning rate over the steps", choices=("constant", "cosine"))
    warmup_epochs: float = _optimisation(0.0, "epochs over which the learning rate rises from 0")
    accum: int = _optimisation(1, "micro-batches that a batch is cut into: the same gradient in less memory")
    clip_grad: float = _optimisation(0.0, "largest norm of the gradient; 0 does not clip")
    max_steps: int | None = _optimisation(
        None, "optimiser steps of the whole run after which it saves and ends (all epochs)")
    amp: str = _optimisation("none", "mixed precision; fp16 on GPUs alone", choices=("none", "bf16", "fp16"))
    channels_last: bool = _optimisation(False, "model in channels-last memory")
    compile: bool = _optimisation(False, "torch.compile the model")
    sync_bn: bool = _optimisation(False, "BatchNorm over the samples of all ranks (train_ddp.py on GPUs)")

    device: str = flag("auto", "auto takes CUDA where there is a device", choices=("auto", "cpu", "cuda"))
    gpu: tuple[int, ...] | None = flag(
        None, "ids of the GPUs to use (the first; DP: all); without a GPU, their number counts replicas", "-g")
    output: str | None = flag(None, "folder of the run (runs/<script>/<date-time>)")
    resume: str = flag("none", "none, auto (the newest checkpoint in --output) or a checkpoint")
    save_every: int | None = flag(None, "optimiser steps between checkpoints, besides one per epoch (none)")
    report_s: float = flag(15.0, "seconds until the first report line of a log file")
    report_growth: float = flag(1.1, "factor by which the time between report lines grows")
    trace: tuple[str, ...] = flag((), "print or save which sample went where, or both", choices=("print", "save"))
    seed: int | None = flag(
        None, "fixes shard order, sample order, augmentation and initial weights (drawn, printed and saved)")
    deterministic: bool = flag(False, "deterministic algorithms on CUDA too")
    evaluate: bool = flag(
        False, "validate the model of --resume or --weights on --val_path, print the numbers and end")
    predictions: str | None = flag(
        None, "file for --evaluate to write a JSON line per image to: shard, count, key, label, predicted, probability")
    profile: bool = flag(False, "profile five steps; OUTPUT/profile gets a trace file per rank, for Perfetto")
    timeout: float = flag(600.0, "seconds that ranks wait for each other, and for a batch")

    @classmethod
    def from_command_line(cls, doc: str | None, arguments: Sequence[str] | None = None, **defaults: Any) -> TrainConfig:
        """Parse the arguments of a script. `defaults` replace those of the fields. `-` and `_` are both accepted."""
        arguments = sys.argv[1:] if arguments is None else arguments
        if "--dummy" in map(underscored, arguments):
            defaults["sampling"] = "exact"  # whatever the script's own
        return cls(**parse(cls, doc, arguments, defaults))

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_data()
        self._check_evaluation()

    def _check_numbers(self) -> None:
        for name, (least, limit) in RANGES.items():
            value = getattr(self, name)
            if value is None or least <= value < limit:  # NaN is not
                continue
            fault = "too small" if value < least else "too large" if value >= limit else "no number"
            below = f" and less than {limit}" if limit < math.inf else ""
            raise UsageError(f"{value} is {fault}; --{name}; give a number of {least} or more{below}")
        if not all(0 <= beta < 1 for beta in self.betas):
            shown = " ".join(map(str, self.betas))
            raise UsageError(f"{shown} out of range; --betas; give two numbers from 0 up to, not including, 1")
        if self.warmup_epochs > self.n_epochs:
            raise UsageError(f"{self.warmup_epochs:g} epochs of warm-up in a run of {self.n_epochs}; --warmup_epochs; "
                             "give no more than --n_epochs")
        if self.accum > self.batch_size:
            raise UsageError(f"{self.accum} parts of a batch of {self.batch_size}; --accum; give --batch_size or less")

    def _check_names(self) -> None:
        for name in ("shard_path", "val_path", "output", "weights", "resume", "arch", "predictions", "cache_dir"):
            value = getattr(self, name)
            if value is not None and not all(text.strip() for text in ((value,) if isinstance(value, str) else value)):
                raise UsageError(f"an empty name; --{name}; give one, or leave the flag out")
        if self.gpu is not None and (len(set(self.gpu)) < len(self.gpu) or min(self.gpu, default=0) < 0):
            shown = " ".join(map(str, self.gpu))
            raise UsageError(f"{shown} are not ids of different devices; -g; name each GPU once, from 0 on")

    def _check_data(self) -> None:
        if self.dummy:
            self._check_dummy()
        elif self.sampling == "exact" and self.epoch_samples is not None:
            raise UsageError("an exact epoch is every sample once; --epoch_samples; "
                             "use --sampling split or resampled with it")
        if self.sampling == "exact" and self.mix != "none":
            raise UsageError(f"exact sampling has an order of its own; --mix {self.mix}; "
                             "use --sampling split or resampled with it")
        if self.mix != "none" and not self.num_workers:
            raise UsageError(f"there are no workers to mix; --mix {self.mix} with --num_workers 0; raise -w")
        if self.mix == "pooled" and self.num_workers > self.batch_size:
            raise UsageError(f"{self.num_workers} workers cannot share a batch of {self.batch_size}; --mix pooled; "
                             "lower -w, or raise -b")
        trained = {os.path.realpath(path) for path in self.shard_path}
        same = [path for path in self.val_path if os.path.realpath(path) in trained]
        if same and not self.evaluate:  # which does not train
            raise UsageError(f"validation on training shards; --val_path {same[0]}; name others than --shard_path")

    def _check_dummy(self) -> None:
        if self.epoch_samples is None:
            raise UsageError("synthetic data has no end; --dummy; say with --epoch_samples how many make an epoch")
        for unfit, name in ((self.sampling != "exact", f"sampling {self.sampling}"), (self.val_path, "val_path"),
                            (self.evaluate, "evaluate")):
            if unfit:
                raise UsageError(f"synthetic data has one order, and nothing to learn; --{name}; not with --dummy")

    def _check_evaluation(self) -> None:
        if self.predictions is not None and not self.evaluate:
            raise UsageError("predictions are written by an evaluation; --predictions; add --evaluate")
        if not self.evaluate:
            return
        if not self.val_path:
            raise UsageError("no shards to evaluate on; --evaluate; name them with --val_path")
        if self.resume == "none" and self.weights.lower() == "none":
            raise UsageError("no model to evaluate; --evaluate; name a checkpoint with --resume, or --weights FILE")
        if self.resume == "auto" and self.output is None:
            raise UsageError("no folder to look for a checkpoint in; --evaluate --resume auto; "
                             "name it with --output, or the checkpoint with --resume FILE")
