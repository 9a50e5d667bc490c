"""Read CVAT's own XML: "CVAT for images 1.1" and "CVAT for video 1.1".

    splits, classes = read_cvat_xml(path, root)

Boxes are read, and polygons, masks and ellipses by their extent; a rotated box becomes the upright
box around it. Points, polylines, cuboids, skeletons and tags are counted and left out, and so are
boxes of tracks outside their frame.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.data.annotations import LabeledBox, LabeledImage
from ssdctl.data.formats.coco import refuse
from ssdctl.data.formats.file_names import files_below
from ssdctl.data.formats.xml_reader import numbers, read_xml, whole_number
from ssdctl.data.image_check import header_size
from ssdctl.data.split_files import split_of
from ssdctl.errors import DataError

log = logging.getLogger(__name__)
MAX_BYTES = 500_000_000
SHAPES = ("box", "polygon", "mask", "ellipse")
ROTATED, OUTSIDE = "rotated boxes, read as the upright box around them", "boxes outside their frame"


class _Frame(NamedTuple):
    """An image of the file, with its size (0 = not given) and split."""

    name: str
    split: str
    width: int
    height: int
    boxes: list[LabeledBox]


def read_cvat_xml(path: Path, root: Path) -> tuple[dict[str, list[LabeledImage]], list[str]]:
    """Return the images of each split below `root`, and the classes in the order of the file.

    Raises:
        DataError: A broken file, an image that does not exist.
    """
    tree = read_xml(path, MAX_BYTES)
    if tree.tag != "annotations":
        raise DataError(f"{path}: not CVAT's XML: its root is <{tree.tag}>, not <annotations>")
    counts: Counter[str] = Counter()
    frames = _images(tree, path, counts) + _track_frames(tree, path, counts)
    labels = [(e.text or "").strip() for e in tree.iterfind("meta//labels/label/name")]
    classes = list(dict.fromkeys(filter(None, labels)))
    used = dict.fromkeys(box.name for frame in frames for box in frame.boxes)
    classes += [name for name in used if name not in classes]
    for kind, count in counts.items():
        left_out = "" if kind == ROTATED else ", left out"
        log.info(f"{path.name}: {count:,} {kind}{left_out}")
    return _located(frames, root, path), classes


def _images(tree: Any, path: Path, counts: Counter[str]) -> list[_Frame]:
    frames = []
    for image in tree.iterfind("image"):
        name = image.get("name", "").replace("\\", "/")
        if not name:
            raise DataError(f"{path}: an image without a name")
        boxes = [
            _shape(element, element.get("label"), f"{path}: image {name}", counts)
            for element in image
            if element.tag in SHAPES
        ]
        counts.update(f"{element.tag} shapes" for element in image if element.tag not in SHAPES)
        split = split_of(image.get("subset") or "") or "train"
        width, height = (
            whole_number(image.get(side, "0"), f"{path}: image {name}: {side}")
            for side in ("width", "height")
        )
        frames.append(_Frame(name, split, width, height, boxes))
    return frames


def _track_frames(tree: Any, path: Path, counts: Counter[str]) -> list[_Frame]:
    """Return the frames of a video: each track has a box for each of its frames."""
    by_frame: dict[int, list[LabeledBox]] = {}
    for track in tree.iterfind("track"):
        for element in track:
            if element.tag not in SHAPES:
                counts[f"{element.tag} shapes"] += 1
            elif element.get("outside") == "1":
                counts[OUTSIDE] += 1
            else:
                place = f"{path}: track {track.get('id')}, frame {element.get('frame')}"
                box = _shape(element, track.get("label"), place, counts)
                frame = whole_number(element.get("frame", ""), f"{place}: frame")
                by_frame.setdefault(frame, []).append(box)
    size = next(tree.iterfind("meta//original_size"), None)
    sides = (0, 0)
    if size is not None:
        width, height = (
            whole_number(size.findtext(side, "0"), f"{path}: original_size/{side}")
            for side in ("width", "height")
        )
        sides = (width, height)
    return [
        _Frame(f"frame_{number:06d}", "train", *sides, boxes)
        for number, boxes in sorted(by_frame.items())
    ]


def _shape(element: Any, label: str | None, place: str, counts: Counter[str]) -> LabeledBox:
    """Return the upright box around a shape."""
    try:
        left, top, right, bottom = _extent(element)
        degrees = numbers([element.get("rotation") or "0"])[0]
    except (ValueError, KeyError):
        raise DataError(f"{place}: a {element.tag} without its coordinates") from None
    if not label:
        raise DataError(f"{place}: a {element.tag} without a label")
    if degrees % 180 and element.tag in ("box", "ellipse"):
        counts[ROTATED] += 1
        angle, width, height = math.radians(degrees), right - left, bottom - top
        sine, cosine = abs(math.sin(angle)), abs(math.cos(angle))
        half_x, half_y = (width * cosine + height * sine) / 2, (width * sine + height * cosine) / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        left, top, right, bottom = x - half_x, y - half_y, x + half_x, y + half_y
    return LabeledBox(label, left, top, right - left, bottom - top)


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


def _located(frames: list[_Frame], root: Path, path: Path) -> dict[str, list[LabeledImage]]:
    """Return the images with their paths below `root`, by split."""
    by_name: dict[str, list[str]] = {}
    for file in files_below(root):
        parts = file.split("/")
        for start in range(len(parts)):
            by_name.setdefault("/".join(parts[start:]), []).append(file)
            if start == len(parts) - 1:
                by_name.setdefault(parts[start].rpartition(".")[0], []).append(file)
    splits: dict[str, list[LabeledImage]] = {}
    missing: list[str] = []
    ambiguous: list[str] = []
    for frame in frames:
        candidates = by_name.get(frame.name, [])
        if len(candidates) > 1:  # one name in several subsets
            folder = {"train", None} if frame.split == "train" else {frame.split}
            candidates = [c for c in candidates if split_of(str(Path(c).parent)) in folder]
        if len(candidates) != 1:
            (ambiguous if candidates else missing).append(frame.name)
            continue
        width, height = frame.width, frame.height
        if not (width and height):
            width, height = header_size(root / candidates[0])
        image = LabeledImage(candidates[0], width, height, frame.boxes)
        splits.setdefault(frame.split, []).append(image)
    refuse(path, f"images that are not below {root}", missing, "export with images, or copy them")
    refuse(path, f"image names that fit several files below {root}", ambiguous)
    return splits
