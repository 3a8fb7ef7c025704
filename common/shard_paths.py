"""From what `--shard_path` says to a list of tars: folders, glob and brace patterns, files, several of them.

    python train_single.py -s shards/train                  # a folder
    python train_single.py -s 'shards/train-{0000..0019}.tar' more/*.tar
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import braceexpand

from common.errors import UserError

SUFFIXES = (".tar", ".tar.gz", ".tgz")
ADVICE = "--shard_path takes a folder of tars, tars, or a pattern; make shards with python -m common.make_shards"


def expand(patterns: Sequence[str]) -> list[str]:
    """The tars that the patterns name, in order. A name that does not exist is an error, never left out."""
    paths = [path for pattern in patterns for path in _expand_one(pattern)]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise UserError(f"a shard is named twice; {twice[0]}; name every shard once in --shard_path")
    return paths


def _expand_one(pattern: str) -> list[str]:
    if pattern.startswith("file:"):
        pattern = unquote(urlsplit(pattern).path)
    if os.path.isdir(pattern):
        paths = sorted(str(path) for path in Path(pattern).iterdir() if path.name.endswith(SUFFIXES) and path.name[0] != ".")
        if not paths:
            raise UserError(f"no shards (*.tar); {pattern}; {ADVICE}")
        return paths
    if os.path.exists(pattern):
        return [pattern]
    names = list(braceexpand.braceexpand(pattern)) if "{" in pattern else [pattern]
    paths = [path for name in names for path in (sorted(glob.glob(name)) if glob.has_magic(name) else [name])]
    if not paths:
        raise UserError(f"nothing matches the pattern; {pattern}; {ADVICE}")
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"no such shard; {missing[0]}{more}; {ADVICE}")
    return paths


def shard_names(paths: Sequence[str]) -> list[str]:
    """What logs and traces call each shard: the file's name without `.tar`, with its folders where that is not unique."""
    parts = [Path(_without_suffix(path)).parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _without_suffix(path: str) -> str:
    return next((path[: -len(suffix)] for suffix in SUFFIXES if path.endswith(suffix)), path)
