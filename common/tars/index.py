"""Where each sample of a tar lies: found by a walk over its headers, kept beside the tar in the format of NVIDIA
DALI's wds2idx.

One text file per shard (`train-0000.idx` for `train-0000.tar`) serves two readers: ours, which needs no
second pass over the tar, and DALI's. A line per sample, `extension offset size name` per member.

    python -m common.check_shards shards/train        # reads every index and every sample
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.tars.format import BLOCK, Entry, FileSource, TarError, Walker

VERSION = "v1.2"
RESCUE = "copy or write it again, or save what can be saved: python -m common.check_shards --fix OUT"


class Member(NamedTuple):
    """One file of a sample: `offset` and `size` are bytes, the offset that of the data, not of the header."""

    extension: str
    offset: int
    size: int
    name: str


Sample = list[Member]


class TornTar(UserError):
    """A tar that ends too early or is damaged within. `fault` is what is wrong, `samples` what is whole before it."""

    def __init__(self, fault: str, rest: str, samples: list[Sample] | None = None):
        super().__init__(f"{fault}; {rest}")
        self.fault, self.samples = fault, samples or []

    def __reduce__(self) -> tuple:
        fault, _, rest = str(self).partition("; ")
        return TornTar, (fault, rest, self.samples)


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


def is_sample_file(entry: Entry) -> bool:
    """Whether a member belongs to a sample: a file with an extension. Raises TarError for a link to one.

    `__NAME__` at the top, which webdataset keeps for itself, holds no sample either.
    """
    if is_side_file(entry.name) or not split_name(entry.name)[1] or entry.kind == "other" or _is_meta(entry.name):
        return False
    if entry.kind == "link":
        raise TarError(f"{entry.name} is a link without data: pack with tar --dereference --hard-dereference")
    return True


def _is_meta(name: str) -> bool:
    top, _, _ = name.partition("/")
    return len(top) > 3 and top.startswith("__") and top.endswith("__")


def sample_faults(samples: Iterable[Sample]) -> dict[int, str]:
    """What is wrong with the samples of one tar, by place: two files of one name, or files that are not neighbours."""
    keys = [split_name(sample[0].name)[0] for sample in samples]
    uses = Counter(keys) if len(set(keys)) < len(keys) else {}
    faults = {place: scattered() for place, key in enumerate(keys) if uses and uses[key] > 1}
    for place, sample in enumerate(samples):
        if len(sample) > 1 and len({member.extension.lower() for member in sample}) < len(sample):
            faults[place] = duplicate(_twice(member.extension for member in sample))
    return faults


def scattered() -> str:
    """What is told of a sample whose files stand in several places."""
    return "the files of one sample are not next to each other (pack them again sorted by name: tar --sort=name)"


def duplicate(extension: str) -> str:
    """What is told of a sample that holds the same file twice."""
    return f"two files with the extension {extension}"


def _twice(extensions: Iterable[str]) -> str:
    return Counter(extension.lower() for extension in extensions).most_common(1)[0][0]


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


def has_end_mark(path: str | Path) -> bool:
    """Whether a plain tar ends in zeros, as every tar does that was written to its end."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - BLOCK, 0))
        return not any(file.read())


def warn_of_no_end(path: str | Path, num_samples: int) -> None:
    """Called where a tar is looked at for the first time: by rank 0, or when it is downloaded."""
    print(f"warning: {no_end()}, {num_samples} samples are left; shard {path}; {RESCUE}", file=sys.stderr, flush=True)


def no_end() -> str:
    """What is told of a tar without the zeros that end one."""
    return "no end mark, the tar was probably cut between two files"


def scan_tar(path: str | Path, shown: str = "") -> list[Sample]:
    """The samples of a tar in order, whether it has an end mark or not. See walk_tar."""
    return walk_tar(path, shown)[0]


def walk_tar(path: str | Path, shown: str = "") -> tuple[list[Sample], bool]:
    """The samples of a tar in order, neighbours that share a key; and whether its end mark is there. Raises TornTar for
    one that is torn, naming it as `shown`.

    Faults of single samples are left in, see `sample_faults`: who skips errors skips them one by one.
    """
    samples: list[Sample] = []
    latest = None
    size = os.path.getsize(path) if os.path.exists(path) else 0
    try:
        with open(path, "rb") as file:
            walker = Walker(FileSource(file))
            for entry in filter(is_sample_file, walker):
                key, extension = split_name(entry.name)
                if key != latest:
                    samples.append([])
                    latest = key
                samples[-1].append(Member(extension, entry.offset, entry.size, entry.name))
    except TarError as error:
        if samples and samples[-1][-1].offset + samples[-1][-1].size > size:
            samples.pop()  # the tear goes through it
        raise TornTar(str(error), f"shard {shown or path}; {RESCUE}", samples) from None
    except OSError as error:
        raise UserError(f"a shard cannot be read ({error.strerror}); {path}; check its permissions and the "
                        "disk") from None
    return samples, walker.has_end


def write_index(tar: str | Path, samples: list[Sample]) -> None:
    """Write the index of `tar` beside it, whole or not at all. Names with blanks, which the format cannot hold: not at
    all."""
    if any(word.split() != [word] for sample in samples for m in sample for word in (m.name, m.extension)):
        return
    lines = [f"{VERSION} {len(samples)}"]
    lines += [" ".join(f"{m.extension} {m.offset} {m.size} {m.name}" for m in sample) for sample in samples]
    target = index_path(tar)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False,
                                     encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        file.write("\n".join(lines) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


def keep_index(tar: str | Path, samples: list[Sample]) -> None:
    """Write the index where that is possible: not over a file of another kind, not into a folder that is read-only."""
    try:
        with open(index_path(tar), "rb") as file:
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
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
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
    if any(m.offset < BLOCK or m.size < 0 or m.offset + m.size > size for sample in samples for m in sample):
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
