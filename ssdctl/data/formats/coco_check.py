"""Check COCO annotations: refuse what cannot be trusted, drop or clip what cannot be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.formats.coco import Annotations, link, positions
from ssdctl.data.formats.coco_json import ImageEntry, column
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

MAX_SIDE = 65535  # of a JPEG
UNIT_BOX_PX = 1.5  # a box in fractions of its image is at most 1 x 1
NEARLY_ALL = 0.95
BLOCK = 1 << 18  # boxes that are clipped at a time
MIN_CLIPPED, MIN_CLIPPED_SHARE = 5, 0.1  # fewer overshoots are not a sign of another box format

OK, CLIPPED, NO_SIZE, OUTSIDE, NO_BBOX = range(5)
KINDS = (
    "",
    "box clipped to its image",
    "box of no size, dropped",
    "box outside its image, dropped",
    "annotation without bbox, dropped",
)
DROPPED_BOXES = frozenset(KINDS[NO_SIZE:])


class Finding(msgspec.Struct, frozen=True):
    """One thing that was dropped or changed."""

    kind: str
    image_id: int
    annotation_id: int | None
    detail: str


class Boxes(NamedTuple):
    """The checked boxes of a split, image by image, as they are trained on.

    `starts[i]:starts[i + 1]` are image i's rows of `ltrb` (pixels) and `labels`.
    """

    starts: NDArray[np.int64]  # N + 1
    ltrb: NDArray[np.float64]  # M x 4
    fractions: NDArray[np.float32]  # M x 4: ltrb / image size, rounded once
    labels: NDArray[np.int32]  # M
    is_crowd: NDArray[np.bool_]  # M


def check(annotations: Annotations, path: Path) -> tuple[Boxes, list[Finding]]:
    """Refuse what cannot be trusted, drop or clip what cannot be trained on.

    Returns:
        The boxes clipped to their images, and a finding for each one dropped or clipped.

    Raises:
        DataError: Duplicate ids, ids that refer to nothing, unsafe file names, invalid sizes.
    """
    row, label = link(annotations, path)
    if not annotations.categories:
        raise DataError(f"{path}: no categories")
    sizes = _sizes(path, annotations.images)
    columns = annotations.annotations
    ltrb, fractions, kind = _clipped(columns.bbox, sizes, row)
    findings = [_finding(annotations, int(i), int(row[i]), kind[i]) for i in np.nonzero(kind)[0]]
    kept = np.nonzero(kind <= CLIPPED)[0]
    kept = kept[np.argsort(row[kept], kind="stable")]  # image by image, in the file's order
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.bincount(row[kept], minlength=len(sizes)), out=starts[1:])
    labels = label[kept].astype(np.int32)
    return Boxes(starts, ltrb[kept], fractions[kept], labels, columns.is_crowd[kept]), findings


def format_warnings(
    annotations: Annotations, boxes: Boxes, findings: Sequence[Finding]
) -> list[str]:
    """Return a warning if boxes look like another format than left, top, width, height in pixels.

    Args:
        annotations: A split's.
        boxes: The result of `check`.
        findings: Those of `check`.

    Returns:
        At most one sentence with its remedy. It is not an error: such boxes may be intended.
    """
    low, high = boxes.ltrb[:, :2], boxes.ltrb[:, 2:]
    number = len(boxes.ltrb)
    num_unit = int(((low <= 1) & (high - low < UNIT_BOX_PX)).all(axis=1).sum())
    if num_unit and num_unit >= NEARLY_ALL * number:
        return [
            f"{num_unit:,} of {number:,} boxes are smaller than {UNIT_BOX_PX} pixels and are in "
            "the image's top left corner: they look like fractions of the image (0 to 1). Write "
            "bbox as left, top, width, height in pixels: multiply by the image's width and height"
        ]
    clipped = sum(f.kind == KINDS[CLIPPED] for f in findings)
    if clipped < max(MIN_CLIPPED, MIN_CLIPPED_SHARE * number):
        return []
    bbox = annotations.annotations.bbox
    images = annotations.images
    sizes = np.stack([column(images, "width"), column(images, "height")], axis=1)
    size = sizes[positions(column(images, "id"), annotations.annotations.image_id)]
    fits_as_corners = (bbox[:, 2:] > bbox[:, :2]) & (bbox[:, 2:] <= size + 1)
    if fits_as_corners.all(axis=1).mean() < NEARLY_ALL:
        return []
    return [
        f"{clipped:,} of {number:,} boxes leave their image, and would not if bbox were left, top, "
        "right, bottom. Write it as left, top, width, height: width = right - left, "
        "height = bottom - top"
    ]


def _clipped(
    bbox: NDArray[np.float64], sizes: NDArray[np.int64], row: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.uint8]]:
    """Clip boxes to their images, block by block, because the intermediate arrays are large.

    Args:
        bbox: (M, 4) left, top, width, height in pixels.
        sizes: (N, 2) width and height of the images.
        row: (M,) the image of each box.

    Returns:
        (M, 4) ltrb in pixels, (M, 4) ltrb in fractions of the image, and (M,) what was done:
        nothing, clipped, or dropped for a reason.
    """
    ltrb, fractions = np.empty(bbox.shape), np.empty(bbox.shape, np.float32)
    kind = np.empty(len(bbox), np.uint8)
    for start in range(0, len(bbox), BLOCK):
        block = slice(start, start + BLOCK)
        ltrb[block], fractions[block], kind[block] = _clipped_block(bbox[block], sizes[row[block]])
    return ltrb, fractions, kind


def _clipped_block(
    bbox: NDArray[np.float64], size: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.uint8]]:
    """Clip boxes (B, 4) to their images' sizes (B, 2); see `_clipped`."""
    with np.errstate(all="ignore"):  # overflows show in the results
        low, extent = bbox[:, :2], bbox[:, 2:]
        high = low + extent
        empty = ((extent <= 0) | (high == low)).any(axis=1)
        inside = np.maximum(low, 0), np.minimum(high, size)
        outside = (inside[1] <= inside[0]).any(axis=1)
        # COCO's own boxes overshoot by rounding: a hundredth of a pixel is not reported.
        overshoot = np.maximum(inside[0] - low, high - inside[1]).max(axis=1, initial=0)
        ltrb = np.concatenate(inside, axis=1)
        fractions = (ltrb / np.tile(size, 2)).astype(np.float32)
        tiny = (fractions[:, 2:] <= fractions[:, :2]).any(axis=1)
    kind = np.where(overshoot > 0.01, CLIPPED, OK).astype(np.uint8)
    kind[tiny] = NO_SIZE
    kind[outside] = OUTSIDE
    kind[empty] = NO_SIZE
    kind[np.isnan(bbox).any(axis=1)] = NO_BBOX
    return ltrb, fractions, kind


def _finding(annotations: Annotations, index: int, row: int, kind: int) -> Finding:
    columns, image = annotations.annotations, annotations.images[row]
    detail = image.file_name
    if kind != NO_BBOX:
        detail = f"bbox {columns.bbox[index].tolist()} in {image.width} x {image.height}"
    return Finding(KINDS[kind], image.id, int(columns.id[index]), detail)


def _sizes(path: Path, images: list[ImageEntry]) -> NDArray[np.int64]:
    """Widths and heights, N x 2, after names and sizes were checked."""
    for image in images:
        if not is_plain_name(image.file_name):
            raise DataError(
                f"{path}: image {image.id}: {image.file_name!r} is not a plain path below the "
                "image folder",
                hint="file_name is relative to the split's image folder, as in 'a.jpg'",
            )
        if image.width is None or image.height is None:
            raise DataError(f"{path}: image {image.id}: no width and height")
    sizes = np.stack([column(images, "width"), column(images, "height")], axis=1)
    for row in np.nonzero(((sizes < 1) | (sizes > MAX_SIDE)).any(axis=1))[0]:
        image = images[row]
        raise DataError(f"{path}: image {image.id}: size {image.width} x {image.height}")
    return sizes
