"""Everything that is wrong with shards, found before a run meets it; and clean copies of what can be saved.

    python -m common.check_shards shards/train
    python -m common.check_shards broken/ --fix mended/

Every sample is read and decoded as training would. Exit status: 0 all is well, 1 something is wrong, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.access.storage import Storage
from common.access.urls import shown
from common.checking.shard_check import CheckJob, Problem, ShardReport, check_shard, shown_problem
from common.errors import UserError, one_line
from common.fields import Fields
from common.files import write_atomic
from common.indexing.folders import basename, folder_of, folders_of, promised_through_cache, read_any_info
from common.indexing.info import INFO, Info, check_totals, description
from common.indexing.paths import SUFFIXES, expand, gaps, shard_names
from common.indexing.scan import first_image_field
from common.processes import available_cpus, run_jobs
from common.shards import classes_of, known_classes
from common.tool import run_tool
from common.writing.keys import file_names
from common.writing.output import REJECTED

NUM_SHOWN = 20  # problems of one cause that are printed


@dataclass
class CheckReport:
    """What was found in all shards together."""

    shards: list[ShardReport]
    problems: list[Problem]
    warnings: list[str]
    num_classes: int
    classes: tuple[str, ...] | None

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        full = sum(shard.num_samples > 0 for shard in self.shards)
        labels = sum((shard.labels for shard in self.shards), Counter())
        return {
            "shards": len(self.shards), "samples": self.num_samples, "usable": labels.total(),
            "num_classes": self.num_classes,
            "labels": dict(sorted(labels.items())),
            "causes": dict(Counter(p.cause for p in self.problems).most_common()),
            "problems": [asdict(problem) for problem in self.problems], "warnings": self.warnings,
            "feeds": {"exact": None, "resampled": None, "split": full}}


def check(patterns: Sequence[str], fields: Fields, storage: Storage, num_workers: int, work: Path | None = None,
          throws_away: bool = False) -> CheckReport:
    """Look at every shard that `patterns` name; clean copies go to `work`. Raises UserError where there is none, or
    `work` cannot be written.

    `throws_away`: plain copies in the cache of `storage` are removed as soon as they have been read.
    """
    paths = expand(patterns, storage)
    names = shard_names(paths)
    problems, infos = [], {}
    for folder, path in folders_of(paths).items():
        try:
            infos[folder] = read_any_info(path, storage)
        except UserError as error:
            infos[folder] = Info()
            problems.append(Problem("wrong description", str(error), folder))
    try:
        num_classes, classes = known_classes(infos)
    except UserError as error:
        num_classes, classes = 0, None
        problems.append(Problem("wrong description", str(error), folder_of(paths[0])))
    storage = replace(storage, promised=promised_through_cache(paths, infos, storage))
    with suppress(UserError):  # told of the shard below
        fields = replace(fields, first_image=first_image_field(paths, storage))
    fields = replace(fields, num_classes=num_classes or None, classes=classes)
    jobs = [CheckJob(path, name, storage, fields, work / f"{file}.tar" if work else None, throws_away)
            for path, name, file in zip(paths, names, file_names(names), strict=True)]
    shards = _run(jobs, num_workers)
    problems += [problem for shard in shards for problem in shard.problems]
    try:
        check_totals(infos, ((folder_of(s.job.path), basename(s.job.path), s.num_samples) for s in shards))
    except UserError as error:
        problems.append(Problem("wrong number of samples", str(error), folder_of(paths[0])))
    report = CheckReport(shards, problems, [], num_classes, classes)
    _complete(report)
    return report


def _run(jobs: list[CheckJob], num_workers: int) -> list[ShardReport]:
    """In parallel, a shard at a time; back in the shards' order."""
    done: dict[str, ShardReport] = {}
    total = sum(os.path.getsize(job.path) for job in jobs if os.path.exists(job.path))
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for shard in run_jobs(check_shard, jobs, min(num_workers, len(jobs))):
            done[shard.job.path] = shard
            bar.update(shard.num_bytes)
    return [done[job.path] for job in jobs]


def _complete(report: CheckReport) -> None:
    """What only shows when everything has been seen."""
    labels = sum((shard.labels for shard in report.shards), Counter())
    names = {label: name for shard in report.shards for label, name in shard.names.items()}
    if not report.num_classes and labels:
        path = next(shard.job.path for shard in report.shards if max(labels) in shard.labels)
        try:
            report.num_classes, report.classes = classes_of(labels, names, path)
        except UserError as error:
            report.problems.append(Problem("stray label", str(error), folder_of(path)))
    if not labels:
        folder = folder_of(report.shards[0].job.path)
        last = report.problems[-1].detail if report.problems else ""
        why = f": {last}" if last.endswith("_field") and len({p.detail for p in report.problems}) == 1 else ""
        report.problems.append(Problem("no samples", f"not one sample can be used{why}", folder))
    unused = report.num_classes - len(labels)
    if labels and unused > 0:
        report.warnings.append(f"{unused} of {report.num_classes} classes have no usable sample")
    empty = [shard.job.name for shard in report.shards if not shard.num_samples]
    if empty:
        report.warnings.append(f"{len(empty)} shards are empty, such as {empty[0]}")
    missing = gaps([shard.job.path for shard in report.shards])
    if missing:
        report.warnings.append(f"{len(missing)} numbers are missing between the shards, such as {shown(missing[0])}")
    differing = [label for label, name in names.items() if report.classes and label < len(report.classes)
                 and report.classes[label] != name]
    if differing:
        label = differing[0]
        report.warnings.append(f"{len(differing)} classes have another name in samples than in {INFO}, such as "
                               f"{label}: "
                               f"{names[label]}, {(report.classes or ())[label]}")


