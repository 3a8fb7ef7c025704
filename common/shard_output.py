"""The folders that shards are written to: refused, gone on with, or finished.

    OUT/.unfinished/     while the work lasts: the digest of the plan, unfinished tars, a record for each shard
    OUT/info.json        (or OUT/train/info.json and OUT/val/info.json) written when every shard is there
    OUT/rejected.jsonl   what could not be used, where there is such a thing

Called by one process at a time, but for `open_output`, which machines that share the work may call at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.shard_plan import Plan
from common.shard_writer import Record, input_stamp, read_record, replace_text
from common.tar_index import index_path


class Summary(NamedTuple):
    """What a call made, or found made."""

    num_samples: int
    num_shards: int
    num_bytes: int
    rejected: list[tuple[str, str]]  # path, cause


def summarize(records: Iterable[Record], rejected: Sequence[tuple[str, str]] = ()) -> Summary:
    """Add up what some shards hold."""
    records = list(records)
    kept = [record for record in records if record.num_samples]
    everything = [*rejected, *(row for record in records for row in record.rejected)]
    return Summary(sum(r.num_samples for r in kept), len(kept), sum(r.num_bytes for r in kept), everything)


def open_output(plan: Plan) -> bool:
    """Make OUT ready to be written; True where all that is planned is there already.

    Raises UserError where OUT holds anything else: shards of two plans in one folder would be read as one data set.
    """
    others = [path for folder in {plan.out, *plan.folders} for path in _shards_in(folder)]  # before `begun`: it is written first
    begun = plan.work / "plan"
    if begun.exists():
        if begun.read_text() != plan.digest:
            raise UserError(f"an unfinished run with other input or options is here; {plan.out}; repeat its command to go on with it, "
                            "choose another OUT, or --overwrite")
        return False
    if _is_complete(plan):
        shutil.rmtree(plan.work, ignore_errors=True)
        return True
    if others:
        raise UserError(f"shards of another input or of other options are here; {others[0]}; choose another OUT, or --overwrite")
    plan.work.mkdir(parents=True, exist_ok=True)
    replace_text(begun, plan.digest)
    return False


def remove_output(plan: Plan) -> None:
    """Remove what an earlier run of this command may have left in OUT, and no other file."""
    for folder in {plan.out, *plan.folders}:
        names = {str(entry["name"]) for entry in _read_info(folder).get("shards", [])}
        for path in _shards_in(folder):
            numbered = re.fullmatch(re.escape(plan.stems[folder]) + r"-\d{4,}\.tar", path.name) if folder in plan.stems else None
            if path.name == "info.json" or path.name in names or numbered:
                path.unlink()
                index_path(path).unlink(missing_ok=True)
    (plan.out / "rejected.jsonl").unlink(missing_ok=True)
    shutil.rmtree(plan.work, ignore_errors=True)


def remove_leftovers(plan: Plan, numbers: Iterable[int]) -> None:
    """Remove the unfinished tars that a killed run left of some shards."""
    names = {plan.shards[number].name for number in numbers}
    for path in plan.work.glob("*.unfinished"):
        if path.name.rsplit(".", 2)[0] in names:
            path.unlink(missing_ok=True)


def finish(plan: Plan) -> Summary:
    """Leave the folders as they are meant to be found. Raises UserError where shards are missing, or nothing is left."""
    found = [read_record(shard.tar, plan.work) for shard in plan.shards]
    missing = [shard.name for shard, record in zip(plan.shards, found, strict=True) if record is None]
    if missing:
        raise UserError(f"{len(missing)} of {len(found)} shards are not written, such as {missing[0]}; {plan.out}; "
                        "run the parts that make them, or the command without --part and --finish")
    records = [record for record in found if record is not None]
    summary = summarize(records, plan.source.rejected)
    write_rejected(plan, summary.rejected)
    kept = {folder: [r for s, r in zip(plan.shards, records, strict=True) if s.folder == folder and r.num_samples] for folder in plan.folders}
    if not kept or not all(kept.values()):
        shutil.rmtree(plan.work, ignore_errors=True)
        where = next((folder for folder in kept if not kept[folder] and len(kept) > 1), plan.out)
        raise UserError(f"no usable image is left, {len(summary.rejected)} were rejected; {where}; {plan.out / 'rejected.jsonl'} has the causes")
    for folder in plan.folders:
        write_info(plan, folder, _close_gaps(plan, folder, kept[folder]), [r.stamp for r in records])
    for folder in plan.folders:
        for leftover in folder.glob(".*.idx.*"):
            leftover.unlink(missing_ok=True)
    shutil.rmtree(plan.work)
    return summary


def write_partial(plan: Plan) -> None:
    """After a failure: describe the shards that are complete, as far as the disk lets it."""
    try:
        for folder in plan.folders:
            found = [read_record(shard.tar, plan.work) for shard in plan.shards if shard.folder == folder]
            records = [record for record in found if record and record.num_samples]
            if records:
                write_info(plan, folder, records, [])
    except OSError:
        pass  # the error that led here is the one to tell
