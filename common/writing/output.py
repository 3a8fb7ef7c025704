"""The folders that shards are written to: refused, gone on with, or finished.

    OUT/.unfinished/     while the work lasts: the plan's digest, unfinished tars, a record of each shard
    OUT/info.json        when every shard is there; or OUT/train/info.json and OUT/val/info.json
    OUT/rejected.jsonl   what could not be used, where there is such a thing

Called by one process at a time, see `work_lock`, but for `open_output`, which machines that share the work may call at
once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import read_json, write_atomic
from common.indexing.info import INFO, description
from common.tars.index import index_path
from common.writing.shard_plan import ShardPlan
from common.writing.work_lock import lock
from common.writing.writer import Record, input_stamp, read_record

REJECTED = "rejected.jsonl"


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


def open_output(plan: ShardPlan) -> Summary | None:
    """Make OUT ready to be written. Where all that is planned is there already: what it holds, instead of None.

    Raises UserError where OUT holds anything else: shards of two plans in one folder would be read as one data set.
    """
    others = [path for folder in {plan.out, *plan.folders} for path in _shards_in(folder)]  # seen before the mark
    mark = plan.work / plan.mark
    begun = list(plan.work.glob("plan-*"))
    if begun and begun != [mark]:
        raise UserError(f"an unfinished run with other input or options is here; {plan.out}; "
                        "give its command again to go on with it, choose another OUT, or add --overwrite")
    if begun:
        return None
    if _is_complete(plan):
        shutil.rmtree(plan.work, ignore_errors=True)
        return _summary_of_finished(plan)
    if others:
        raise UserError(f"shards of another input or of other options are here; {others[0]}; "
                        "choose another OUT, or add --overwrite")
    plan.work.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return None


def remove_output(plan: ShardPlan) -> None:
    """Remove what an earlier run of this command left in OUT, whatever its options; no other file. Raises UserError
    where one is at work."""
    for mark in plan.work.glob("plan-*"):
        lock(mark).close()
    stems = {shard.tar.stem.rpartition("-")[0] for shard in plan.shards}
    for folder in {plan.out, *plan.folders}:
        listed = {entry["name"] for entry in _read_info(folder).get("shards", [])}
        for path in _shards_in(folder):
            name, _, number = path.stem.rpartition("-")
            if path.name == INFO or path.name in listed or (name in stems and number.isdecimal()):
                path.unlink()
                index_path(path).unlink(missing_ok=True)
    (plan.out / REJECTED).unlink(missing_ok=True)
    shutil.rmtree(plan.work, ignore_errors=True)


def remove_leftovers(plan: ShardPlan, numbers: Iterable[int]) -> None:
    """Remove the unfinished files that a killed run left of some shards."""
    stems = {plan.shards[number].tar.stem for number in numbers}
    unfinished = [*plan.work.glob("*.unfinished")]
    unfinished += [path for folder in plan.folders for path in folder.glob(".*.idx.*")]
    for path in unfinished:
        if re.split(r"\.tar\.|\.idx\.", path.name)[0].lstrip(".") in stems:
            path.unlink(missing_ok=True)


def finish(plan: ShardPlan) -> Summary:
    """Leave the folders as they are meant to be found. Raises UserError where shards are missing or nothing is left."""
    found = [read_record(shard.tar, plan.work) for shard in plan.shards]
    missing = [shard.name for shard, record in zip(plan.shards, found, strict=True) if record is None]
    if missing:
        raise UserError(f"{len(missing)} of {len(found)} shards are not written, such as {missing[0]}; {plan.out}; "
                        "run the parts that make them, or the command without --part and --finish")
    records = [record for record in found if record is not None]
    summary = summarize(records, plan.source.rejected)
    _write_rejected(plan, summary.rejected)
    by_folder = {folder: [records[number] for number in _numbers(plan, folder)] for folder in plan.folders}
    empty = [folder for folder, members in by_folder.items() if not any(record.num_samples for record in members)]
    if empty or not by_folder:
        if not summary.num_samples:
            shutil.rmtree(plan.work)
        raise UserError(f"no usable image is left, {len(summary.rejected)} are rejected; "
                        f"{empty[0] if empty else plan.out}; the causes are in {plan.out / REJECTED}")
    for folder, members in by_folder.items():
        kept = _close_gaps(plan, folder, [record for record in members if record.num_samples])
        _write_info(plan, folder, kept, _identity(plan, [record.stamp for record in members]))
    shutil.rmtree(plan.work)
    return summary


def write_partial(plan: ShardPlan) -> None:
    """After a failure: describe the shards that are complete, as far as the disk lets it."""
    with suppress(OSError, UserError):  # the error that led here is the one to tell
        for folder in plan.folders:
            found = [read_record(plan.shards[number].tar, plan.work) for number in _numbers(plan, folder)]
            records = [record for record in found if record and record.num_samples]
            if records:
                _write_info(plan, folder, records, identity="")


def _close_gaps(plan: ShardPlan, folder: Path, records: list[Record]) -> list[Record]:
    """Number shards anew where one before them holds no usable image: readers take a gap for a missing shard."""
    names = [plan.shards[number].name for number in _numbers(plan, folder)][: len(records)]
    for record, name in zip(records, names, strict=True):
        if record.tar != name:
            os.replace(folder / record.tar, folder / name)
            os.replace(index_path(folder / record.tar), index_path(folder / name))
    return [record._replace(tar=name) for record, name in zip(records, names, strict=True)]


def _write_info(plan: ShardPlan, folder: Path, records: list[Record], identity: str) -> None:
    shards = [(record.tar, record.num_samples, record.num_bytes) for record in records]
    info = description(shards, plan.source.num_classes, plan.source.classes) | {"plan": identity}
    write_atomic(folder / INFO, json.dumps(info, indent=1) + "\n")


def _write_rejected(plan: ShardPlan, rejected: Sequence[tuple[str, str]]) -> None:
    if rejected:
        plan.out.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"path": path, "cause": cause}) + "\n" for path, cause in rejected]
        write_atomic(plan.out / REJECTED, "".join(rows))
    else:
        (plan.out / REJECTED).unlink(missing_ok=True)


def _is_complete(plan: ShardPlan) -> bool:
    """Whether an earlier run made all of this, from inputs that have not changed since."""
    for folder in plan.folders:
        info = _read_info(folder)
        sizes = {folder / entry["name"]: entry["bytes"] for entry in info.get("shards", [])}
        if not sizes or not all(path.exists() and path.stat().st_size == size for path, size in sizes.items()):
            return False
        stamps = [input_stamp(plan.files(number)) for number in _numbers(plan, folder)]
        if info.get("plan") != _identity(plan, stamps):
            return False
    return bool(plan.folders)


def _summary_of_finished(plan: ShardPlan) -> Summary:
    shards = [entry for folder in plan.folders for entry in _read_info(folder)["shards"]]
    rejected: list[tuple[str, str]] = []
    with suppress(OSError, ValueError, KeyError):
        rows = [json.loads(line) for line in (plan.out / REJECTED).read_text().splitlines()]
        rejected = [(row["path"], row["cause"]) for row in rows]
    return Summary(sum(e["samples"] for e in shards), len(shards), sum(e["bytes"] for e in shards), rejected)


def _identity(plan: ShardPlan, stamps: list[str]) -> str:
    """What tells a finished folder from every other: the plan, and the sizes and times of its inputs."""
    return hashlib.sha256(json.dumps([plan.digest, stamps]).encode()).hexdigest()[:16]


def _numbers(plan: ShardPlan, folder: Path) -> list[int]:
    """The shards of one folder, as numbers of the plan."""
    return [number for number, shard in enumerate(plan.shards) if shard.folder == folder]


def _shards_in(folder: Path) -> list[Path]:
    """What a reader would take for shards, or for what describes them."""
    found = folder.glob("*") if folder.is_dir() else ()
    return sorted(path for path in found if path.name == INFO or path.suffix == ".tar")


def _read_info(folder: Path) -> dict[str, Any]:
    info = read_json(folder / INFO)
    shards = info.get("shards", [])
    keys = {"name", "samples", "bytes"}
    is_ours = isinstance(shards, list) and all(isinstance(entry, dict) and keys <= set(entry) for entry in shards)
    return info if is_ours else {}
