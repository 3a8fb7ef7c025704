"""Where the time of the input pipeline goes, what limits it and what to turn: the loader that the scripts use, timed.

    python -m common.benchmark -s shards/train -b 64 -w 1 2 4           # images/s, shares of a worker's time, scaling
    python -m common.benchmark -s shards/train -w 2 --step --arch resnet50      # does the device wait for images?
    python -m common.benchmark --plan --shards 1000000 --samples_per_shard 1000 --ranks 4096 --workers 8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from common.errors import UserError, one_line
from common.flags import underscored
from common.tool import run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Prints a report, with --json the same once more as one line; returns the exit status."""
    args = _parsed(arguments)
    try:
        result = _run(args)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    if args.plan:  # needs no torch
        from common.benchmarks.plan import Job, Place, show_plan

        return show_plan(
            Job(args.shards, args.samples_per_shard, args.batch_size, args.ranks, args.workers, args.shuffle,
                args.seed),
            Place(args.rank, args.worker, args.epoch, max(args.step or 0, 0)))
    from common.benchmarks.loader import Input, show_loader

    data = Input.open(
        args.shard_path, batch_size=args.batch_size, sampling=args.sampling, mix=args.mix, augment=args.augment,
        image_size=args.image_size, shuffle=args.shuffle, seed=args.seed)
    if args.step is not None:
        from common.benchmarks.step import show_step

        return show_step(data, args.num_workers[-1], args.arch, args.amp, args.device, args.num_steps)
    return show_loader(data, args.num_workers, args.images, args.device, args.trace)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m common.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-s", "--shard_path", nargs="+", metavar="SHARDS", help="shards to read: folders, tars, patterns")
    add("-b", "--batch_size", type=_count, default=64, help="samples per step [64]")
    add("-w", "--num_workers", type=_count, nargs="+", default=[2], help="loader processes, each number in turn [2]")
    add("--sampling", choices=("exact", "split", "resampled"), default="exact", help="as in training [exact]")
    add("--mix", choices=("none", "pooled", "shuffle", "queue"), default="none", help="as in training [none]")
    add("--augment", choices=("crop", "center"), default="crop", help="as in training [crop]")
    add("--image_size", type=_count, default=224, help="side of the images, pixels [224]")
    add("--shuffle", type=int, default=5000, help="as in training, samples [5000]")
    add("--seed", type=int, default=0, help="of order and crops [0]")
    add("--images", type=_count, default=2048, help="images of a pass; the better of two passes counts [2048]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the images go [auto]")
    add("--trace", action="store_true", help="also record each batch, as --trace save does")
    add("--json", action="store_true", help="print the figures as JSON too, in the last line")
    step = parser.add_argument_group("the loader against a model's step")
    step.add_argument("--step", type=int, nargs="?", const=-1, help="time training steps on one batch again and again, "
                      "and on what the loader gives; with --plan: the step of the epoch to show")
    step.add_argument("--arch", default="resnet18", help="model [resnet18]")
    step.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none", help="mixed precision [none]")
    step.add_argument("--num_steps", type=_count, default=20, help="steps that are timed [20]")
    plan = parser.add_argument_group("the plan of exact sampling; needs no data")
    plan.add_argument("--plan", action="store_true", help="time and weigh the plan of an epoch, and show a part of it")
    plan.add_argument("--shards", type=_count, default=1000, help="shards [1000]")
    plan.add_argument("--samples_per_shard", type=_count, default=1000, help="samples in each [1000]")
    plan.add_argument("--ranks", type=_count, default=1, help="ranks [1]")
    plan.add_argument("--workers", type=_count, default=2, help="loader processes of a rank [2]")
    for name in ("rank", "worker", "epoch"):
        plan.add_argument(f"--{name}", type=int, default=0, help=f"show what this {name} reads [0]")
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args([underscored(argument) for argument in given])
    if not args.plan and not args.shard_path:
        parser.error("name the shards: -s SHARDS")
    if args.mix != "none" and args.sampling == "exact":
        parser.error("exact sampling has an order of its own: use --mix with --sampling split or resampled")
    return args


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    run_tool(main)
