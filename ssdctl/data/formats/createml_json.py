"""Read Create ML's JSON, as Roboflow, labelImg and Apple's tools write it.

A list of images, each with its boxes: center, width and height in pixels. A word such as train or
valid in the name of the file or its folder gives the split.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage
from ssdctl.data.formats import (
    files_near,
    from_files,
    is_list,
    read_json,
    some_files_near,
    with_words,
)
from ssdctl.data.image_files import dataset_folder
from ssdctl.errors import DataError

LOOKED_FOR = ("_annotations.createml.json",)
WORDS = ((b'"image"', b'"annotations"'), (b'"imagefilename"', b'"annotation"'))


class _Coordinates(msgspec.Struct):
    x: float
    y: float
    width: float
    height: float


class _Box(msgspec.Struct):
    label: str | int
    coordinates: _Coordinates


class _Image(msgspec.Struct):
    image: str = ""
    imagefilename: str = ""  # in Apple's documentation
    annotations: list[_Box] = []
    annotation: list[_Box] = []


def recognize(path: Path) -> Path | None:
    return next(iter(_exports(some_files_near(path, LOOKED_FOR))), None)


def _exports(files: list[Path]) -> list[Path]:
    """Return the files that are a list of images, neither COCO's nor Label Studio's own."""
    found = dict.fromkeys(file for words in WORDS for file in with_words(files, *words))
    others = (b'"images"', b'"completed_by"')
    lists = [file for file in found if is_list(file)]
    return [file for file in lists if not any(with_words([file], word) for word in others)]


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of its JSON file; classes are sorted by name."""
    root, notes, files = dataset_folder(path), list[str](), _exports(files_near(path))
    if not files:
        raise DataError(f"{path}: no JSON file of Create ML (a list of images with annotations)")
    return from_files(root, {file: _images(file) for file in files}, image_dir, notes)


def _images(file: Path) -> dict[str, LabeledImage]:
    images: dict[str, LabeledImage] = {}
    for entry in read_json(file, list[_Image], "createml-json"):
        name = entry.image or entry.imagefilename
        if not name:
            raise DataError(f"{file}: an image without a name")
        image = images.setdefault(name, LabeledImage(name, 0, 0, []))
        for box in (*entry.annotations, *entry.annotation):
            x, y, width, height = values = msgspec.structs.astuple(box.coordinates)
            if not all(map(math.isfinite, values)):
                raise DataError(f"{file}: {name}: a box that is not finite")
            left, top = x - width / 2, y - height / 2
            image.boxes.append(LabeledBox(str(box.label), left, top, width, height))
    return images
