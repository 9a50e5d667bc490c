"""Summarize a split: boxes per class, and what makes it hard to train or to measure with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_CLASSES_NAMED, ClassName
from ssdctl.data.check import Objects
from ssdctl.data.default_boxes import IMAGE_SIZE, can_match
from ssdctl.data.tiles import fitting_tile
from ssdctl.runtime.safe_text import listed

MIN_VALIDATION = 20  # images; with fewer, one image changes AP by several points
BLOCK = 1 << 14  # images whose classes are counted at a time
MAX_EMPTY = 0.25  # share of the images; with more, labeling may not be finished
MAX_UNMATCHED = 0.25  # share of the boxes
MAX_COMPARED = 100_000  # boxes that are compared with the default boxes, evenly spaced


class ClassCount(msgspec.Struct, frozen=True):
    """What a split has of a class, in usable images."""

    category_id: int | None
    name: str
    images: int
    boxes: int


class ObjectSizes(msgspec.Struct, frozen=True):
    """Sizes of a split's boxes, in pixels after images are resized to 300 x 300.

    SSD300 learns little from a box that overlaps none of its default boxes by an IoU of 0.5.
    """

    median: tuple[float, float]  # width, height; 0 without boxes
    unmatched_share: float  # share of the boxes that overlap no default box
    unmatched_median: tuple[float, float]
    fitting_tile: int | None  # in tiles of as many pixels the median object is large enough


def count_classes(
    classes: Sequence[ClassName], objects: Objects, is_usable: NDArray[np.bool_]
) -> list[ClassCount]:
    boxes, images = (np.zeros(len(classes) + 1, np.int64) for _ in range(2))
    for start in range(0, len(is_usable), BLOCK):
        starts = objects.starts[start : start + BLOCK + 1]
        part = slice(starts[0], starts[-1])
        rows, labels = np.repeat(np.arange(len(starts) - 1), np.diff(starts)), objects.labels[part]
        is_counted = objects.is_trained[part] & is_usable[start + rows]
        has_class = np.zeros((len(starts) - 1, len(boxes)), np.bool_)
        has_class[rows[is_counted], labels[is_counted]] = True
        images += has_class.sum(axis=0)
        boxes += np.bincount(labels[is_counted], minlength=len(boxes))
    return [
        ClassCount(c.id, c.name, int(images[label]), int(boxes[label]))
        for label, c in enumerate(classes, 1)
    ]


def object_sizes(objects: Objects) -> ObjectSizes:
    boxes = objects.fractions[objects.is_trained]
    boxes = boxes[:: -(-len(boxes) // MAX_COMPARED) or 1]
    unmatched = boxes[~can_match(boxes)]
    share = round(len(unmatched) / max(len(boxes), 1), 4)
    tile = fitting_tile(objects.boxes[objects.is_trained])
    return ObjectSizes(_median(boxes), share, _median(unmatched), tile)


def _median(boxes: NDArray[np.float32]) -> tuple[float, float]:
    if not len(boxes):
        return 0.0, 0.0
    width, height = np.median(boxes[:, 2:] - boxes[:, :2], axis=0) * IMAGE_SIZE
    return round(float(width), 1), round(float(height), 1)


def summary_warnings(
    split: str,
    images: int,
    background: int,
    per_class: Sequence[ClassCount],
    sizes: ObjectSizes,
) -> list[str]:
    """Return what to tell the user about a split.

    Args:
        images: Number of usable images.
        background: How many of them are without objects.
    """
    warnings = []
    if split == "train" and background > MAX_EMPTY * images:
        warnings.append(
            f"{background:,} of {images:,} images have no objects: if some are not labeled yet, "
            "leave them out, or train with --background 0"
        )
    if absent := [c.name for c in per_class if not c.boxes]:
        effect = "they are never learned" if split == "train" else "their AP is not measured"
        warnings.append(f"classes without a box: {listed(absent, MAX_CLASSES_NAMED)}; {effect}")
    if split == "val" and images < MIN_VALIDATION:
        warnings.append(
            f"{images} images are too few to measure with: AP changes by several points with one "
            "image"
        )
    if split == "train" and sizes.unmatched_share > MAX_UNMATCHED:
        width, height = sizes.unmatched_median
        warnings.append(
            f"{sizes.unmatched_share:.0%} of the boxes match no default box of SSD300 (median "
            f"{width:.0f} x {height:.0f} of {IMAGE_SIZE} x {IMAGE_SIZE} pixels), so few of these "
            f"objects will be found: train in tiles, --tile {sizes.fitting_tile}"
        )
    return warnings
