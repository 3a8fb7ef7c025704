"""`TrainConfig`: every choice of a run in one frozen place. The command line is generated from its fields.

    python train_single.py --help
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args, get_type_hints

from common.errors import UserError


class UsageError(UserError):
    """Bad usage: exit 2."""


def flag(default: Any, help: str, *short: str, choices: Sequence[str] = (), group: str = "run") -> Any:
    """A field of the command line. `{default}` in the help is filled in."""
    metadata = {"help": help, "short": short, "choices": choices, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """All flags of the three scripts. Rejects nonsense with a line that names the flag."""

    # data
    shard_path: tuple[str, ...] = flag(("./test_shards/",), "shards to train on: folders, tars, glob or brace patterns", "-s", group="data")
    val_path: tuple[str, ...] = flag((), "shards to validate on after every epoch (none)", group="data")
    sampling: str = flag("exact", "exact: every sample once per epoch; split: shards dealt to ranks and workers; resampled: shards drawn with replacement",
                         choices=("exact", "split", "resampled"), group="data")
    shuffle: int = flag(5000, "samples to shuffle among: width of a window (exact), buffer of a worker (split, resampled); -1 keeps the shards' order", group="data")
    mix: str = flag("none", "join what several workers read into one batch (split, resampled)", choices=("none", "pooled", "shuffle", "queue"), group="data")
    epoch_samples: int | None = flag(None, "samples that an epoch counts, over all ranks (split, resampled; the size of the data set)", group="data")
    image_field: str | None = flag(None, "field that holds the image (the first sample decides)", group="data")
    label_field: str | None = flag(None, "field that holds the label (json, else cls)", group="data")
    image_size: int = flag(224, "side of the training images, pixels", group="data")
    augment: str = flag("crop", "crop: random resized crop and flip; center: resize and centre crop", choices=("crop", "center"), group="data")
    batch_size: int = flag(64, "samples per step of one process: of one rank in DDP, of all replicas together in DP", "-b", group="data")
    num_workers: int = flag(2, "loader processes per rank; 0 reads in the main process", "-w", group="data")
    on_error: str = flag("stop", "a sample that cannot be used: stop, or skip and count it", choices=("stop", "skip"), group="data")
    max_errors: int = flag(100, "skipped samples, over all ranks, after which the run stops", group="data")
    # model
    arch: str = flag("resnet18", "a torchvision classification model by name, or tiny", group="model")
    weights: str = flag("none", "none, DEFAULT (torchvision's) or a file", group="model")
    # optimisation
    n_epochs: int = flag(10, "epochs", group="optimisation")
    optimizer: str = flag("adam", "optimiser", choices=("adam", "adamw", "sgd"), group="optimisation")
    lr: float = flag(1e-4, "learning rate", "-lr", group="optimisation")
    betas: tuple[float, float] = flag((0.9, 0.999), "betas of adam and adamw", group="optimisation")
    momentum: float = flag(0.9, "momentum of sgd", group="optimisation")
    weight_decay: float = flag(0.0, "weight decay, not applied to norms and biases", group="optimisation")
    label_smoothing: float = flag(0.0, "label smoothing, 0 to 1", group="optimisation")
    schedule: str = flag("constant", "learning rate over the steps", choices=("constant", "cosine"), group="optimisation")
    warmup_epochs: float = flag(0.0, "epochs over which the learning rate rises from 0", group="optimisation")
    accum: int = flag(1, "micro-batches that a batch is cut into: the same gradient in less memory", group="optimisation")
    clip_grad: float = flag(0.0, "largest norm of the gradient; 0 does not clip", group="optimisation")
    max_steps: int | None = flag(None, "optimiser steps of the whole run after which it saves and ends (all epochs)", group="optimisation")
    amp: str = flag("none", "mixed precision", choices=("none", "bf16", "fp16"), group="optimisation")
    channels_last: bool = flag(False, "model in channels-last memory", group="optimisation")
    compile: bool = flag(False, "torch.compile the model", group="optimisation")
    # run
    device: str = flag("auto", "auto takes CUDA where there is a device", choices=("auto", "cpu", "cuda"))
    gpu: tuple[int, ...] | None = flag(None, "ids of the GPUs to use (the first; DP: all); without a GPU, their number counts replicas", "-g")
    output: str | None = flag(None, "folder of the run (runs/<script>/<date-time>)")
    resume: str = flag("none", "none, auto (the newest checkpoint in --output) or a checkpoint")
    save_every: int | None = flag(None, "optimiser steps between checkpoints, besides one per epoch (none)")
    report_s: float = flag(15.0, "seconds until the first report line of a log file")
    report_growth: float = flag(1.1, "factor by which the time between report lines grows")
    trace: tuple[str, ...] = flag((), "print or save which sample went where, or both", choices=("print", "save"))
    seed: int | None = flag(None, "fixes shard order, sample order, augmentation and initial weights (drawn, printed and saved)")
    deterministic: bool = flag(False, "deterministic algorithms on CUDA too")
    timeout: float = flag(600.0, "seconds that ranks wait for each other")

    def __post_init__(self) -> None:
        for name, least in {"batch_size": 1, "n_epochs": 1, "accum": 1, "image_size": 1, "num_workers": 0, "shuffle": -1, "max_errors": 0,
                            "momentum": 0, "weight_decay": 0, "warmup_epochs": 0, "clip_grad": 0, "lr": 0, "report_s": 0, "report_growth": 1,
                            "epoch_samples": 1, "max_steps": 1, "save_every": 1, "timeout": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"{value} is too small; --{name}; give {least} or more")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and value in (float("inf"), float("-inf")):
                raise UsageError(f"{value} is not a finite number; --{name}; give a finite one")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"{self.betas} out of range; --betas; give two numbers from 0 up to, not including, 1")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"{self.label_smoothing} out of range; --label_smoothing; give a number from 0 up to, not including, 1")
        if self.seed is not None and self.seed >= 1 << 63:
            raise UsageError(f"{self.seed} is too large; --seed; give less than 2**63")
        if self.sampling == "exact" and self.mix != "none":
            raise UsageError(f"exact sampling has an order of its own; --mix {self.mix}; use --sampling split or resampled with it")
        if self.sampling == "exact" and self.epoch_samples is not None:
            raise UsageError("an exact epoch is every sample once; --epoch_samples; use --sampling split or resampled with it")
        if set(self.val_path) & set(self.shard_path):
            raise UsageError(f"validation on training shards; --val_path {self.val_path[0]}; name other shards than --shard_path")
        if self.gpu is not None and (len(set(self.gpu)) < len(self.gpu) or min(self.gpu, default=0) < 0):
            raise UsageError(f"{' '.join(map(str, self.gpu))} are not ids of different devices; -g; name each GPU once, from 0 on")
        if self.output is not None and not self.output.strip():
            raise UsageError("an empty name; --output; name a folder")

    @classmethod
    def from_command_line(cls, doc: str, arguments: Sequence[str] | None = None, **defaults: Any) -> TrainConfig:
        """Parse the arguments of a script. `defaults` replace those of the fields. `-` and `_` are both accepted."""
        parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        hints, groups = get_type_hints(cls), {}
        for field in dataclasses.fields(cls):
            name = field.metadata["group"]
            groups[name] = groups.get(name) or parser.add_argument_group(name)
            _add(groups[name], field, hints[field.name], defaults.get(field.name, field.default))
        arguments = sys.argv[1:] if arguments is None else arguments
        return cls(**vars(parser.parse_args([_underscored(argument) for argument in arguments])))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; the command line; {self.prog} --help lists the flags")


def _underscored(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _add(group: Any, field: dataclasses.Field, hint: Any, default: Any) -> None:
    """Add one field to the parser, by its type."""
    options: dict[str, Any] = {"default": default, "dest": field.name}
    inner = [part for part in get_args(hint) if part is not type(None)]
    kind = hint if isinstance(hint, type) and not get_args(hint) else inner[0]
    if get_args(kind):  # tuple[int, ...] | None
        inner, kind = list(get_args(kind)), get_args(kind)[0]
    if "tuple" in str(hint):
        options["nargs"] = "+" if Ellipsis in inner or len(inner) == 1 else len(inner)
        options["action"] = _Tuple
        kind = inner[0]
    if kind is bool:
        options["action"] = "store_true"
    else:
        options["type"] = kind
        options["metavar"] = None if field.metadata["choices"] else field.name.rsplit("_", 1)[-1].upper()
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    options["help"] = field.metadata["help"] + _shown(default)
    names = [*field.metadata["short"], f"--{field.name}"]
    group.add_argument(*names, **options)


class _Tuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _shown(default: Any) -> str:
    if default is None or default is False or default == ():
        return ""
    return f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]"


def markdown() -> str:
    """The flags as the table of the README."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(TrainConfig):
        names = ", ".join(f"`{name}`" for name in (*field.metadata["short"], f"--{field.name}"))
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(f"| {names} | {_shown(field.default).strip(' []')} | {field.metadata['help']}{choices} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
