"""From what `--shard_path` says to a list of tars: folders, glob and brace patterns, files, URLs, several of them.

    python train_single.py -s shards/train                  # a folder
    python train_single.py -s 'shards/train-{0000..0019}.tar' more/*.tar
    python train_ddp.py -s 'https://host/data/train-{0000..0099}.tar'
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

import braceexpand

from common.access.storage import Storage
from common.access.urls import is_command, is_remote, is_url, shown
from common.errors import UserError
from common.files import read_json

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_SHARDS = 2_000_000  # a pattern of more is a slip
UNFINISHED = ".unfinished"  # what make_shards keeps in its OUT until everything is there
ADVICE = "give a folder of tars, tars, or a pattern; python -m common.make_shards makes shards"


def expand(patterns: Sequence[str], storage: Storage | None = None) -> list[str]:
    """The tars that the patterns name, in order. A name that does not exist is an error, never left out."""
    paths = [path for pattern in patterns for path in _expand_one(pattern, storage or Storage())]
    twice = [path for path, count in Counter(map(_real, paths)).items() if count > 1]
    if twice:
        raise UserError(f"a shard is named twice; {shown(twice[0])}; name every shard once in --shard_path")
    _check_finished(os.path.dirname(path) for path in paths if not is_remote(path))
    return paths


def _check_finished(folders: Iterable[str]) -> None:
    """Raise UserError for what make_shards has not come to the end of: a folder that is its OUT, or OUT/train."""
    for folder in dict.fromkeys(folders):
        for out in (folder, os.path.join(folder, os.pardir)):
            if any(Path(out, UNFINISHED).glob("plan-*")) and _belongs(folder, out):
                raise UserError(f"make_shards has not finished, shards are missing; {folder or '.'}; give the same "
                                "make_shards command again: it goes on where it was interrupted")


def _belongs(folder: str, out: str) -> bool:
    """Whether the shards of `folder` are those that are being written to `out`: a folder below it that is described
    may be an older one, which is whole."""
    info = Path(folder, "info.json")
    return folder == out or not info.exists() or read_json(info).get("plan") == ""  # "" until all are there


def _real(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _expand_one(pattern: str, storage: Storage) -> list[str]:
    if os.path.isdir(pattern):
        paths = sorted(str(path) for path in Path(pattern).iterdir() if path.name.endswith(SUFFIXES)
                       and path.name[0] != ".")
        if not paths:
            _check_finished([pattern])
            below = sorted(path.name for path in Path(pattern).iterdir() if path.name[0] != "."
                           and any(path.glob("*.tar*")))
            advice = f"give one of its folders that do: {', '.join(below[:5])}" if below else ADVICE
            raise UserError(f"no shards (*.tar); {pattern}; {advice}")
        return paths
    if os.path.exists(pattern):
        return [pattern]
    if pattern.startswith("file:"):
        return _expand_one(unquote(re.sub("^file:(//[^/]*)?", "", pattern)), storage)
    if is_command(pattern):
        storage.check_command(pattern)
        return _braces(pattern)
    if is_url(pattern):
        return [path for url in _braces(pattern) for path in storage.listed(url)]
    return _local(pattern)


def _local(pattern: str) -> list[str]:
    found = [sorted(glob.glob(name)) if glob.has_magic(name) else [name] for name in _braces(pattern)]
    paths = [path for names in found for path in names]
    if not paths:
        _check_finished(map(os.path.dirname, _braces(pattern)))
        raise UserError(f"nothing matches the pattern; {pattern}; {ADVICE}")
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        _check_finished([os.path.dirname(missing[0].rstrip("/"))])  # a shard of it, or OUT/train before there was one
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"no such shard; {missing[0]}{more}; {ADVICE}")
    return paths


def _braces(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    spans = [abs(int(last) - int(first)) + 1 for first, last in re.findall(r"\{(-?\d{1,18})\.\.(-?\d{1,18})", pattern)]
    if math.prod(spans) > MAX_SHARDS:
        raise UserError(f"more than {MAX_SHARDS} shards; {shown(pattern)}; correct the numbers in its braces")
    try:
        return list(islice(braceexpand.braceexpand(pattern, escape=False), MAX_SHARDS))
    except ValueError:
        raise UserError(f"not a pattern (unbalanced braces); {shown(pattern)}; --shard_path takes braces such as "
                        "{0000..0019}") from None


def shard_names(paths: Sequence[str]) -> list[str]:
    """What logs and traces call each shard: the file's name without `.tar`, with its folders where that is not
    unique."""
    parts = [Path(_without_suffix(shown(path))).parts for path in paths]
    depth, deepest = 1, max(map(len, parts), default=1)
    while depth < deepest and len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    if len(set(names)) == len(names):
        return names
    return [f"{name}~{number}" for number, name in enumerate(names)]  # such as a.tar and a.tar.gz, or URLs with a query


def gaps(paths: Sequence[str]) -> list[str]:
    """Names that are missing from a numbered series, such as data-3.tar between data-2.tar and data-4.tar."""
    series: dict[tuple[str, str], dict[int, int]] = {}
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", path, re.DOTALL)
        if match:
            series.setdefault((match[1], match[3]), {})[int(match[2])] = len(match[2])
    found = []
    for (before, after), numbers in series.items():
        width = min(numbers.values())
        span = range(min(numbers), max(numbers))
        if len(span) < 2 * len(numbers):  # dates and hashes are no series
            found += [f"{before}{number:0{width}d}{after}" for number in span if number not in numbers]
    return found


def _without_suffix(path: str) -> str:
    return next((path[: -len(suffix)] for suffix in SUFFIXES if path.endswith(suffix)), path)
