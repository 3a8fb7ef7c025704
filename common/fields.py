"""The fields of a sample: which member is the image, which the label, and what the label means.

    python train_single.py -s shards/ --image_field image.png --label_field cls
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import printable

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
TORN_SHARD = "torn shard"  # the cause of samples that are lost with a part of their tar
MAX_NAME = 200  # letters of a class's name
MAX_TEXT = 1 << 24  # bytes of a json: more is no label
Data = bytes | memoryview


class SampleError(Exception):
    """A sample that cannot be used: `cause` is a short fixed category that errors are counted by."""

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause, self.detail = cause, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleError, (self.cause, self.detail)


@dataclass(slots=True)
class RawSample:
    """A sample as its shard holds it: still compressed. `count` is its place in the shard, `fault` what is wrong with
    its files."""

    shard: str
    count: int
    key: str
    fields: Mapping[str, Data]
    fault: str | None = None
    cause: str = "torn sample"  # of the fault

    def check(self) -> None:
        """Raise SampleError for a sample that is torn or ambiguous."""
        if self.fault is not None:
            raise SampleError(self.cause, self.fault)


def lost_sample(shard: str, count: int, fault: str) -> RawSample:
    """What stands, where errors are skipped, for a sample behind the tear of its shard."""
    return RawSample(shard, count, "", {}, fault, TORN_SHARD)


@dataclass
class Fields:
    """Picks image and label. `first_image` is the image's field in the first sample of the data set: where none was
    named a sample's field of that name is taken, and else the one that there is."""

    image_field: str | None = None
    label_field: str | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    first_image: str | None = None
    _class_numbers: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._class_numbers = {name: number for number, name in enumerate(self.classes or ())}

    def image_name(self, names: Mapping[str, Any]) -> str:
        """Which of a sample's fields holds the image. Raises SampleError that lists the fields there are."""
        if self.image_field is not None:
            if self.image_field in names:
                return self.image_field
        elif self.first_image is not None and self.first_image in names:
            return self.first_image
        else:
            found = [name for name in names if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS]
            plain = [name for name in found if "." not in name] or found
            if len(plain) == 1:
                return plain[0]
            if found:
                raise SampleError("no image", f"several fields could be it: {_listed(dict.fromkeys(found))}; name one "
                                              "with --image_field "
                                              "(a key ends at the first dot of the file's name)")
        wanted = self.image_field or "an image (" + ", ".join(IMAGE_EXTENSIONS) + ")"
        raise SampleError("no image", f"wanted {wanted}, found the fields {_listed(names)}; name one with "
                                      "--image_field")

    def label_name(self, names: Mapping[str, Any]) -> str:
        """Which of a sample's fields holds the label."""
        wanted = (self.label_field,) if self.label_field is not None else ("json", "cls")
        for name in wanted:
            if name in names:
                return name
        raise SampleError("no label", f"wanted {' or '.join(wanted)}, found the fields {_listed(names)}; name one with "
                                      "--label_field")

    def image(self, sample: RawSample) -> Data:
        """The compressed image."""
        return sample.fields[self.image_name(sample.fields)]

    def label(self, sample: RawSample) -> int:
        """The label, an int in [0, num_classes). Raises SampleError for one that is missing, broken or out of range."""
        return self._number(self._value(sample.fields, self.label_name(sample.fields)))

    def category(self, sample: RawSample) -> str | None:
        """The name of the class, where the sample carries one."""
        text = sample.fields.get(self.label_field or "json")
        try:
            meta = json.loads(bytes(text)) if text and len(text) <= MAX_TEXT else None
        except (ValueError, RecursionError):
            return None
        return str(meta["category"])[:MAX_NAME] if isinstance(meta, dict) and meta.get("category") is not None else None

    def _value(self, fields: Mapping[str, Data], name: str) -> Any:
        """What the field `name` says of the label; where it is a json of other things, what a cls beside it says."""
        if len(fields[name]) > MAX_TEXT:
            raise SampleError("bad label", f"the field {name} has {len(fields[name])} bytes")
        text = bytes(fields[name])
        if not text.strip(b"\0 \t\r\n"):
            raise SampleError("no label", f"the field {name} is empty")
        if name.rpartition(".")[2] != "json":
            return text.decode("utf-8", "replace").strip()
        try:
            meta = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SampleError("broken json", str(error)[:80]) from None
        if not isinstance(meta, dict):
            return meta
        if "label" in meta:
            return meta["label"]
        if self.label_field is None and "cls" in fields:
            return self._value(fields, "cls")
        if "category" in meta:
            return meta["category"]
        raise SampleError("no label", f"the json has no `label`, only {_listed(meta)}")

    def _number(self, value: Any) -> int:
        if isinstance(value, str) and value in self._class_numbers:
            return self._class_numbers[value]
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}(\.0*)?\s*", value):
            number = int(value.partition(".")[0])
        elif isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and value.is_integer():
            number = int(value)
        else:
            known = "is there a list of `classes` in info.json"
            if self._class_numbers:
                known = f"one of the {len(self._class_numbers)} known classes"
            raise SampleError("bad label", f"{_short(value)} is no whole number, nor {known}")
        if number < 0 or (self.num_classes is not None and number >= self.num_classes):
            last = self.num_classes - 1 if self.num_classes else "number of classes - 1"
            raise SampleError("label out of range", f"{_short(number)} is not in 0 … {last}")
        return number


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) else "a number of many digits" if abs(value) >> 200 else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _listed(names: Mapping[str, Any]) -> str:
    return printable(", ".join(sorted(str(name) for name in names if not str(name).startswith("__")))) or "none"
