"""One tar shard, written from start to end by one process: its bytes, its index, its record.

A shard stands under its own name only when it is complete, and its bytes depend on the job alone. The
record (what went in, what was rejected) is written last: where it is found, the shard need not be made again.

    record = write_shard(job)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image

from common.errors import UserError
from common.files import check_regular, read_json
from common.tars.format import BLOCK, MAX_MEMBER
from common.tars.index import index_path, write_index
from common.tars.samples import Member, Sample
from common.writing.image_files import Rejected, encode, prepare

Stamp = tuple[int, int] | None  # size in bytes and time of change in ns of an input; None for one that is no file
GO_ON = "free some space or mend the disk, then run the same command again: it goes on where it stopped"
# A ustar header around name, size and checksum: mode 644, owner 0, time 0, a plain file. Made by hand, since `tarfile`
# takes 20 µs for one, which is as long as `tar` takes for a whole image.
_OWNER = b"0000644\0" + 2 * b"0000000\0"
_REST = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_REST) + 8 * ord(" ")  # the checksum counts its own field as blanks


class Entry(NamedTuple):
    """One input of a shard. `content` is the path of an image file, or an image that has none."""

    content: str | Image.Image
    path: str  # relative to the source: what a rejected input is called
    key: str
    extension: str
    label: int
    category: str


@dataclass(frozen=True)
class ShardJob:
    """All that is needed to write one shard, wherever that happens."""

    number: int  # of the shard in the plan; its samples carry it as "write worker id"
    tar: Path
    work: Path  # folder of unfinished tars and of records, on the same file system
    entries: list[Entry]
    verify: str
    resize: int | None


class Record(NamedTuple):
    """What became of a job. `first` is the name of the tar's first member, which tells shards of one plan apart."""

    tar: str
    first: str
    num_samples: int
    num_bytes: int
    stamp: str  # identity of the inputs: their sizes and times
    rejected: list[tuple[str, str]]  # path, cause


def write_shard(job: ShardJob) -> Record:
    """Write shard, index and record. A shard without a usable input leaves a record alone. Raises UserError."""
    job.work.mkdir(parents=True, exist_ok=True)
    job.tar.parent.mkdir(parents=True, exist_ok=True)
    unfinished = job.work / f"{job.tar.name}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb", buffering=1 << 20) as tar:
            samples, stamps, rejected = _write_samples(tar, job)
            tar.write(bytes(2 * BLOCK))
            num_bytes = tar.tell()
            tar.flush()
            os.fsync(tar.fileno())
        if samples:
            os.replace(unfinished, job.tar)
            write_index(job.tar, samples)
        else:
            job.tar.unlink(missing_ok=True)  # of an earlier run, when its inputs could still be used
        first = samples[0][0].name if samples else ""
        record = Record(job.tar.name, first, len(samples), num_bytes, _digest(stamps), rejected)
        _record_path(job.tar, job.work).write_text(json.dumps(record._asdict()))  # a torn one is no record
        return record
    except OSError as error:
        raise UserError(f"cannot write a shard ({error.strerror}); {job.tar}; {GO_ON}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def read_record(tar: Path, work: Path) -> Record | None:
    """The record of a shard that was written before and is still there. `stamp` tells if its inputs are the same."""
    try:
        record = Record(**read_json(_record_path(tar, work)))
        if record.num_samples and not (_holds(tar, record) and index_path(tar).exists()):
            return None
        return record._replace(rejected=[(path, cause) for path, cause in record.rejected])
    except (ValueError, TypeError):
        return None


def _record_path(tar: Path, work: Path) -> Path:
    return work / f"{tar.stem}.json"


def _holds(tar: Path, record: Record) -> bool:
    """Whether `tar` is the shard that a record speaks of."""
    try:
        with open(tar, "rb") as file:
            name = file.read(100).rstrip(b"\0").decode("utf-8", "replace")
            return name == record.first and os.fstat(file.fileno()).st_size == record.num_bytes
    except OSError:
        return False


def input_stamp(files: Iterable[str | None]) -> str:
    """Sizes and times of the inputs, as a digest: equal to a record's as long as no input was changed."""
    return _digest([_file_stamp(file) for file in files])


def _write_samples(tar: BinaryIO, job: ShardJob) -> tuple[list[Sample], list[Stamp], list[tuple[str, str]]]:
    samples: list[Sample] = []
    stamps: list[Stamp] = []
    rejected: list[tuple[str, str]] = []
    place = 0
    for entry in job.entries:
        stamps.append(None)
        try:
            if isinstance(entry.content, str):
                data, stamps[-1] = read_image(entry.content)
                data, extension = prepare(data, entry.extension, job.verify, job.resize)
            else:
                data, extension = encode(entry.content, job.resize)
        except Rejected as error:
            rejected.append((entry.path, str(error)))
            stamps[-1] = _file_stamp(entry.content if isinstance(entry.content, str) else None)
            continue
        about = {"write worker id": job.number, "count": len(samples), "category": entry.category, "label": entry.label}
        text = json.dumps(about).encode()
        image_name, json_name = f"{entry.key}.{extension}", f"{entry.key}.json"
        text_place = place + BLOCK + _padded(len(data))
        tar.write(header(image_name.encode(), len(data)))
        tar.write(data)
        tar.write(bytes(-len(data) % BLOCK) + header(json_name.encode(), len(text)) + text + bytes(-len(text) % BLOCK))
        image = Member(extension, place + BLOCK, len(data), image_name)
        samples.append([image, Member("json", text_place + BLOCK, len(text), json_name)])
        place = text_place + BLOCK + _padded(len(text))
    return samples, stamps, rejected


def header(name: bytes, size: int) -> bytes:
    """The 512 bytes before a file of a tar: those of `tarfile` in ustar format. `name` takes at most 100 bytes."""
    front = name.ljust(100, b"\0") + _OWNER + b"%011o\0" % size + b"00000000000\0"
    return front + b"%06o\0 " % (sum(front) + _FIXED_SUM) + _REST


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def read_image(path: str) -> tuple[bytes, Stamp]:
    """A whole file, with as few system calls as can be, since there may be millions: `open` makes twice as many. Raises
    Rejected."""
    try:
        status = check_regular(path)
        if status.st_size > MAX_MEMBER:
            raise Rejected(f"{status.st_size} bytes, more than {MAX_MEMBER}")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(file, status.st_size)
        finally:
            os.close(file)
    except OSError as error:
        raise Rejected(error.strerror or str(error)) from None
    except ValueError:  # a NUL, or what no encoding has
        raise Rejected("not a name that a file can have") from None
    if len(data) != status.st_size:
        raise Rejected("was changed while it was read")
    return data, (status.st_size, status.st_mtime_ns)


def _file_stamp(path: str | None) -> Stamp:
    try:
        status = os.stat(path) if path is not None else None
    except (OSError, ValueError):
        return None
    return status and (status.st_size, status.st_mtime_ns)


def _digest(stamps: list[Stamp]) -> str:
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
