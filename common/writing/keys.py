"""Names for what is written: keys of samples and names of shards that every reader takes, no two of them alike.

    >>> make_keys(["cat/a b.jpg", "cat/a_b.jpg"])
    ['cat/a_b', 'cat/a_b-2']
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Container

MAX_KEY_BYTES = 90  # a name, with number and extension, fits the 100 bytes of a tar header: no reader needs extensions
# Blanks part the words of an index, and surrogates (bytes of a name that are no UTF-8) are in no encoding.
_UNSAFE = re.compile(r"[\s\\\x00-\x1f\x7f\ud800-\udfff]")
_HIDDEN = re.compile(r"(^|/)__+")  # readers skip __name__ and __MACOSX


def make_keys(paths: list[str]) -> list[str]:
    """A key for each path: the path itself without its extension, mended where it could not serve as a key.

    So a key in a trace names the file it came from. Keys are distinct, hold no blanks and no dot in their last
    part, and are nothing that readers of tars skip or that does not fit a plain header.
    """
    keys: dict[str, None] = {}
    for path in paths:
        folder, _, file = os.path.splitext(path)[0].rpartition("/")
        parts = [part for part in folder.split("/") if part not in ("", ".", "..")]
        key = safe_name("/".join([*parts, file.replace(".", "_") or "_"]))
        if len(key.encode()) > MAX_KEY_BYTES:
            tail = key.encode()[16 - MAX_KEY_BYTES :].decode(errors="ignore").lstrip("/")
            key = f"{hashlib.sha256(path.encode(errors='surrogatepass')).hexdigest()[:15]}-{tail}"
        keys[unused(key, keys)] = None
    return list(keys)


def file_names(names: list[str]) -> list[str]:
    """Names of files of one folder, for names that may hold folders: distinct, and none that is hidden."""
    found: dict[str, None] = {}
    for name in names:
        found[unused(name.replace("/", "-").lstrip(".-") or "shard", found)] = None
    return list(found)


def unused(name: str, taken: Container[str]) -> str:
    """`name`, with a number where it is taken."""
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}-{number}"
    return unique


def safe_name(name: str) -> str:
    """Without what no key and no name of a shard may hold."""
    return _HIDDEN.sub(r"\1_", _UNSAFE.sub("_", name))
