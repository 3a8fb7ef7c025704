"""A data set of torchvision as a source of shards: its files where it has files, else its images as PNG.

Nothing is downloaded: the data set must lie in `--root` as torchvision itself leaves it there.

    python -m common.make_shards torchvision:FashionMNIST shards/ --root data --split train
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from common.errors import UserError
from common.writing.sources import ImageSource

# Where the data sets of torchvision keep their files and labels, one item for each sample.
FILES = ("samples", "_samples", "imgs", "_image_files", "_images")
LABELS = ("targets", "labels", "_labels")


def from_torchvision(name: str, root: str | None, split: str | None) -> ImageSource:
    """List a data set by the name of its class. Raises UserError where it is unknown, not there, or not labelled."""
    if root is None:
        raise UserError(f"where does the data set lie?; torchvision:{name}; add --root FOLDER")
    dataset = _construct(name, root, split)
    files = _files(dataset)
    labels = _labels(dataset)
    if files is not None:
        source = ImageSource(root, [os.path.relpath(file, root) for file in files])
    else:
        names = [f"{split or 'train'}/{index:06d}.png" for index in range(len(labels))]
        source = ImageSource(root, names, images=dataset)
    source.labels = labels
    source.num_classes = max(labels, default=-1) + 1
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sequence) and len(classes) >= source.num_classes:
        source.classes = [each if isinstance(each, str) else ", ".join(map(str, each)) for each in classes]
        source.num_classes = len(classes)
    return source


def _construct(name: str, root: str, split: str | None) -> Any:
    from torchvision import datasets  # takes a second and 200 MB: only for those who need it

    constructor: Any = getattr(datasets, name, None)
    is_data_set = inspect.isclass(constructor) and issubclass(constructor, datasets.VisionDataset)
    if not is_data_set:
        raise UserError(f"torchvision has no data set {name}; torchvision:{name}; "
                        "the names are those in torchvision.datasets, such as CIFAR10")
    parameters = inspect.signature(constructor).parameters
    if "root" not in parameters:
        raise UserError(f"{name} has no files to make shards from; torchvision:{name}; choose one that takes a root")
    arguments: dict[str, Any] = {"root": root} | ({"download": False} if "download" in parameters else {})
    if split is not None and "split" in parameters:
        arguments["split"] = split
    elif split is not None and "train" in parameters:
        if split not in ("train", "test"):
            raise UserError(f"{name} has the splits train and test; --split {split}; name one of them")
        arguments["train"] = split == "train"
    elif split is not None:
        raise UserError(f"{name} has no splits; --split {split}; leave it out, and try --val_fraction")
    try:
        return constructor(**arguments)
    except ImportError as error:
        raise UserError(f"{name} needs a package that is missing ({error.name or error}); torchvision:{name}; "
                        "install it") from None
    except Exception as error:  # each data set complains in its own way of files that are missing or broken
        cause = " ".join(str(error).split())
        raise UserError(f"torchvision cannot open {name} ({cause}); --root {root}; "
                        f"download it there first, with torchvision.datasets.{name}({root!r}, download=True)") from None


def _files(dataset: Any) -> list[str] | None:
    """The image files of a data set, or None where its images lie in arrays."""
    for attribute in FILES:
        items = getattr(dataset, attribute, None)
        if isinstance(items, list) and len(items) == len(dataset) > 0:
            paths = [item[0] if isinstance(item, tuple) else item for item in items]
            if all(isinstance(path, str | os.PathLike) for path in paths):
                return [os.fspath(path) for path in paths]
    return None


def _labels(dataset: Any) -> list[int]:
    """The label of each sample, without decoding images where the data set keeps its labels apart."""
    kept = (getattr(dataset, attribute, None) for attribute in LABELS)
    items: Any = next((values for values in kept if values is not None and len(values) == len(dataset)), None)
    if items is None:
        samples = getattr(dataset, "samples", getattr(dataset, "_samples", dataset))
        items = (sample[1] for sample in (samples[index] for index in range(len(dataset))))
    try:
        labels = [int(label) for label in items]
    except (TypeError, ValueError):
        raise UserError(f"the targets are no class labels; torchvision:{type(dataset).__name__}; "
                        "only classification data sets will do") from None
    if min(labels, default=0) < 0:
        raise UserError(f"some images have no label; torchvision:{type(dataset).__name__}; choose a labelled --split")
    return labels
