"""What shards are made from, whatever form it has: a list of images with their labels. And its first form, folders.

    source = from_folder("images/")                 # others: common.writing.manifest, common.writing.torchvision_source
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.fields import IMAGE_EXTENSIONS
from common.tars.samples import is_side_file
from common.writing.image_files import CONVERTED

READABLE = (*IMAGE_EXTENSIONS, *CONVERTED)


@dataclass
class ImageSource:
    """Images and labels in a fixed order. Memory: a path and a number for each image."""

    base: str  # the folder that `paths` are relative to
    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    classes: list[str] | None = None
    num_classes: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)  # path, cause
    warnings: list[str] = field(default_factory=list)
    images: Sequence[Any] | None = None  # a data set whose images are not files; then `paths` are made up

    def content(self, index: int) -> Any:
        """Where image `index` lies, or the image itself (PIL) where it is no file."""
        return os.path.join(self.base, self.paths[index]) if self.images is None else self.images[index][0]

    def category(self, label: int) -> str:
        """The name of a class; its number where classes have no names."""
        return self.classes[label] if self.classes else str(label)


def from_folder(root: str) -> ImageSource:
    """One subfolder per class, images anywhere below it: the classes, labels and order of torchvision's ImageFolder.

    Hidden files and folders are not looked at. Links to folders are followed, each folder once.
    """
    with os.scandir(root) as entries:
        children = sorted((entry for entry in entries if not _is_hidden(entry.name)), key=lambda entry: entry.name)
        classes = [entry.name for entry in children if entry.is_dir()]
    source = ImageSource(root, classes=classes, num_classes=len(classes))
    if not classes:
        raise UserError(f"no class folders; {root}; put the images of each class into a subfolder, "
                        "or list them in a manifest")
    left_out = [entry.name for entry in children if not entry.is_dir() and extension(entry.name) in READABLE]
    for label, name in enumerate(classes):
        for path in _files_below(root, name, source.rejected):
            if extension(path) in READABLE:
                source.paths.append(path)
                source.labels.append(label)
            else:
                left_out.append(path)
    if left_out:
        source.warnings.append(f"{len(left_out)} files are left out, as they are no images or in no class folder, "
                               f"such as {left_out[0]}")
    if set(classes) <= {"train", "val", "valid", "validation", "test"}:
        source.warnings.append(f"the classes are {', '.join(classes)}: if these are splits, make shards of each alone")
    return source


def _files_below(root: str, name: str, rejected: list[tuple[str, str]]) -> list[str]:
    """Files below root/name, relative to root: folder by folder, each sorted."""

    def unreadable(error: OSError) -> None:
        rejected.append((os.path.relpath(error.filename, root), f"folder: {error.strerror}"))

    found: list[tuple[str, list[str]]] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(os.path.join(root, name), followlinks=True, onerror=unreadable):
        seen.add(os.path.realpath(place))
        below = [folder for folder in folders if not _is_hidden(folder)]
        folders[:] = [folder for folder in below if os.path.realpath(os.path.join(place, folder)) not in seen]
        found.append((place, sorted(file for file in files if not is_side_file(file))))
    found.sort()
    return [f"{folder}/{file}" for folder, files in ((os.path.relpath(p, root), f) for p, f in found) for file in files]


def _is_hidden(name: str) -> bool:
    return is_side_file(name) or name == "__MACOSX"


def extension(path: str) -> str:
    """`a/B.JPG` -> `jpg`."""
    return os.path.splitext(path)[1][1:].lower()
