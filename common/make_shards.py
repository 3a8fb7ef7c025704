"""Images to shards: a folder of classes, a manifest or a torchvision data set becomes tars that training reads fast.

    python -m common.make_shards images/ shards/ -w 8 --val_fraction 0.1

The shards depend on the input, the seed and the options alone. A run that was killed goes on where it
stopped when the same command is given again. Several machines share the work with `--part 0/4` … `--part 3/4`,
and `--finish` when all are done. Each shard folder gets an `info.json`; what cannot be used is listed in
OUT/rejected.jsonl. What is not finished is kept in OUT/.unfinished, which goes when everything is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from tqdm import tqdm

from common.errors import UserError
from common.image_files import VERIFY
from common.manifest import MANIFESTS, from_manifest
from common.processes import available_cpus, run_jobs
from common.shard_plan import Plan, PlanOptions, make_plan, shard_name
from common.shard_writer import GO_ON, Record, finished_record, input_stamp, read_record, replace_text, write_shard
from common.sources import READABLE, Source, from_folder
from common.torchvision_source import from_torchvision

ADVICE = "SRC is a folder with one subfolder per class, a .csv or .jsonl manifest, or torchvision:NAME"
TORCHVISION = "torchvision:"


@dataclass(frozen=True)
class Options(PlanOptions):
    """Everything the command line can say besides SRC and OUT. Only what PlanOptions holds decides the bytes."""

    root: str | None = None
    split: str | None = None
    num_workers: int = 1
    part: tuple[int, int] | None = None  # (i, n): write the shards whose number in the plan leaves i when divided by n
    finish: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Summary:
    """What a call found or made."""

    num_samples: int
    num_shards: int
    num_bytes: int
    num_rejected: int
    message: str


def make_shards(source: str, out: str | Path, options: Options | None = None) -> Summary:
    """Write the shards of `source` below `out`; see the head of this file. Raises UserError.

    `source` is a folder, a manifest, or `torchvision:NAME`. Called by the command line and by tests.
    """
    options = options or Options()
    found = open_source(source, options)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if _is_below(out, source):
        raise UserError(f"OUT lies inside of SRC and would become a part of it; {out}; choose a folder beside {source}")
    plan = make_plan(found, out, PlanOptions(**{f.name: getattr(options, f.name) for f in fields(PlanOptions)}))
    try:
        if options.overwrite:
            _remove_output(plan)
        complete = _open_output(plan)
        if complete is not None:
            return complete
        if options.finish:
            return _finish(plan)
        _write(plan, options)
        if options.part is None:
            return _finish(plan)
    except OSError as error:
        raise UserError(f"{error.strerror}; {error.filename or out}; {GO_ON}") from None
    records = [read_record(plan.job(number)) for number in _numbers(plan, options)]
    return _summary([record for record in records if record], f"part {options.part[0]} of {options.part[1]} is done; when all are: --finish")


def open_source(source: str, options: Options) -> Source:
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
        raise UserError(f"{'no images in that form' if os.path.exists(source) else 'no such folder or file'}; {source}; {ADVICE}")
    if not found.paths:
        listed = f", but {len(found.rejected)} that cannot be used, such as {': '.join(found.rejected[0])}" if found.rejected else ""
        raise UserError(f"no images ({', '.join(READABLE)}){listed}; {source}; {ADVICE}")
    unused = sorted(set(range(found.num_classes)) - set(found.labels)) if found.num_classes <= 1_000_000 else []
    if unused:
        names = ", ".join(found.category(label) for label in unused[:5])
        found.warnings.append(f"{len(unused)} of {found.num_classes} classes have no image: {names}{', …' if len(unused) > 5 else ''}")
    return found
