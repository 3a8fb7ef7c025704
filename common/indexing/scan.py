"""One pass over a shard that nothing is known of: how many samples, which labels. Runs in several processes at once.

    >>> scan_shard((0, ScanJob("train-0000.tar", Storage(), Fields(), strict=True)))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.access.storage import Storage
from common.access.urls import is_command, shown
from common.errors import UserError, printable
from common.fields import TORN_SHARD, Fields, RawSample, SampleError, lost_sample
from common.tars.index import load_samples
from common.tars.samples import TornTar, sample_faults, split_name
from common.tars.stream import stream_samples


@dataclass(frozen=True)
class ScanJob:
    """`fields` is None where labels are not asked for. With `strict`, a torn sample is an error."""

    path: str
    storage: Storage
    fields: Fields | None
    strict: bool


@dataclass
class Scan:
    """What was found. `names`: label -> category. `error`: what the first sample without a label lacks."""

    num_samples: int = 0
    labels: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    is_torn: bool = False


def scan_shard(numbered: tuple[int, ScanJob]) -> tuple[int, Scan]:
    """Count, and look at every label if asked to. A torn tar is an error, or else has a lost sample at its end."""
    number, job = numbered
    scan = Scan()
    for sample in _samples(job):
        scan.num_samples += 1
        scan.is_torn |= sample.cause == TORN_SHARD
        if job.strict and sample.fault:
            raise UserError(f"{sample.fault}; shard {shown(job.path)}, key {printable(sample.key)}; "
                            "python -m common.check_shards --fix OUT writes clean shards, --on_error skip goes on "
                            "without such samples")
        if job.fields is not None:
            _look(scan, sample, job.fields)
    return number, scan


def first_image_field(paths: Iterable[str], storage: Storage) -> str | None:
    """Which field holds the image in the first sample that there is; None where it cannot be told, as of a command."""
    for path in paths:
        if is_command(path):
            return None
        try:
            with storage.open(path) as file:
                sample = next(stream_samples(file, path, shown(path)), None)
            if sample is not None:
                return Fields().image_name(sample.fields)
        except (TornTar, SampleError):  # told when it is read
            return None
    return None


def _look(scan: Scan, sample: RawSample, fields: Fields) -> None:
    try:
        sample.check()
        label, category = fields.label(sample), fields.category(sample)
    except SampleError as error:  # counted, with shard and key, when training reaches it
        scan.error = scan.error or f"{error}; key {printable(sample.key)}"
        return
    scan.labels.add(label)
    if category is not None:
        scan.names[label] = category


def _samples(job: ScanJob) -> Iterator[RawSample]:
    count = 0
    try:
        for sample in _all_samples(job):
            yield sample
            count += 1
    except TornTar as error:
        if job.strict:
            raise
        yield lost_sample(job.path, count, error.fault)


def _all_samples(job: ScanJob) -> Iterator[RawSample]:
    """Raises TornTar behind the last whole one."""
    if not job.storage.is_local(job.path):
        with job.storage.open(job.path) as file:
            yield from stream_samples(file, job.path, shown(job.path), warn=True)
        return
    with job.storage.held(job.path) as (path, file):
        tear = None
        try:
            samples = load_samples(path, warn=True)
        except TornTar as error:
            samples, tear = error.samples, error
        faults = sample_faults(samples)
        for place, members in enumerate(samples):
            data = {member.extension.lower(): b"" for member in members}
            for member in members if job.fields is not None else ():
                if member.extension.lower() in _label_fields(job.fields):
                    data[member.extension.lower()] = os.pread(file, member.size, member.offset)
            yield RawSample(job.path, place, split_name(members[0].name)[0], data, faults.get(place))
        if tear is not None:
            raise tear


def _label_fields(fields: Fields | None) -> tuple[str, ...]:
    name = fields.label_field if fields else None
    return ("json", "cls") if name is None else (name,)
