"""Which files of a tar make up a sample, and where they lie: neighbours that share a key."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, printable
from common.tars.format import BLOCK, MAX_MEMBER, ByteFile, TarEntry, TarError, Walker

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

    def __reduce__(self) -> tuple[Any, ...]:
        fault, _, rest = str(self).partition("; ")
        return TornTar, (fault, rest, self.samples)


def split_name(name: str) -> tuple[str, str]:
    """Key and extension of a member: the key ends at the first dot of the file name; dots in folders do not count."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension


def is_side_file(name: str) -> bool:
    """What macOS and editors put beside the files of a sample: hidden files and `__MACOSX` folders."""
    return name.rpartition("/")[2].startswith(".") or name.startswith("__MACOSX/") or "/__MACOSX/" in name


def is_sample_file(entry: TarEntry) -> bool:
    """Whether a member belongs to a sample: a file with an extension. Raises TarError for one that cannot be read: a
    link, or more than memory is meant for.

    `__NAME__` at the top, which webdataset keeps for itself, holds no sample either.
    """
    if is_side_file(entry.name) or not split_name(entry.name)[1] or entry.kind == "other" or _is_meta(entry.name):
        return False
    if entry.kind == "link":
        raise TarError(f"{printable(entry.name)} is a link without data: pack with tar --dereference "
                       "--hard-dereference")
    if entry.size > MAX_MEMBER:
        raise TarError(f"{printable(entry.name)} has {entry.size} bytes, more than the {MAX_MEMBER} "
                       "that are read into memory")
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
    return f"two files with the extension {printable(extension)}"


def _twice(extensions: Iterable[str]) -> str:
    return Counter(extension.lower() for extension in extensions).most_common(1)[0][0]


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
            walker = Walker(ByteFile(file))
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
