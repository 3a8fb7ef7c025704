"""Images to shards: a folder of classes, a manifest or a torchvision data set becomes tars that training reads fast.

    python -m common.make_shards images/ shards/ -w 8 --val_fraction 0.1

The shards depend on the input, the seed and the options alone. A run that was killed goes on where it
stopped when the same command is given again. Several machines share the work with `--part 0/4` … `--part 3/4`,
and `--finish` when all are done. Each shard folder gets an `info.json`; what cannot be used is listed in
OUT/rejected.jsonl. What is not finished is kept in OUT/.unfinished, which goes when everything is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from common.errors import UserError, one_line
from common.flags import underscored
from common.processes import run_jobs
from common.tool import run_tool
from common.writing.command_line import ADVICE, make_parser
from common.writing.manifest import MANIFESTS, from_manifest
from common.writing.output import (
    REJECTED,
    Summary,
    finish,
    open_output,
    remove_leftovers,
    remove_output,
    summarize,
    write_partial,
)
from common.writing.shard_plan import PlanOptions, ShardPlan, make_plan
from common.writing.sources import READABLE, ImageSource, from_folder
from common.writing.torchvision_source import from_torchvision
from common.writing.work_lock import sole_writer
from common.writing.writer import GO_ON, Record, ShardJob, input_stamp, read_record, write_shard

TORCHVISION = "torchvision:"


@dataclass(frozen=True)
class Options(PlanOptions):
    """What the command line can say besides SRC and OUT. Fields that are not in PlanOptions do not touch the bytes."""

    root: str | None = None
    split: str | None = None
    num_workers: int = 1
    part: tuple[int, int] | None = None  # (i, n): only the shards whose number in the plan leaves i when divided by n
    finish: bool = False
    overwrite: bool = False


def make_shards(source: str, out: str | Path, options: Options | None = None) -> Summary:
    """Write the shards of `source` to `out`, as the head of this file says. Raises UserError.

    Called by the command line and by tests. With `part`, the summary is that of this part alone.
    """
    options = options or Options()
    found = open_source(source, options)
    if os.path.isdir(source) and Path(out).resolve().is_relative_to(Path(source).resolve()):
        raise UserError(f"OUT lies inside of SRC, whose images it would join; {out}; choose a folder beside {source}")
    for warning in found.warnings:
        print(f"warning: {one_line(warning)}", file=sys.stderr)
    plan = make_plan(found, out, PlanOptions(**{f.name: getattr(options, f.name) for f in fields(PlanOptions)}))
    try:
        if options.overwrite:
            remove_output(plan)
        complete = open_output(plan)
        if complete is not None:
            print(f"{out} holds these shards already: nothing is written")
            return complete
        with sole_writer(plan.work, plan.mark, options.part):
            return _make(plan, options)
    except OSError as error:
        raise UserError(f"cannot write ({error.strerror}); {error.filename or out}; {GO_ON}") from None


def _make(plan: ShardPlan, options: Options) -> Summary:
    """All of the plan, its part, or its end."""
    if options.finish:
        return finish(plan)
    if options.part is not None:
        return _write(plan, range(options.part[0], len(plan.shards), options.part[1]), options.num_workers)
    try:
        _write(plan, range(len(plan.shards)), options.num_workers)
        return finish(plan)
    except UserError:
        write_partial(plan)
        raise


def open_source(source: str, options: Options) -> ImageSource:
    """List the images of `source`. Raises UserError where there is nothing to list; single faults are in `rejected`."""
    if source.startswith(TORCHVISION):
        found = from_torchvision(source.removeprefix(TORCHVISION), options.root, options.split)
    elif options.root is not None or options.split is not None:
        raise UserError(f"--root and --split belong to torchvision:NAME; SRC is {source}; leave them out")
    elif os.path.isdir(source):
        found = from_folder(source)
    elif os.path.isfile(source) and source.lower().endswith(MANIFESTS):
        found = from_manifest(source)
    else:
        what = "no images in that form" if os.path.exists(source) else "no such folder or file"
        raise UserError(f"{what}; {source}; {ADVICE}")
    if not found.paths and not found.rejected:
        raise UserError(f"no images ({', '.join(READABLE)}); {source}; {ADVICE}")
    used = set(found.labels)
    if 0 < len(used) < found.num_classes:
        unused = (found.category(label) for label in range(found.num_classes) if label not in used)
        found.warnings.append(f"{found.num_classes - len(used)} of {found.num_classes} classes have no image, "
                              f"such as {', '.join(islice(unused, 3))}")
    return found


def _write(plan: ShardPlan, numbers: Sequence[int], num_workers: int) -> Summary:
    """Write the shards `numbers` of the plan, those that are there already excepted."""
    remove_leftovers(plan, numbers)
    total = sum(len(plan.shards[number].indices) for number in numbers)
    print(f"{total} images, {plan.source.num_classes} classes -> {len(numbers)} shards in "
          f"{', '.join(map(str, plan.folders))}; processes: {max(num_workers, 1)}", flush=True)
    if plan.options.verify == "full":
        import common.images.decode  # noqa: F401  PyTorch: once here, so that the processes share it
    records: list[Record] = []
    with tqdm(total=total, unit=" images", disable=None) as bar:  # None: no bar where stderr is no terminal

        def done(record: Record) -> None:
            records.append(record)
            bar.update(record.num_samples + len(record.rejected))

        def jobs() -> Iterator[ShardJob]:
            for number in numbers:
                record = read_record(plan.shards[number].tar, plan.work)
                if record is not None and record.stamp == input_stamp(plan.files(number)):
                    done(record)
                else:
                    yield plan.job(number)

        for record in run_jobs(write_shard, jobs(), num_workers):
            done(record)
    return summarize(records)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status: 0 done, 1 an error told in one line, 2 bad usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    args = vars(make_parser(__doc__).parse_args([underscored(argument) for argument in given]))
    source, out = args.pop("source"), args.pop("out")
    try:
        summary = make_shards(source, out, Options(**args))
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; {out}; give the same command again to go on", file=sys.stderr)
        return 130
    print(f"{summary.num_samples} samples in {summary.num_shards} shards, {summary.num_bytes / 1e6:.1f} MB")
    if summary.rejected:
        path, cause = summary.rejected[0]
        print(f"warning: {len(summary.rejected)} inputs are rejected, such as {one_line(path)}: {one_line(cause)}; "
              f"{Path(out, REJECTED)} lists them when all is done", file=sys.stderr)
    if args["part"]:
        print("this part is done; when all parts are: the same command with --finish instead of --part")
    return 0


if __name__ == "__main__":
    run_tool(main)
