"""Read LabelMe's JSON files: one per image, beside it or in a folder of its own.

Rectangles are read, and polygons, masks and circles by their extent. Points and lines are counted
and left out. Shapes that X-AnyLabeling marks as difficult are crowds. A word such as train or val
in the folder gives the split.
"""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ssdctl.data.annotations import (
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    nfc,
    place,
    refuse,
    split_of,
    without_copies,
)
from ssdctl.data.find_images import ImageFinder, Wanted, stem_of
from ssdctl.data.formats import around, read_json, some_files_near, with_words
from ssdctl.data.image_files import dataset_folder, files_below, in_threads
from ssdctl.errors import DataError

LOOKED_FOR = ("*.json of labelme",)
WORDS = (b'"shapes"', b'"imagePath"')
MAX_DEPTH = 5  # folders above the first file, as in labels/train/day 1/camera 1
EXTENTS = ("rectangle", "polygon", "rotation", "oriented_rectangle")  # points at the edges


class _Shape(msgspec.Struct):
    label: str | int | None
    points: list[tuple[float, float]]
    shape_type: str | None = "polygon"  # absent in old files
    difficult: Any = False  # of X-AnyLabeling, as in Pascal VOC


class _File(msgspec.Struct):
    shapes: list[_Shape]
    image_path: str = msgspec.field(name="imagePath")
    height: int | None = msgspec.field(name="imageHeight", default=None)
    width: int | None = msgspec.field(name="imageWidth", default=None)


def recognize(path: Path) -> Path | None:
    files = some_files_near(path, LOOKED_FOR, depth=MAX_DEPTH)
    return next(iter(with_words(files, *WORDS)), None)


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or one file; classes are sorted by name."""
    root, notes = dataset_folder(path), list[str]()
    names = [path.name] if path.is_file() else sorted(files_below(path))
    files = [n for n in names if n.lower().endswith(".json") and with_words([root / n], *WORDS)]
    if not files:
        raise DataError(f"{path}: no JSON file of labelme, with shapes and imagePath")
    contents = in_threads(lambda name: read_json(root / name, _File, "labelme-json"), files)
    counts: Counter[str] = Counter()
    placed = place([split_of(PurePosixPath(f).parent.as_posix()) for f in files], files, notes)
    splits: dict[str, list[LabeledImage]] = {}
    found = _image_files(root, files, contents, image_dir)
    images = [
        _labeled(root / file, content, image, counts)
        for file, content, image in zip(files, contents, found, strict=True)
    ]
    for row in without_copies(root, files, placed, images, notes):
        if (split := placed[row]) is not None:
            splits.setdefault(split, []).append(images[row])
    notes += [f"{kind}, left out: {count:,}" for kind, count in counts.items()]
    annotations = from_images(splits, None, root, path, notes)
    # labelme turns images as it opens them; other programs may give the size of the stored ones.
    return {split: part._replace(upright=True) for split, part in annotations.items()}


def _image_files(
    root: Path, files: list[str], contents: list[_File], image_dir: str | None
) -> list[str]:
    """Return the image of each file: by the path in it, else by the name of the file."""
    finder = ImageFinder(root, image_dir=image_dir)
    wanted = []
    for file, content in zip(files, contents, strict=True):
        folder = posixpath.dirname(file)
        name = posixpath.normpath(posixpath.join(folder, content.image_path.replace("\\", "/")))
        size = (content.width or 0, content.height or 0)
        wanted.append(Wanted(name, split=split_of(folder), size=size))
    found = [item and item.file for item in finder.find(wanted, root)]
    rest = [row for row, item in enumerate(found) if item is None]
    by_name = finder.of_label_files([PurePosixPath(files[row]) for row in rest])
    for row, item in zip(rest, finder.find(by_name, root), strict=True):
        found[row] = item.file if item and item.is_exact else None
    absent = [files[row] for row in rest if found[row] is None]
    refuse(root, "images of labels are missing", absent, "copy the images into the folder")
    images = [item for item in found if item]
    both = [
        f"{file} ({image} by the path in it, {other} by its own name)"
        for file, image in zip(files, images, strict=True)
        for other in _others(finder, PurePosixPath(file), PurePosixPath(image))
    ]
    refuse(root, "label files that fit several images", both, "rename files, or correct imagePath")
    return images


def _others(finder: ImageFinder, file: PurePosixPath, image: PurePosixPath) -> list[str]:
    """Return the images beside a label file or its image that have the label file's name."""
    if nfc(stem_of(image.name)) == nfc(file.stem):
        return []
    folders = (file.parent, image.parent)
    return [n for n in finder.with_stem(file.stem) if PurePosixPath(n).parent in folders]


def _labeled(path: Path, content: _File, image: str, counts: Counter[str]) -> LabeledImage:
    boxes = []
    for shape in content.shapes:
        label = "" if shape.label is None else str(shape.label).strip()
        try:
            box = _box(label, shape)
        except ValueError:
            raise DataError(f"{path}: a {shape.shape_type} without its points") from None
        if box is not None and label:
            boxes.append(box._replace(is_crowd=shape.difficult is True))
        else:
            counts[f"{shape.shape_type} shapes" if box is None else "shapes without a label"] += 1
    is_complete = len(boxes) == len(content.shapes)
    size = content.width or 0, content.height or 0
    return LabeledImage(image, *size, boxes, is_complete=is_complete)


def _box(label: str, shape: _Shape) -> LabeledBox | None:
    xs, ys = [x for x, _ in shape.points], [y for _, y in shape.points]
    if (shape.shape_type or "polygon") in EXTENTS:
        return around(label, xs, ys)
    if shape.shape_type == "mask":  # the last pixel is in it
        return around(label, [*xs, max(xs, default=0) + 1], [*ys, max(ys, default=0) + 1])
    if shape.shape_type == "circle" and len(shape.points) == 2:
        radius = math.dist(*shape.points)  # center, and a point of the edge
        return around(label, [xs[0] - radius, xs[0] + radius], [ys[0] - radius, ys[0] + radius])
    return None
