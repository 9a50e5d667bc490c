"""What `prepare` reports about a dataset, and which datasets it refuses.

Of each split: what was dropped, the boxes of each class, and what makes it hard to train or to
measure with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_CLASSES_NAMED, ClassName, Finding
from ssdctl.data.check import DROPPED_BOXES, DROPPED_IMAGE, WITHOUT_OBJECTS, Objects
from ssdctl.data.default_boxes import IMAGE_SIZE, can_match
from ssdctl.data.duplicates import Duplicates
from ssdctl.data.tiles import fitting_tile
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import counted, html_table, listed

MAX_DROPPED = 0.05  # share of the images or boxes in a split
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
    fitting_tile: int | None  # in tiles of as many pixels the median object is large enough; None:
    # they would not be smaller than the images


class SplitReport(msgspec.Struct, frozen=True):
    split: str
    images: int  # including dropped images
    boxes: int  # to train on, in usable images
    classes: int
    trainable: int  # images with a box to train on
    background: int  # images without objects
    findings: list[Finding]
    key: str  # identifies the job that wrote the index
    per_class: list[ClassCount]
    object_sizes: ObjectSizes
    duplicates: list[Duplicates]  # images that another split has, too
    warnings: list[str] = []  # for the user
    notes: list[str] = []  # how the files were read

    @property
    def usable(self) -> int:
        return self.images - sum(f.kind == DROPPED_IMAGE for f in self.findings)

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return dict(Counter(f.kind for f in self.findings).most_common())


class Outcome(msgspec.Struct, frozen=True):
    root: str
    store: str
    packed: bool
    unchanged: bool
    splits: list[SplitReport]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each split, and what was dropped or repaired."""
        rows = []
        for s in self.splits:
            found = ", ".join(f"{count} x {kind}" for kind, count in s.counts().items())
            rows.append((s.split, s.usable, s.boxes, s.classes, found or "none"))
        return html_table(("split", "images", "boxes", "classes", "findings"), rows, self.store)


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
    whole, tile = objects.fractions[objects.is_trained], None
    if len(whole):
        pixels = objects.boxes[objects.is_trained][:, 2:]
        longest = np.median((pixels / (whole[:, 2:] - whole[:, :2])).max(axis=1))  # image's side
        tile = fitting_tile(objects.boxes[objects.is_trained])
        tile = tile if tile is not None and tile < longest else None
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
            "objects will be found"
            + f": train in tiles, --tile {sizes.fitting_tile}"
            * (sizes.fitting_tile is not None)
        )
    return warnings


def refuse_empty(report: SplitReport, origin: Path) -> None:
    """Refuse a training split without a usable image that has a box, with the reasons counted."""
    if report.split != "train" or report.trainable:
        return
    reasons = [f"{count:,} x {kind}" for kind, count in _dropped(report).items()]
    reasons += [
        f"{counted(n, 'image')} with {k}"
        for k, n in report.counts().items()
        if k in WITHOUT_OBJECTS
    ]
    example = next((f for f in report.findings if f.kind not in WITHOUT_OBJECTS), None)
    hints = [f"for example image {example.image_id}, {example.detail}"] if example else []
    raise DataError(
        f"{origin} (train): nothing to train on, none of {counted(report.images, 'image')} is "
        f"usable and has a box: {', '.join(reasons)}",
        hint="; ".join([*hints, *report.notes]) or "label objects in some of the images",
    )


def refuse_dropped(report: SplitReport, origin: Path, num_boxes: int, command: str) -> None:
    """Refuse a split that loses too many of its images or boxes; `command` accepts the loss."""
    reasons = _dropped(report)
    num_images = sum(f.kind == DROPPED_IMAGE for f in report.findings)
    dropped_boxes = reasons.total() - num_images
    if num_images <= MAX_DROPPED * report.images and dropped_boxes <= MAX_DROPPED * num_boxes:
        return
    example = next(f for f in report.findings if f.kind in (DROPPED_IMAGE, *DROPPED_BOXES))
    raise DataError(
        f"{origin} ({report.split}): {num_images:,} of {report.images:,} images and "
        f"{dropped_boxes:,} of {num_boxes:,} boxes are dropped: "
        f"{', '.join(f'{count:,} x {reason}' for reason, count in reasons.items())}",
        hint=f"for example image {example.image_id}, {example.detail}; over {MAX_DROPPED:.0%} is "
        f"not accepted: fix the files, or accept the loss: {command}",
    )


def _dropped(report: SplitReport) -> Counter[str]:
    """Return the reasons for which images, then boxes, were dropped, with their numbers."""
    images = Counter(_reason(f.detail) for f in report.findings if f.kind == DROPPED_IMAGE)
    return images + Counter(f.kind for f in report.findings if f.kind in DROPPED_BOXES)


def _reason(detail: str) -> str:
    """Return why an image was dropped, without its name and what is particular to it."""
    return (detail.partition(": ")[2] or detail).partition(" (")[0]
