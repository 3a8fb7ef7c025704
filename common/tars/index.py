"""Where each sample of a tar lies: found by a walk over its headers, kept beside the tar in the format of NVIDIA
DALI's wds2idx.

One text file per shard (`train-0000.idx` for `train-0000.tar`) serves two readers: ours, which needs no
second pass over the tar, and DALI's. A line per sample, `extension offset size name` per member.

    python -m common.check_shards shards/train        # reads every index and every sample
"""

from __future__ import annotations

import os
import tarfile
from itertools import chain
from pathlib import Path

from common.files import regular, write_shared
from common.tars.format import BLOCK, MAX_MEMBER
from common.tars.samples import Member, Sample, TornTar, walk_tar, warn_of_no_end

VERSION = "v1.2"


def index_path(tar: str | Path) -> Path:
    """`train-0000.tar` -> `train-0000.idx`."""
    return Path(tar).with_suffix(".idx")


def load_samples(path: str | Path, warn: bool = False) -> list[Sample]:
    """Where each sample of a tar lies: from the index beside it, else by a scan that is kept where it can be, unless
    the tar may have been cut. Raises TornTar."""
    samples = read_index(path)
    if samples is None:
        samples, has_end = walk_tar(path)
        check_not_cut(path, samples)
        if has_end or not samples:
            keep_index(path, samples)
        elif warn:
            warn_of_no_end(path, len(samples))
    return samples


def write_index(tar: str | Path, samples: list[Sample]) -> None:
    """Write the index of `tar` beside it, whole or not at all. Names with blanks, which the format cannot hold: not at
    all."""
    if any(word.split() != [word] for sample in samples for m in sample for word in (m.name, m.extension)):
        return
    lines = [f"{VERSION} {len(samples)}"]
    lines += [" ".join(f"{m.extension} {m.offset} {m.size} {m.name}" for m in sample) for sample in samples]
    write_shared(index_path(tar), "\n".join(lines) + "\n")


def keep_index(tar: str | Path, samples: list[Sample]) -> None:
    """Write the index where that is possible: not over a file of another kind, not into a folder that is read-only."""
    try:
        with open(index_path(tar), "rb", opener=regular) as file:
            if not file.read(2) == b"v1":
                return
    except FileNotFoundError:
        pass
    except OSError:
        return
    try:
        write_index(tar, samples)
    except OSError:
        pass  # every process that needs this shard walks over it for itself


def read_index(tar: str | Path) -> list[Sample] | None:
    """The samples as the index beside `tar` has them; None where it is missing, stale or not to be trusted."""
    try:
        status, tar_status = index_path(tar).stat(), os.stat(tar)
        if status.st_mtime_ns < tar_status.st_mtime_ns:
            return None
        samples = _parse_index(tar, tar_status.st_size)
    except (OSError, ValueError):
        return None
    return samples if _matches(tar, samples, tar_status.st_size) else None


def check_not_cut(tar: str | Path, samples: list[Sample]) -> None:
    """Raise TornTar where an index, though it does not fit, shows that the tar went on: the only sign of a cut
    between members."""
    try:
        promised = _parse_index(tar, os.path.getsize(tar))
    except (OSError, ValueError):
        return
    files, promised_files = [list(chain.from_iterable(found)) for found in (samples, promised)]
    if len(promised_files) > len(files) and promised_files[: len(files)] == files:
        raise TornTar(f"the index promises {len(promised_files)} files, the tar holds {len(files)}", f"shard {tar}; it "
                      f"was cut: copy it again, or remove {index_path(tar).name} if it is meant to be so", samples)


def _parse_index(tar: str | Path, tar_size: int) -> list[Sample]:
    """Raises ValueError for anything but an index of this format. Nothing in it is believed before `_matches`."""
    path = index_path(tar)
    if path.stat().st_size > 2 * tar_size + BLOCK * 1024:
        raise ValueError("longer than what it describes")
    with open(path, encoding="utf-8", errors="surrogateescape", opener=regular) as file:
        lines = file.read().split("\n")
    version, count = lines[0].split()
    if version != VERSION or lines[-1] or int(count) != len(lines) - 2:
        raise ValueError(lines[0])
    return [_parse(line) for line in lines[1:-1]]


def _parse(line: str) -> Sample:
    words = line.split(" ")
    if not words[0] or len(words) % 4:
        raise ValueError(line)
    return [Member(words[i], int(words[i + 1]), int(words[i + 2]), words[i + 3]) for i in range(0, len(words), 4)]


def _matches(tar: str | Path, samples: list[Sample], size: int) -> bool:
    """Whether all lies within the tar, the first and last member stand where the index says, and only zeros come
    after."""
    if not samples:
        return size <= 20 * BLOCK
    if any(m.offset < BLOCK or not 0 <= m.size <= min(size - m.offset, MAX_MEMBER)
           for sample in samples for m in sample):
        return False
    last = samples[-1][-1]
    with open(tar, "rb") as file:
        for member in (samples[0][0], last):
            file.seek(member.offset - BLOCK)
            try:
                header = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                return False
            if header.size != member.size:
                return False
        file.seek(last.offset + -(-last.size // BLOCK) * BLOCK)
        return not any(any(block) for block in iter(lambda: file.read(1 << 20), b""))
