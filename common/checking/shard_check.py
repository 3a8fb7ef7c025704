"""One shard, looked at as closely as can be: every file found even if the tar is torn, every sample read as training
would.

    report = check_shard(CheckJob("train-0000.tar", "train-0000", Storage(), Fields()))
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from common.access.storage import Storage
from common.access.urls import shown
from common.checking.rescue import CleanShard
from common.errors import UserError, one_line, printable
from common.fields import Fields, RawSample, SampleError
from common.files import remedy
from common.tars.format import BLOCK, ByteFile, TarError, Walker, is_header
from common.tars.index import check_not_cut, index_path, read_index
from common.tars.samples import Member, Sample, is_sample_file, no_end, sample_faults, split_name


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `key` is empty and `count` -1 where it is the shard itself."""

    cause: str
    detail: str
    shard: str
    key: str = ""
    count: int = -1


@dataclass(frozen=True)
class CheckJob:
    """What to look at; `out`, if given, is where a clean copy goes."""

    path: str
    name: str
    storage: Storage
    fields: Fields
    out: Path | None = None
    throws_away: bool = False  # the plain copy of a shard that is compressed or elsewhere


@dataclass
class ShardReport:
    """What was found in one shard."""

    job: CheckJob
    num_samples: int = 0
    num_members: int = 0
    num_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    labels: Counter[int] = field(default_factory=Counter)
    names: dict[int, str] = field(default_factory=dict)
    num_saved: int = 0
    bytes_saved: int = 0


def check_shard(job: CheckJob) -> ShardReport:
    """Read everything in a shard. What is wrong is in the report; raises UserError where a clean copy cannot be
    written."""
    report = ShardReport(job)
    clean = None
    try:
        clean = CleanShard(job.out) if job.out else None
        for sample in _readable(report):
            if _look(sample, report) and clean:
                _save(clean, sample, report)
        if clean:
            report.num_saved, report.bytes_saved = clean.num_samples, clean.finish()
    except OSError as error:
        raise UserError(f"cannot write a shard ({error.strerror}); {job.out}; {remedy(error)}choose another "
                        "OUT") from None
    finally:
        if clean:
            clean.discard()
    return report


def _readable(report: ShardReport) -> Iterator[RawSample]:
    """The samples of a shard, as far as it can be read."""
    job = report.job
    try:
        with job.storage.held(job.path) as (path, file):
            report.num_bytes = os.fstat(file).st_size
            try:
                yield from _samples(path, file, report)
            finally:
                if job.throws_away and path != job.path:
                    os.unlink(path)
    except UserError as error:
        report.problems.append(Problem("unreadable shard", str(error), job.name))
    except OSError as error:
        report.problems.append(Problem("unreadable shard", f"cannot be read ({error.strerror})", job.name))


def _samples(path: str, file: int, report: ShardReport) -> Iterator[RawSample]:
    """The samples of a tar by key, wherever their files stand; those that no reader would find so are problems."""
    by_key: dict[str, list[Member]] = {}
    neighbours: list[list[Member]] = []
    latest = None
    for member in _members(path, report):
        key, extension = split_name(member.name)
        if key != latest:
            neighbours.append([])
        latest = key
        by_key.setdefault(key, []).append(member._replace(extension=extension.lower()))
        neighbours[-1].append(member)
    report.num_samples = len(neighbours)
    _compare_index(path, neighbours, report)
    places: dict[str, int] = {}
    for place, members in enumerate(neighbours):
        places.setdefault(split_name(members[0].name)[0], place)
    faults = sample_faults(neighbours)
    for key, members in by_key.items():
        place = places[key]
        if place in faults:
            report.problems.append(Problem("torn sample", faults[place], report.job.name, key, place))
        data: dict[str, bytes] = {}
        fault = None
        for member in members:
            content = os.pread(file, member.size, member.offset)
            if data.setdefault(member.extension, content) != content:
                fault = "two different files with one name"
        yield RawSample(report.job.name, place, key, data, fault)


def _members(path: str, report: ShardReport) -> Iterator[Member]:
    """Every file that belongs to a sample; behind damage, the walk goes on at the next header."""
    with open(path, "rb") as stream:
        source = ByteFile(stream)
        while source.position < source.size:
            walker = Walker(source)
            try:
                for entry in walker:
                    try:
                        if is_sample_file(entry):
                            report.num_members += 1
                            yield Member(split_name(entry.name)[1], entry.offset, entry.size, entry.name)
                    except TarError as error:
                        report.problems.append(Problem("unreadable file", str(error), report.job.name, entry.name))
                if not walker.has_end and report.num_members:
                    report.problems.append(Problem("damaged tar", no_end(), report.job.name))
                return
            except TarError as error:
                report.problems.append(Problem("damaged tar", str(error), report.job.name))
                source.position = _next_header(source)


def _next_header(source: ByteFile) -> int:
    """The next place where a member begins, at or after the position of the source; the end where there is none."""
    place = source.position - source.position % BLOCK
    while place < source.size:
        block = os.pread(source.file, BLOCK, place)
        if block[257:262] == b"ustar" and is_header(block):
            return place
        place += BLOCK
    return source.size


def _compare_index(path: str, samples: list[Sample], report: ShardReport) -> None:
    """Hold every entry of the index against the tar: training believes the first and the last for all of them."""
    try:
        check_not_cut(path, samples)
    except UserError as error:
        if not report.problems:
            report.problems.append(Problem("damaged tar", str(error), report.job.name))
    promised = read_index(path)
    if promised is None or any(problem.cause == "damaged tar" for problem in report.problems):
        return
    wrong = [(place, found or told) for place, (told, found) in enumerate(zip_longest(promised, samples))
             if told != found]
    if wrong:
        (place, sample), index = wrong[0], index_path(path).name
        words = f"{index} has {len(wrong)} samples at other places than the tar: remove it, and it is made anew"
        report.problems.append(Problem("wrong index", words, report.job.name, split_name(sample[0].name)[0], place))


def _look(sample: RawSample, report: ShardReport) -> bool:
    """Use a sample as training would. Whether it could be used."""
    from common.images.decode import DecodeError, check_image  # torch: a second, once in every process

    fields = report.job.fields
    try:
        if sample.fault:
            raise SampleError("ambiguous sample", sample.fault)
        label = fields.label(sample)
        check_image(bytes(fields.image(sample)))
    except (SampleError, DecodeError) as error:
        cause = getattr(error, "cause", "corrupt")
        report.problems.append(Problem(cause, str(error), sample.shard, sample.key, sample.count))
        return False
    report.labels[label] += 1
    category = fields.category(sample)
    if category is not None:
        report.names[label] = category
    return True


def _save(clean: CleanShard, sample: RawSample, report: ShardReport) -> None:
    try:
        clean.add(sample)
    except SampleError as error:
        report.problems.append(Problem("not saved", str(error), sample.shard, sample.key, sample.count))


def shown_problem(problem: Problem) -> str:
    """One line, whatever a key or a message holds."""
    place = f", key {printable(problem.key)}" if problem.key else ""
    place += f", count {problem.count}" if problem.count >= 0 else ""
    return one_line(f"{shown(problem.shard)}{place}: {problem.detail}")
