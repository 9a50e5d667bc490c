"""Check annotations: refuse what cannot be trusted, drop or clip what cannot be trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import (
    MAX_NAMED,
    NO_LABELS,
    UNLABELED,
    UNLISTED,
    Annotations,
    ClassName,
    Finding,
    refuse,
)
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name
from ssdctl.runtime.safe_text import counted, listed

MAX_SIDE = 65535  # a JPEG's limit
UNIT_BOX_PX = 1.5  # a box in fractions of its image is at most 1 x 1
NEARLY_ALL = 0.95
BLOCK = 1 << 18  # boxes that are clipped at a time
MIN_CLIPPED, MIN_CLIPPED_SHARE = 5, 0.1  # fewer overshoots are not a sign of another box format

OK, CLIPPED, NO_SIZE, OUTSIDE = range(4)
KINDS = (
    "",
    "box clipped to its image",
    "box of no size, dropped",
    "box outside its image, dropped",
)
NO_BBOX = "annotation without bbox, dropped"
DROPPED_IMAGE = "image dropped"
NOTED_IMAGE = "image with a note"
NO_OBJECTS = "no objects"
NO_BOXES_LEFT = "no valid box (skipped in training)"
WITHOUT_OBJECTS = (NO_OBJECTS, NO_LABELS)
DROPPED_BOXES = frozenset((*KINDS[NO_SIZE:], NO_BBOX, UNLISTED))


class Objects(NamedTuple):
    """The M objects of N images that have a box; `starts[i]:starts[i + 1]` are those of image i."""

    starts: NDArray[np.int64]  # N + 1
    labels: NDArray[np.int32]  # M
    boxes: NDArray[np.float64]  # M x 4: left, top, width, height in pixels, unclipped
    areas: NDArray[np.float64]  # M, square pixels
    is_crowd: NDArray[np.bool_]  # M
    is_trained: NDArray[np.bool_]  # M: whether the box has a size and is in its image
    fractions: NDArray[np.float32]  # M x 4: ltrb clipped / image size, rounded once

    def num_trained(self) -> NDArray[np.int64]:
        """Return how many boxes of each image (N) are trained on."""
        return np.diff(np.concatenate([[0], np.cumsum(self.is_trained)])[self.starts])


class Checked(NamedTuple):
    objects: Objects
    is_empty: NDArray[np.bool_]  # N: no object is listed for the image, and none was dropped
    findings: list[Finding]  # those of the reader, and one for each object dropped or clipped
    warnings: list[str]  # for the user


def check(annotations: Annotations) -> Checked:
    """Check the annotations of a split; refuse unsafe file names, invalid sizes, no classes."""
    if not annotations.classes:
        raise DataError(f"{annotations.origin}: no categories")
    nameless = [f"category {c.id}" for c in annotations.classes if not c.name.strip()]
    refuse(annotations.origin, "classes without a name", nameless, "give each a name")
    _check_images(annotations)
    has_box = np.asarray(~np.isnan(annotations.boxes).any(axis=1))
    findings = [
        _finding(annotations, int(i), NO_BBOX, annotations.file_names[annotations.rows[i]])
        for i in np.nonzero(~has_box)[0]
    ]
    order: slice | NDArray[np.int64] = slice(None)  # as most files have it: copies nothing
    if not (has_box.all() and (annotations.rows[1:] >= annotations.rows[:-1]).all()):
        order = np.argsort(annotations.rows, kind="stable")
        order = order[has_box[order]]
    rows, boxes = annotations.rows[order], annotations.boxes[order]
    fractions, kinds = np.empty(boxes.shape, np.float32), np.empty(len(boxes), np.uint8)
    num_unit = 0
    for start in range(0, len(boxes), BLOCK):  # the intermediate arrays are large
        block = slice(start, start + BLOCK)
        ltrb, fractions[block], kinds[block] = clip(boxes[block], annotations.sizes[rows[block]])
        small = ((ltrb[:, :2] <= 1) & (ltrb[:, 2:] - ltrb[:, :2] < UNIT_BOX_PX)).all(axis=1)
        num_unit += int((small & (kinds[block] <= CLIPPED)).sum())
    numbers = np.arange(len(has_box))[order]
    found = np.nonzero(kinds)[0]
    for i in found[np.argsort(numbers[found])]:
        width, height = annotations.sizes[rows[i]]
        detail = f"bbox {boxes[i].tolist()} in {width} x {height}"
        findings.append(_finding(annotations, int(numbers[i]), KINDS[kinds[i]], detail))
    areas = annotations.areas[order]
    with np.errstate(over="ignore"):
        products = boxes[:, 2] * boxes[:, 3]
    objects = Objects(
        starts=np.searchsorted(rows, np.arange(len(annotations.file_names) + 1)),
        labels=annotations.labels[order],
        boxes=boxes,
        areas=np.where(np.isnan(areas), products, areas),
        is_crowd=annotations.is_crowd[order],
        is_trained=kinds <= CLIPPED,
        fractions=fractions,
    )
    warnings = _warnings(boxes, kinds, num_unit, annotations.sizes, rows)
    return Checked(objects, _is_empty(annotations), [*annotations.findings, *findings], warnings)


def _is_empty(annotations: Annotations) -> NDArray[np.bool_]:
    kinds = (UNLISTED, UNLABELED, NO_LABELS)
    dropped = [f.image_id for f in annotations.findings if f.kind in kinds]
    is_empty = ~np.isin(annotations.image_ids, dropped)
    is_empty[annotations.rows] = False
    return is_empty


def clip(
    boxes: NDArray[np.float64], size: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.uint8]]:
    """Clip boxes (B, 4: left, top, width, height) to their images' sizes (B, 2) in pixels.

    Returns their (B, 4) corners in pixels and in fractions of the image, and their (B,) positions
    in KINDS: up to CLIPPED a box can be trained on.
    """
    with np.errstate(all="ignore"):  # overflows show in the results
        low, extent = boxes[:, :2], boxes[:, 2:]
        high = low + extent
        empty = ((extent <= 0) | (high == low)).any(axis=1)
        left_top, right_bottom = np.maximum(low, 0), np.minimum(high, size)
        outside = (right_bottom <= left_top).any(axis=1)
        # COCO's own boxes overshoot by rounding: a hundredth of a pixel is not reported.
        overshoot = np.maximum(left_top - low, high - right_bottom).max(axis=1, initial=0)
        ltrb = np.concatenate([left_top, right_bottom], axis=1)
        fractions = (ltrb / np.tile(size, 2)).astype(np.float32)
        tiny = (fractions[:, 2:] <= fractions[:, :2]).any(axis=1)
    kinds = np.where(overshoot > 0.01, CLIPPED, OK).astype(np.uint8)
    kinds[tiny] = NO_SIZE
    kinds[outside] = OUTSIDE
    kinds[empty] = NO_SIZE
    return ltrb, fractions, kinds


def _warnings(
    boxes: NDArray[np.float64],
    kinds: NDArray[np.uint8],
    num_unit: int,
    sizes: NDArray[np.int64],
    rows: NDArray[np.int32],
) -> list[str]:
    """Return a warning if boxes look like another format than left, top, width, height in pixels.

    It is not an error: such boxes may be intended.
    """
    number = int((kinds <= CLIPPED).sum())
    if num_unit and num_unit >= NEARLY_ALL * number:
        return [
            f"{num_unit:,} of {number:,} boxes are smaller than {UNIT_BOX_PX} pixels and are in "
            "the image's top left corner: they look like fractions of the image (0 to 1), where "
            "the format has pixels. Multiply them by the image's width and height; --preview FILE "
            "shows the boxes"
        ]
    clipped = int((kinds == CLIPPED).sum())
    if clipped < max(MIN_CLIPPED, MIN_CLIPPED_SHARE * number):
        return []
    fits_as_corners = (boxes[:, 2:] > boxes[:, :2]) & (boxes[:, 2:] <= sizes[rows] + 1)
    if fits_as_corners.all(axis=1).mean() < NEARLY_ALL:
        return []
    return [
        f"{clipped:,} of {number:,} boxes leave their image, and would not if their widths and "
        "heights were the right and bottom edges: the numbers of a label may have another meaning "
        "than in this format (of COCO, left, top, width and height); --preview FILE shows the boxes"
    ]


def _finding(annotations: Annotations, number: int, kind: str, detail: str) -> Finding:
    image_id = int(annotations.image_ids[annotations.rows[number]])
    return Finding(kind, image_id, int(annotations.ids[number]), detail)


def _check_images(annotations: Annotations) -> None:
    path, sizes = annotations.origin, annotations.sizes
    if absent := [repr(name) for name in annotations.file_names if not is_plain_name(name)]:
        raise DataError(
            f"{path}: no file fits {counted(len(absent), 'image')}: {listed(absent, MAX_NAMED)}",
            hint="copy the images into the dataset folder, remove them from the file, or write "
            "paths below the split's image folder, as in 'a.jpg'",
        )
    for row in np.nonzero(((sizes < 1) | (sizes > MAX_SIDE)).any(axis=1))[0]:
        width, height = sizes[row].tolist()
        name = f"image {annotations.image_ids[row]} ({annotations.file_names[row]})"
        raise DataError(f"{path}: {name}: size {width} x {height}")


def duplicate_names(classes: Sequence[ClassName]) -> list[str]:
    """Return a warning if names are equal, or differ only in case and spaces."""
    names = [" ".join(c.name.lower().replace("_", " ").split()) for c in classes]
    counts = Counter(names)
    pairs = zip(classes, names, strict=True)
    same = [f"{c.name} (id {c.id})" for c, name in pairs if counts[name] > 1]
    warning = (
        "categories have the same name and are trained as different classes: "
        f"{listed(same, MAX_NAMED)}. Give each its own name, or one of their ids to all annotations"
    )
    return [warning] if same else []
