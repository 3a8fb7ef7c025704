"""Labels and images as people name them, and what is said where there is none."""

from __future__ import annotations

import json
import pickle

import pytest

from common.fields import Fields, RawSample, SampleError


def sample(**fields: bytes) -> RawSample:
    return RawSample("s", 0, "k", {name.replace("_", "."): data for name, data in fields.items()})


@pytest.mark.parametrize(("text", "label"), [
    (b'{"label": 1}', 1), (b'{"label": "1"}', 1), (b'{"label": 1.0}', 1), (b'{"label": "dog"}', 1),
    (b'{"category": "dog"}', 1),
    (b'{"label": 0, "category": "dog"}', 0), (b"1", 1), (b'"dog"', 1), (b'\xef\xbb\xbf{"label": 1}', 1)])
def test_labels_in_json(text: bytes, label: int) -> None:
    assert Fields(num_classes=2, classes=("cat", "dog")).label(sample(json=text)) == label


@pytest.mark.parametrize(("text", "label"), [(b"1", 1), (b"1\n", 1), (b" 01 ", 1), (b"dog\n", 1)])
def test_labels_in_cls(text: bytes, label: int) -> None:
    assert Fields(num_classes=2, classes=("cat", "dog")).label(sample(jpg=b"", cls=text)) == label
    assert Fields(label_field="label.txt", classes=("cat", "dog")).label(sample(label_txt=text)) == label


def test_labels_in_cls_beside_a_json_of_other_things() -> None:
    for text, label in ((b'{"width": 3}', 1), (b'{"category": "indoors"}', 1), (b'{"label": 0}', 0)):
        assert Fields(num_classes=2).label(sample(json=text, cls=b"1")) == label
    with pytest.raises(SampleError, match="bad label: None is no whole number"):
        Fields(num_classes=2).label(sample(json=b'{"label": null}', cls=b"1"))
    with pytest.raises(SampleError, match="the json has no `label`, only width"):
        Fields(label_field="json", num_classes=2).label(sample(json=b'{"width": 3}', cls=b"1"))


@pytest.mark.parametrize(("text", "cause"), [
    (b"{", "broken json"), (b"\xff\xfe\x00", "broken json"), (b"[" * 100_000, "broken json"),
    (b"9" * 6000, "broken json"), (b"", "no label"), (b" \n", "no label"), (b"\0\0", "no label"), (b"{}", "no label"),
    (b'{"category": "cow"}', "bad label"), (b'{"label": null}', "bad label"), (b'{"label": true}', "bad label"),
    (b'{"label": 0.5}', "bad label"), (b'{"label": NaN}', "bad label"), (b'{"label": 1e999}', "bad label"),
    (b'{"label": [0, 1]}', "bad label"), (b'{"label": {"id": 1}}', "bad label"), (b'{"label": "1_0"}', "bad label"),
    (b'{"label": 2}', "label out of range"), (b'{"label": -1}', "label out of range"),
    (b'{"label": 1' + b"0" * 4000 + b"}", "label out of range"), (b" " * (1 << 24) + b"1", "bad label")])
def test_labels_that_are_none(text: bytes, cause: str) -> None:
    """Each has one cause that it is counted by, and a short detail."""
    with pytest.raises(SampleError) as found:
        Fields(num_classes=2, classes=("cat", "dog")).label(sample(json=text))
    assert found.value.cause == cause and len(str(found.value)) < 200
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


def test_missing_fields_list_what_there_is() -> None:
    odd = sample(input_jpg=b"", outputs_txt=b"1")
    assert Fields().image_name(odd.fields) == "input.jpg"
    with pytest.raises(SampleError, match="no label: wanted json or cls, found the fields input.jpg, outputs.txt; name "
                                          "one with --label_field"):
        Fields().label(odd)
    with pytest.raises(SampleError, match="no image: wanted png, found the fields input.jpg, outputs.txt"):
        Fields(image_field="png").image(odd)
    with pytest.raises(SampleError, match="no image: wanted an image .*found the fields json"):
        Fields().image(sample(json=b"{}"))


def test_which_field_is_the_image() -> None:
    """The only one; else the only plain one; else nobody can tell, as with 22.05.png and 22.06.png."""
    assert Fields().image_name({"json": b"", "PNG": b""}) == "PNG"
    assert Fields().image_name({"mask.png": b"", "jpg": b"", "json": b""}) == "jpg"
    with pytest.raises(SampleError, match="several fields could be it: 05.png, 06.png; name one with --image_field"):
        Fields().image_name({"05.png": b"", "06.png": b""})
    with pytest.raises(SampleError, match="several fields could be it: jpg, png"):
        Fields().image_name({"jpg": b"", "png": b""})
    assert Fields(image_field="png").image_name({"jpg": b"", "png": b""}) == "png"
    fields = Fields(first_image="left.jpg")
    assert fields.image_name({"right.jpg": b"", "left.jpg": b""}) == "left.jpg"
    assert fields.image_name({"right.jpg": b""}) == "right.jpg"


def test_category() -> None:
    assert Fields().category(sample(json=json.dumps({"label": 0, "category": "x" * 1000}).encode())) == "x" * 200
    assert Fields().category(sample(json=b"{")) is None and Fields().category(sample(cls=b"1")) is None
