"""Read CVAT's own XML: "CVAT for images 1.1" and "CVAT for video 1.1".

The split of an image is its subset. Of several files, each is the split that its name gives.

Boxes are read, and polygons, masks and ellipses by their extent; a rotated box becomes the upright
box around it. Points, polylines, cuboids, skeletons, tags and shapes without a label are counted
and left out, and so are boxes of tracks outside their frame. A point of a skeleton, a label with a
parent, is no class.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ssdctl.data.annotations import (
    MAX_NAMED,
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    place,
    split_of,
)
from ssdctl.data.find_images import ImageFinder, located
from ssdctl.data.formats import (
    ROTATED,
    by_split,
    numbers,
    read_xml,
    root_element,
    some_files_near,
    turned,
    whole_number,
)
from ssdctl.data.image_files import dataset_folder, files_below, files_in, is_image
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import listed

LOOKED_FOR = ("annotations.xml",)
MAX_BYTES = 500_000_000
SHAPES = ("box", "polygon", "mask", "ellipse")
OUTSIDE = "boxes outside their frame"
FRAME = re.compile("frame_([0-9]{6}|[1-9][0-9]{6,})")
UNLABELED = "shapes without a label"
_Frame = tuple[
    str | None, LabeledImage
]  # its split, if it is given, and the image; its size is 0 if it is not given


def recognize(path: Path) -> Path | None:
    return next(iter(_files(path)), None)


def _files(path: Path) -> list[Path]:
    """Return the XML files of a folder and of folders below it that are called as a split."""
    if path.is_file():
        return _own([path])
    folders = [path, *sorted(p for p in path.glob("*") if split_of(p.name) and p.is_dir())]
    return _own([file for folder in folders for file in files_in(folder, ".xml")])


def _own(files: Sequence[Path]) -> list[Path]:
    files = [file for file in files if file.suffix.lower() == ".xml"]
    return [file for file in files if root_element(file) == "annotations"]


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of its XML file; classes are in the order of the file."""
    root, files, notes = dataset_folder(path), _files(path), list[str]()
    if not files:
        raise DataError(f"{path}: no XML file of CVAT (looked for annotations.xml)")
    if others := [f for f in _own(some_files_near(path, LOOKED_FOR, ".xml")) if f not in files]:
        notes.append(f"files of CVAT that are not read: {listed(others, MAX_NAMED)}")
    counts: Counter[str] = Counter()
    trees = {file: read_xml(file, MAX_BYTES) for file in files}
    contents = {
        file: _images(tree, file, counts) + _track_frames(tree, file, root, counts)
        for file, tree in trees.items()
    }
    chosen: dict[str | None, Path] = {None: files[0]}  # whose images may name their splits
    if len(files) > 1:
        names = {file: {image.file_name for _, image in contents[file]} for file in files}
        chosen = dict(by_split(root, files, names.__getitem__, notes).items())
    frames = [(own or s, image) for own, file in chosen.items() for s, image in contents[file]]
    labels = (e for f in chosen.values() for e in trees[f].iterfind("meta//labels/label"))
    used = [box.name for _, image in frames for box in image.boxes]
    declared = (e.findtext("name", "").strip() for e in labels if not e.findtext("parent"))
    classes = list(dict.fromkeys([*filter(None, declared), *used]))
    notes += [
        f"{files[0].name}: {kind}{'' if kind == ROTATED else ', left out'}: {count:,}"
        for kind, count in counts.items()
    ]
    names_of_images = [image.file_name for _, image in frames]
    placed = place([split for split, _ in frames], names_of_images, notes)
    splits: dict[str, tuple[Path, list[LabeledImage]]] = {}
    for split, (_, image) in zip(placed, frames, strict=True):
        if split is not None:
            splits.setdefault(split, (chosen.get(split, files[0]), []))[1].append(image)
    finder = ImageFinder(root, image_dir=image_dir)
    origins = {split: file for split, (file, _) in splits.items()}
    return from_images(located(finder, splits, notes), classes, root, origins, notes)


