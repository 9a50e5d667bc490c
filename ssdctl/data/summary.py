"""Summarize a split: boxes per class, and what makes it hard to train or to measure with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_CLASSES_NAMED, ClassName
from ssdctl.data.check import Objects
from ssdctl.data.default_boxes import IMAGE_SIZE, can_match
from ssdctl.runtime.safe_text import listed

MIN_VALIDATION = 20  # images; with fewer, one image changes AP by several points
MAX_UNMATCHED = 0.25  # share of the boxes


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
    unmatched: int  # boxes that overlap no default box
    unmatched_share: float
    unmatched_median: tuple[float, float]


def count_classes(
    classes: Sequence[ClassName], objects: Objects, is_usable: NDArray[np.bool_]
) -> list[ClassCount]:
    rows = np.repeat(np.arange(len(is_usable)), np.diff(objects.starts))
    is_counted = objects.is_trained & is_usable[rows]
    rows, labels = rows[is_counted], objects.labels[is_counted].astype(np.int64)
    boxes = np.bincount(labels, minlength=len(classes) + 1)
    pairs = np.unique(rows * (len(classes) + 1) + labels)
    images = np.bincount(pairs % (len(classes) + 1), minlength=len(classes) + 1)
    return [
        ClassCount(c.id, c.name, int(images[label]), int(boxes[label]))
        for label, c in enumerate(classes, 1)
    ]


def object_sizes(objects: Objects) -> ObjectSizes:
    boxes = objects.fractions[objects.is_trained]
    unmatched = boxes[~can_match(boxes)]
    share = round(len(unmatched) / max(len(boxes), 1), 4)
    return ObjectSizes(_median(boxes), len(unmatched), share, _median(unmatched))


def _median(boxes: NDArray[np.float32]) -> tuple[float, float]:
    if not len(boxes):
        return 0.0, 0.0
    width, height = np.median(boxes[:, 2:] - boxes[:, :2], axis=0) * IMAGE_SIZE
    return round(float(width), 1), round(float(height), 1)


def summary_warnings(
    split: str, images: int, per_class: Sequence[ClassCount], sizes: ObjectSizes
) -> list[str]:
    """Return what to tell the user about a split of `images` usable images."""
    warnings = []
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
            "objects will be found: crop the images around the objects or cut them into tiles, "
            "then prepare those"
        )
    return warnings
