"""The folders of shards, here or elsewhere, and what they say about themselves.

    >>> infos = {folder: read_any_info(path, storage) for folder, path in folders_of(paths).items()}
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from common.access.copies import UNKNOWN, Promised
from common.access.storage import Storage
from common.access.urls import is_command, is_remote, shown, sibling
from common.indexing.info import INFO, Info, parse_info, read_info


def folder_of(path: str) -> str:
    """The folder of a shard, local or not; "" for what a command writes, which has none."""
    if is_command(path):
        return ""
    return shown(path).rpartition("/")[0] if is_remote(path) else os.path.dirname(path) or "."


def folders_of(paths: Sequence[str]) -> dict[str, str]:
    """Each folder, with one of its shards."""
    return {folder_of(path): path for path in paths}


def basename(path: str) -> str:
    """The name of a shard without its folder."""
    return shown(path).rpartition("/")[2]


def read_any_info(path: str, storage: Storage) -> Info:
    """What the folder of a shard says about itself, wherever it is; an empty Info where it says nothing."""
    if not is_remote(path):
        return read_info(folder_of(path))
    if is_command(path):
        return Info()
    url = sibling(path, INFO)
    text = storage.read_small(url)
    return (parse_info(text, shown(url)) if text is not None else None) or Info()


def promised_of(path: str, infos: dict[str, Info]) -> Promised:
    """What info.json says of a shard."""
    return infos[folder_of(path)].shards.get(basename(path), UNKNOWN)


def promised_through_cache(paths: Sequence[str], infos: dict[str, Info], storage: Storage) -> dict[str, Promised]:
    """What copies in the cache are held against, on every node: they may be older than what info.json describes."""
    remote = [path for path in paths if is_remote(path)] if storage.cache_dir else []
    return {path: promised_of(path, infos) for path in remote}
