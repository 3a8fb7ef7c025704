"""A table of images as a source of shards: CSV with a header, or JSONL.

    path,category
    photos/a.jpg,cat
    photos/b.jpg,dog

Paths are relative to the manifest. `label` holds numbers from 0 on, `category` names; one of them will do,
and where both are given they must agree. Names alone are numbered in sorted order; where some labels are written as
001 or 1_1, all are names.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from common.errors import UserError
from common.indexing.info import MAX_CLASSES
from common.writing.sources import READABLE, ImageSource, extension

MANIFESTS = (".csv", ".tsv", ".jsonl", ".ndjson")
NUMBER = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0*)?")  # one text for each number, but for the zeros that pandas adds
DIGITS = re.compile(r"[+-]?\d[\d_]*(\.0*)?")  # any other text that stands for a number

Row = tuple[int, dict[str, Any]]  # number of the line, values by column


def from_manifest(manifest: str) -> ImageSource:
    """List the rows of a manifest. Unusable rows are rejected; a table that cannot be understood is a UserError."""
    source = ImageSource(os.path.dirname(manifest) or ".")
    try:
        columns, rows = _read(manifest, source.rejected)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"not a readable manifest ({error}); {manifest}; save it as UTF-8 text") from None
    if columns and not ("path" in columns and {"label", "category"} & columns):
        raise UserError("a manifest needs the columns `path` and `label` or `category`; "
                        f"{manifest} has {', '.join(sorted(columns))}; rename them")
    rows = list(_with_path(rows, source))
    names = _class_names(manifest, rows)
    numbers: dict[str | None, int] = {name: number for number, name in names.items()}
    seen: dict[str, int] = {}
    for line, row in rows:
        path = os.path.normpath(row["path"])
        label = row["label"] if isinstance(row["label"], int) else numbers.get(row["category"], -1)
        if label >= MAX_CLASSES:  # a list of so many classes may not even fit into memory
            raise UserError(f"label {str(label)[:40]} is larger than {MAX_CLASSES - 1}; {manifest}, line {line}; "
                            "number the classes from 0 on, or give their names in `category` alone")
        if path in seen:
            source.rejected.append((path, f"listed twice: lines {seen[path]} and {line}"))
        elif label < 0:
            cause = "no label" if row["label"] is None else f"label {label} is negative"
            source.rejected.append((path, f"{cause}, line {line}"))
        elif extension(path) not in READABLE:
            source.rejected.append((path, f"none of the extensions {', '.join(READABLE)}"))
        else:
            seen[path] = line
            source.paths.append(path)
            source.labels.append(label)
    source.num_classes = max([*source.labels, *names], default=-1) + 1
    source.classes = [names.get(number, str(number)) for number in range(source.num_classes)] if names else None
    return source


def _read(manifest: str, rejected: list[tuple[str, str]]) -> tuple[set[str], list[Row]]:
    """The names of the columns, in lower case, and the rows; lines of JSONL that hold no object are rejected."""
    rows: list[Row] = []
    with open(manifest, encoding="utf-8-sig", newline="") as file:  # spreadsheets put a mark before the first column
        if manifest.lower().endswith((".csv", ".tsv")):
            reader = csv.DictReader(file, delimiter="\t" if manifest.lower().endswith(".tsv") else ",")
            reader.fieldnames = names = [name.strip().lower() for name in reader.fieldnames or ()]
            return set(names), [(reader.line_num, row) for row in reader]
        for line, text in enumerate(file, start=1):
            try:
                value = json.loads(text) if text.strip() else {}
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                rows += [(line, {name.strip().lower(): item for name, item in value.items()})] if value else []
            else:
                rejected.append((f"line {line}", "not a JSON object"))
    return {name for _, row in rows for name in row}, rows


def _with_path(rows: list[Row], source: ImageSource) -> Iterator[Row]:
    """Rows that name a file, with `path` a string, `label` an int, a string or None, `category` a string or None."""
    for line, row in rows:
        path, category = _text(row.get("path")), _text(row.get("category"))
        if path is None:
            source.rejected.append((f"line {line}", "no path"))
            continue
        yield line, {"path": path, "label": _label(row.get("label")), "category": category}


def _class_names(manifest: str, rows: list[Row]) -> dict[int, str]:
    """Names by number. Names alone, in either column, are numbered here, and `label` is moved to `category`."""
    advice = "give numbers in `label` and names in `category`"
    texts = [(line, row["label"]) for line, row in rows if isinstance(row["label"], str)]
    numbered = next((line for line, row in rows if isinstance(row["label"], int)), None)
    named = next((line for line, text in texts if not DIGITS.fullmatch(text)), None)
    if numbered and named:
        raise UserError(f"`label` holds numbers and names; {manifest}, lines {numbered} and {named}; {advice}")
    names: dict[Any, str] = {}
    for line, row in rows:
        label, name = row["label"], row["category"]
        if label is not None and name is not None and names.setdefault(label, name) != name:
            raise UserError(f"label {label} is {names[label]} and {name}; {manifest}, line {line}; "
                            f"{advice}, one name for each number")
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise UserError(f"category {twice[0]} has several labels; {manifest}; {advice}, one number for each name")
    if numbered and not texts:
        return names
    for _, row in rows:
        row["category"] = row["label"] = row["category"] or names.get(row["label"]) or _text(row["label"])
    return dict(enumerate(sorted({row["category"] for _, row in rows} - {None})))


def _text(value: Any) -> str | None:
    return str(value).strip() or None if isinstance(value, str | int) and not isinstance(value, bool) else None


def _label(value: Any) -> int | str | None:
    """A number as int, even where it is text or 3.0; other text as it is; None for what is missing."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    text = _text(value)
    number = NUMBER.fullmatch(text or "")
    return int(number[1]) if number else text