def lines(report: CheckReport) -> list[str]:
    """The report for people."""
    found = report.as_dict()
    text, told = [], Counter[str]()
    for problem in report.problems:
        told[problem.cause] += 1
        if told[problem.cause] <= NUM_SHOWN:
            text.append(f"wrong: {shown_problem(problem)}")
    text += [f"wrong: {count - NUM_SHOWN} more: {cause}" for cause, count in told.items() if count > NUM_SHOWN]
    text += [f"warning: {one_line(warning)}" for warning in report.warnings]
    causes = ", ".join(f"{count} {cause}" for cause, count in found["causes"].items())
    text.append(f"{found['shards']} shards, {found['samples']} samples, {found['usable']} of them usable, "
                f"{found['num_classes']} classes; "
                + (f"{len(report.problems)} problems: {causes}" if causes else "nothing is wrong"))
    full = found["feeds"]["split"]
    text.append("exact and resampled feed any number of ranks × workers" + (
        f"; split at most {full} ranks, and every worker if ranks × workers are at most {full}" if full else ""))
    return text


def _finish_fix(report: CheckReport, work: Path, out: Path) -> str:
    """Put the clean shards in their place, describe them, and list what could not be saved."""
    kept = [shard for shard in report.shards if shard.num_saved]
    _check_empty(out)
    for path in work.iterdir():
        path.replace(out / path.name)
    info = description([(shard.job.out.name, shard.num_saved, shard.bytes_saved) for shard in kept if shard.job.out],
                       report.num_classes, report.classes)
    write_atomic(out / INFO, json.dumps(info, indent=1))
    lost = [json.dumps({"path": f"{p.shard}/{p.key}", "cause": p.detail}) + "\n" for p in report.problems]
    if lost:
        write_atomic(out / REJECTED, "".join(lost))
    where = f", what was wrong in {out / REJECTED}" if lost else ""
    return f"{info['dataset size']} samples saved in {len(kept)} clean shards; {out}{where}"


def _open_out(out: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder in OUT for clean shards until all are written: a check that is interrupted leaves none to be read."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        _check_empty(out)
        return tempfile.TemporaryDirectory(prefix=".fixing-", dir=out)
    except OSError as error:
        raise UserError(f"cannot be made ({error.strerror}); {out}; choose another OUT") from None


def _check_empty(out: Path) -> None:
    there = [path for path in out.iterdir() if path.name.endswith(SUFFIXES) or path.name == INFO]
    if there:
        raise UserError(f"shards are here already; {there[0]}; choose another OUT, a new one")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status as the head of this file says."""
    args = _parser().parse_args(arguments)
    try:
        with (tempfile.TemporaryDirectory(prefix="shardwise-") as scratch,  # for what is compressed or elsewhere
              _open_out(args.fix) if args.fix else nullcontext() as folder):
            work = Path(folder) if folder else None
            storage = Storage(args.cache_dir or scratch, allow_pipe=args.allow_pipe)
            report = check(args.paths, Fields(args.image_field, args.label_field), storage, args.num_workers, work,
                           not args.cache_dir)
            saved = _finish_fix(report, work, args.fix) if work else ""
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    print(json.dumps(report.as_dict(), indent=1) if args.json else "\n".join([*lines(report), *filter(None, [saved])]))
    return 1 if report.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m common.check_shards", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="folders, tars, patterns or URLs, as --shard_path takes them")
    add("-w", "--num_workers", type=int, default=available_cpus(),
        help="processes (default: one for each core, here %(default)s)")
    add("--json", action="store_true", help="print everything as one JSON object")
    add("--fix", type=Path, metavar="OUT", help="write what can be saved as clean shards into this new folder")
    add("--image_field", help="field that holds the image (default: the first sample decides)")
    add("--label_field", help="field that holds the label (default: json, else cls)")
    add("--cache_dir", help="keep copies of compressed and remote shards here (default: thrown away)")
    add("--allow_pipe", action="store_true", help="run the commands that pipe: shards are")
    return parser


if __name__ == "__main__":
    run_tool(main)
