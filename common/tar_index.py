"""Where each sample of a tar lies: scanned with `tarfile`, kept beside the tar in the format of NVIDIA DALI's wds2idx.

One text file per shard (`train-0000.idx` for `train-0000.tar`) serves two readers: ours, which needs no
second pass over the tar, and DALI's. A line per sample, `extension offset size name` per member.

    python -m common.check_shards shards/train        # reads every index and every sample
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

VERSION = "v1.2"
BLOCK = 512


class Member(NamedTuple):
    """One file of a sample: `offset` and `size` are bytes, the offset that of the data, not of the header."""

    extension: str
    offset: int
    size: int
    name: str


Sample = list[Member]


def index_path(tar: str | Path) -> Path:
    """`train-0000.tar` -> `train-0000.idx`."""
    return Path(tar).with_suffix(".idx")


def split_name(name: str) -> tuple[str, str]:
    """Key and extension of a member: the key ends at the first dot of the file name; dots in folders do not count."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension


def is_side_file(name: str) -> bool:
    """What macOS and editors put beside the files of a sample: hidden files and `__MACOSX` folders."""
    return name.rpartition("/")[2].startswith(".") or name.startswith("__MACOSX/") or "/__MACOSX/" in name


def scan_tar(path: str | Path) -> list[Sample]:
    """The samples of a tar in order. Raises UserError for a tar that is torn, or whose samples are.

    Members of one sample must stand next to each other, as every sequential reader needs them to.
    """
    samples: list[Sample] = []
    seen: dict[str, int] = {}
    for member in _members(path):
        key, extension = split_name(member.name)
        if key not in seen:
            seen[key] = len(samples)
            samples.append([])
        elif seen[key] != len(samples) - 1:
            raise UserError(f"the files of one sample are not next to each other; shard {path}, key {key}; "
                            "write it anew with its files sorted by name (tar --sort=name)")
        sample = samples[-1]
        if any(other.extension.lower() == extension.lower() for other in sample):
            raise UserError(f"two files with one name; shard {path}, key {key}, extension {extension}; "
                            "python -m common.check_shards --fix writes a clean copy")
        sample.append(member._replace(extension=extension))
    return samples


def _members(path: str | Path) -> list[Member]:
    size = os.path.getsize(path)
    try:
        with tarfile.open(path, "r:") as tar:
            members = [Member("", m.offset_data, m.size, m.name) for m in tar if m.isfile() and not is_side_file(m.name)]
            end = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if size == 0:
            return []
        raise UserError(f"not a readable tar ({error}); shard {path}; write or download it again") from None
    if members and members[-1].offset + members[-1].size > size or end > size:
        raise UserError(f"the tar is cut short; shard {path}; write or download it again")
    if _unread_bytes(path, end, size):
        raise UserError(f"the tar is damaged after byte {end}; shard {path}; write or download it again")
    return members


def _unread_bytes(path: str | Path, end: int, size: int) -> bool:
    """Whether anything but zeros follows where `tarfile` stopped: it takes a torn header for the end of the tar."""
    with open(path, "rb") as file:
        file.seek(min(end, size))
        return any(any(block) for block in iter(lambda: file.read(1 << 20), b""))


def write_index(tar: str | Path, samples: list[Sample]) -> None:
    """Write the index of `tar` beside it, whole or not at all."""
    lines = [f"{VERSION} {len(samples)}"]
    lines += [" ".join(f"{m.extension} {m.offset} {m.size} {m.name}" for m in sample) for sample in samples]
    target = index_path(tar)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


def read_index(tar: str | Path) -> list[Sample] | None:
    """The samples as the index beside `tar` has them; None where it is missing, stale or not to be trusted."""
    path = index_path(tar)
    try:
        status, tar_status = path.stat(), os.stat(tar)
        if status.st_mtime_ns < tar_status.st_mtime_ns:
            return None
        lines = path.read_text().split("\n")
        version, count = lines[0].split()
        samples = [_parse(line) for line in lines[1 : int(count) + 1]]
    except (OSError, ValueError):
        return None
    if version != VERSION or len(samples) != int(count) or not _matches(tar, samples, tar_status.st_size):
        return None
    return samples


def _parse(line: str) -> Sample:
    words = line.split(" ")
    if not words[0] or len(words) % 4:  # a name with a blank in it cannot be told apart: scan instead
        raise ValueError(line)
    return [Member(words[i], int(words[i + 1]), int(words[i + 2]), words[i + 3]) for i in range(0, len(words), 4)]


def _matches(tar: str | Path, samples: list[Sample], size: int) -> bool:
    """Whether the first and last member stand where the index says, and nothing but zeros comes after."""
    if not samples:
        return size <= 20 * BLOCK
    last = samples[-1][-1]
    end = last.offset + -(-last.size // BLOCK) * BLOCK
    if end > size:
        return False
    with open(tar, "rb") as file:
        for member in (samples[0][0], last):
            file.seek(member.offset - BLOCK)
            try:
                header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                return False
            if header.size != member.size:
                return False
    return not _unread_bytes(tar, end, size)
