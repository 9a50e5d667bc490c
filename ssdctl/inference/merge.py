"""Merge the detections of an image and of its tiles.

An object is cut if its box touches an edge of a tile inside the image. As long as it is smaller
than the overlap, another tile has all of it; the view of the whole image has the larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.tiles import Window
from ssdctl.model.postprocess import ImageDetections

CUT_MARGIN = 0.01  # a box this near to the window's edge touches it, as a fraction of the side
CUT_COVERED = 0.5  # drop a truncated box if a kept box covers more than this
# Boxes (left, top, right, bottom) in pixels of the image, scores and labels.
Merged = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]


def merge_views(
    found: Sequence[tuple[Window, ImageDetections]], size: tuple[int, int], nms_iou: float
) -> Merged:
    """Return the objects of an image of `size`, the best score first; of several views clipped.

    Args:
        found: The detections in each view, in fractions of its window.
        nms_iou: Drop a box that overlaps a better one of its class by more.
    """
    is_clipped = len(found) > 1  # an object that exceeds its tile is on another one, too
    columns = [_in_pixels(detections, window, is_clipped) for window, detections in found]
    boxes, scores, labels = (np.concatenate(column) for column in zip(*columns, strict=True))
    if len(found) == 1:
        return boxes, scores, labels
    windows = [window for window, _ in found]
    flags = [cut_flags(c[0], window, *size) for c, window in zip(columns, windows, strict=True)]
    kept = merge(boxes, scores, labels, np.concatenate(flags), nms_iou)
    return boxes[kept], scores[kept], labels[kept]


def _in_pixels(found: ImageDetections, window: Window, is_clipped: bool) -> Merged:
    left, top, right, bottom = window
    scale = np.array([right - left, bottom - top] * 2)
    fractions = found.boxes.double().cpu().numpy()
    fractions = fractions.clip(0, 1) if is_clipped else fractions
    boxes = fractions * scale + [left, top, left, top]
    scores = np.array(found.scores.tolist(), np.float64)
    return boxes, scores, found.labels.cpu().numpy().astype(np.int64)


def cut_flags(
    boxes: NDArray[np.float64], window: Window, width: int, height: int
) -> NDArray[np.bool_]:
    """Return (K,) flags: the box touches an edge of its window that is not the image's."""
    low, high = np.array(window[:2]), np.array(window[2:])
    margin = CUT_MARGIN * (high - low)
    is_cut: NDArray[np.bool_] = (boxes[:, :2] <= low + margin) & (low > 0)
    is_cut |= (boxes[:, 2:] >= high - margin) & (high < [width, height])
    return is_cut[:, 0] | is_cut[:, 1]


def merge(
    boxes: NDArray[np.float64],
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