def _images(tree: Any, path: Path, counts: Counter[str]) -> list[_Frame]:
    frames = []
    for image in tree.iterfind("image"):
        name = image.get("name", "").replace("\\", "/")
        if not name:
            raise DataError(f"{path}: an image without a name")
        location = f"{path}: image {name}"
        boxes: list[LabeledBox] = []
        for element in image:
            if element.tag not in SHAPES:
                counts[f"{element.tag} shapes"] += 1
            else:
                boxes += _boxes(element, element.get("label"), location, counts)
        split = split_of(image.get("subset") or "")
        width, height = (
            whole_number(image.get(side, "0"), f"{location}: {side}")
            for side in ("width", "height")
        )
        is_complete = len(boxes) == sum(element.tag != "tag" for element in image)
        frame = LabeledImage(name, width, height, boxes, is_complete=is_complete)
        frames.append((split, frame))
    return frames


def _track_frames(tree: Any, path: Path, root: Path, counts: Counter[str]) -> list[_Frame]:
    """Return the frames of a video: those of each track, and others of the task below `root`."""

    def meta(tag: str, default: int) -> int:
        text = tree.findtext(f"meta//{tag}", "").strip()
        return whole_number(text, f"{path}: {tag}") if text else default

    if len(tree.findall("meta//task")) > 1 and tree.find("track") is not None:
        raise DataError(
            f"{path}: has the tracks of several tasks, whose frames have the same numbers",
            hint="export each task by itself, and prepare each export",
        )
    by_frame: dict[int, list[LabeledBox]] = {}
    incomplete = set[int]()
    for track in tree.iterfind("track"):
        for element in track:
            if element.get("outside") == "1":
                counts[OUTSIDE] += 1
                continue
            location = f"{path}: track {track.get('id')}, frame {element.get('frame')}"
            frame = whole_number(element.get("frame", ""), f"{location}: frame")
            boxes = by_frame.setdefault(frame, [])
            known = len(boxes)
            if element.tag not in SHAPES:
                counts[f"{element.tag} shapes"] += 1
            else:
                boxes += _boxes(element, track.get("label"), location, counts)
            if len(boxes) == known:
                incomplete.add(frame)
    first, last = meta("start_frame", 0), meta("stop_frame", meta("size", 0) - 1)
    for file in map(PurePosixPath, files_below(root) if by_frame else ()):
        match = FRAME.fullmatch(file.stem)
        if match and is_image(file) and first <= int(match[1]) <= last:
            by_frame.setdefault(int(match[1]), [])
    width, height = meta("original_size/width", 0), meta("original_size/height", 0)
    return [
        (
            None,
            LabeledImage(
                f"frame_{number:06d}", width, height, boxes, is_complete=number not in incomplete
            ),
        )
        for number, boxes in sorted(by_frame.items())
    ]


def _boxes(
    element: Any, label: str | None, location: str, counts: Counter[str]
) -> list[LabeledBox]:
    """Return the upright box around a shape; none if the shape has no label."""
    try:
        left, top, right, bottom = _extent(element)
        degrees = numbers([element.get("rotation") or "0"])[0]
    except (ValueError, KeyError):
        raise DataError(f"{location}: a {element.tag} without its coordinates") from None
    if not label or not label.strip():
        counts[UNLABELED] += 1
        return []
    if degrees % 180 and element.tag in ("box", "ellipse"):
        counts[ROTATED] += 1
        norm = np.hypot if element.tag == "ellipse" else operator.add
        left, top, width, height = turned((left, top, right - left, bottom - top), degrees, norm)
        return [LabeledBox(label, float(left), float(top), float(width), float(height))]
    return [LabeledBox(label, left, top, right - left, bottom - top)]


def _extent(element: Any) -> list[float]:
    values = element.attrib
    if element.tag == "box":
        return numbers([values[key] for key in ("xtl", "ytl", "xbr", "ybr")])
    if element.tag == "mask":
        left, top, width, height = numbers([values[k] for k in ("left", "top", "width", "height")])
        return [left, top, left + width, top + height]
    if element.tag == "ellipse":
        x, y, rx, ry = numbers([values[key] for key in ("cx", "cy", "rx", "ry")])
        return [x - rx, y - ry, x + rx, y + ry]
    points = numbers(values["points"].replace(";", ",").split(","))
    return [min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])]
