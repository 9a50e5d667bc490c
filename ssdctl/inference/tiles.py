"""Divide a large image into overlapping tiles, and merge their detections. Torch-free.

    for window in tile_windows(8000, 6000, size=1000, overlap=0.2): ...
    kept = merge(boxes, scores, labels, is_cut, nms_iou=0.5)

An object is cut if its box touches an edge of a tile inside the image. As long as it is smaller
than the overlap, another tile has all of it; the view of the whole image has the larger ones.
Boxes are left, top, right, bottom in pixels of the image.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_TILE = 32
CUT_MARGIN = 0.01  # a box this near to the window's edge touches it, as a fraction of the side
CUT_COVERED = 0.5  # drop a truncated box if a kept box covers more than this

Boxes = NDArray[np.float64]  # K x 4


class Window(NamedTuple):
    left: int
    top: int
    right: int
    bottom: int


def tile_windows(width: int, height: int, size: int, overlap: float) -> list[Window]:
    """Return the whole image, and tiles that cover it if it is larger than one.

    Tiles have `size` pixels; neighbors overlap by at least `overlap`, a fraction of the tile.
    """
    windows = [Window(0, 0, width, height)]
    if width > size or height > size:
        windows += [
            Window(left, top, min(left + size, width), min(top + size, height))
            for top in _starts(height, size, overlap)
            for left in _starts(width, size, overlap)
        ]
    return windows


def _starts(length: int, size: int, overlap: float) -> list[int]:
    """Return evenly spaced starts of tiles, from 0 to the last one that fits."""
    if length <= size:
        return [0]
    stride = max(int(size * (1 - overlap)), 1)
    count = -(-(length - size) // stride) + 1
    return [round(i * (length - size) / (count - 1)) for i in range(count)]


def cut_flags(boxes: Boxes, window: Window, width: int, height: int) -> NDArray[np.bool_]:
    """Return (K,) flags: the box touches an edge of its window that is not the image's."""
    low, high = np.array(window[:2]), np.array(window[2:])
    margin = CUT_MARGIN * (high - low)
    is_cut: NDArray[np.bool_] = (boxes[:, :2] <= low + margin) & (low > 0)
    is_cut |= (boxes[:, 2:] >= high - margin) & (high < [width, height])
    return is_cut[:, 0] | is_cut[:, 1]


def merge(
    boxes: Boxes,
    scores: NDArray[np.float64],
    labels: NDArray[np.int64],
    is_cut: NDArray[np.bool_],
    nms_iou: float,
) -> NDArray[np.int64]:
    """Select the detections of all windows by NMS per class; return indices, the best score first.

    Complete boxes come before cut ones, so that part of an object never replaces all of it. A cut
    box is also dropped if a kept box covers most of it.
    """
    kept: list[int] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.lexsort((-scores[members], is_cut[members]))]
        while len(order):
            best, order = order[0], order[1:]
            kept.append(int(best))
            others = boxes[order]
            low = np.maximum(boxes[best, :2], others[:, :2])
            overlap = _areas(low, np.minimum(boxes[best, 2:], others[:, 2:]))
            area = _areas(others[:, :2], others[:, 2:])
            union = _areas(boxes[best, :2], boxes[best, 2:]) + area - overlap
            is_part = is_cut[order] & (overlap > CUT_COVERED * area)
            order = order[~((overlap > nms_iou * union) | is_part)]
    indices = np.array(kept, np.int64)
    return indices[np.argsort(-scores[indices], kind="stable")]


def _areas(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (high - low).clip(min=0).prod(axis=-1)
    return areas
