"""`info.json`: what a folder of shards says about itself, read without trust and written whole or not at all.

    {"dataset size": 25000, "num_classes": 2, "classes": ["cat", "dog"],
     "shards": [{"name": "train-0000.tar", "samples": 1000, "bytes": 58720256}]}

The first two keys are those of the folders that exist already, in whichever *.json comes first. make_shards adds a
"plan", by which it knows its own work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.access.copies import UNKNOWN, Promised
from common.errors import UserError, printable
from common.files import check_regular, regular, write_shared
from common.indexing.paths import SUFFIXES

INFO = "info.json"
MAX_BYTES = 1 << 26  # of a description: a million shards; what is larger is something else, such as annotations
MAX_CLASSES = 10_000_000  # what make_shards writes, too
MAX_WHOLE = 1 << 62
MEND = "mend it, or remove it and it is made anew"


@dataclass(frozen=True)
class Info:
    """What one folder says. None or empty: it does not say. `shards`: by the name of the tar."""

    path: str = ""
    num_samples: int | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    shards: Mapping[str, Promised] = field(default_factory=dict)


def read_info(folder: str) -> Info:
    """info.json, else the first *.json that describes shards, else an empty Info. Raises UserError for a broken
    info.json."""
    own = Path(folder, INFO)
    for path in [own, *sorted(path for path in Path(folder).glob("*.json") if path.name != INFO
                              and path.name[0] != ".")]:
        try:
            if path != own and check_regular(path).st_size > MAX_BYTES:
                continue
            with open(path, "rb", opener=regular) as file:
                info = parse_info(file.read(MAX_BYTES + 1), str(path), is_own=path == own)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror}); {path}; check its permissions") from None
        if info is not None:
            return info
    return Info()


def description(shards: Iterable[tuple[str, int, int]], num_classes: int,
                classes: Sequence[str] | None) -> dict[str, Any]:
    """What info.json is to hold of `shards`, each a name, its samples and its bytes. 0 classes: nobody knows."""
    shards = list(shards)
    info: dict[str, Any] = {"dataset size": sum(samples for _, samples, _ in shards)}
    if num_classes:
        info["num_classes"] = num_classes
    if classes is not None:
        info["classes"] = list(classes)
    info["shards"] = [{"name": name, "samples": samples, "bytes": num_bytes} for name, samples, num_bytes in shards]
    return info


def parse_info(text: bytes, path: str, is_own: bool = True) -> Info | None:
    """Raises UserError for a description of another shape; None for a JSON that is about something else, or not
    `is_own` and broken."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_own:
            raise UserError(f"not readable as JSON ({str(error)[:100]}); {path}; {MEND}") from None
        return None
    keys = {"dataset size", "num_classes", "shards", *(["classes"] if is_own else [])}
    if not isinstance(value, dict) or not keys & set(value):
        return None
    try:
        return _info(value, path)
    except ValueError as error:
        raise UserError(f"not a description of shards ({str(error)[:150]}); {path}; {MEND}") from None


def _info(value: dict[str, Any], path: str) -> Info:
    classes = value.get("classes") or None
    if isinstance(classes, dict):  # name -> number, as torchvision's class_to_idx
        numbers = {_whole(number, f"the number of class {name[:40]}"): name for name, number in classes.items()}
        if set(numbers) != set(range(len(classes))):
            raise ValueError(f"classes must number its {len(classes)} names from 0 to {len(classes) - 1}, each once")
        classes = [numbers[number] for number in range(len(classes))]
    if classes is not None and not isinstance(classes, list):
        raise ValueError("classes is no list")
    num_classes = _optional(value, "num_classes", 1, MAX_CLASSES)
    if classes and num_classes not in (None, len(classes)):
        raise ValueError(f"num_classes is {num_classes}, classes has {len(classes)} names")
    if not isinstance(value.get("shards") or [], list):
        raise ValueError("shards is no list")
    shards = {}
    for entry in value.get("shards") or []:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"an entry of shards has no name: {json.dumps(entry)[:60]}")
        shards[os.path.basename(entry["name"])] = Promised(_optional(entry, "samples"), _optional(entry, "bytes"))
    return Info(path, _optional(value, "dataset size"), num_classes, tuple(map(str, classes)) if classes else None,
                shards)


def _optional(values: dict[str, Any], name: str, least: int = 0, most: int = MAX_WHOLE) -> int | None:
    return None if values.get(name) is None else _whole(values[name], name, least, most)


def _whole(value: Any, name: str, least: int = 0, most: int = MAX_WHOLE) -> int:
    number = None
    with suppress(TypeError, ValueError, OverflowError):
        number = int(value) if int(value) == float(value) else None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        span = f"from {least} on" if most == MAX_WHOLE else f"from {least} to {most}"
        raise ValueError(f"{name} is {str(value)[:40]}, no whole number {span}")
    return number


def check_totals(infos: Mapping[str, Info], counted: Iterable[tuple[str, str, int]], skip_errors: bool = False) -> None:
    """Hold (folder, name, samples) that were counted against what was promised: the only sign of a tar cut between two
    members. With `skip_errors`, fewer in all than promised are told and no error."""
    found: dict[str, dict[str, int]] = {folder: {} for folder in infos}
    for folder, name, samples in counted:
        if folder in found:
            found[folder][name] = samples
    for folder, info in infos.items():
        for name, samples in found[folder].items():
            promised = info.shards.get(name, UNKNOWN).samples
            if promised is not None and promised != samples:
                raise UserError(f"{info.path} promises {promised} samples, the tar holds {samples}; shard "
                                f"{folder}/{name}; "
                                "it was cut or changed: write or copy it again")
        if not os.path.isdir(folder) or {path.name for path in Path(folder).iterdir()
                                         if path.name.endswith(SUFFIXES)} - set(found[folder]):
            continue  # a part of the folder, on purpose
        gone = [printable(name) for name in info.shards if name not in found[folder]]
        if gone:
            raise UserError(f"{info.path} names a shard that is not there; {folder}/{gone[0]}; copy it again, or make "
                            "the shards anew")
        total = sum(found[folder].values())
        if info.num_samples is not None and info.num_samples != total:
            words = (f"{info.path} promises {info.num_samples} samples, the {len(found[folder])} tars hold "
                     f"{total}; {folder}; a tar was cut or is missing: copy the shards again, or correct "
                     "`dataset size`")
            if not skip_errors or total > info.num_samples:
                raise UserError(words)
            print(f"warning: {words}", file=sys.stderr, flush=True)


def write_info(folder: str | Path, info: dict[str, Any]) -> None:
    """Write `info.json`, whole or not at all; a folder that cannot be written is left as it is."""
    with suppress(OSError):
        write_shared(Path(folder, INFO), json.dumps(info, indent=1))
