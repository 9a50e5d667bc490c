"""The crops of SSD training, drawn for a whole batch at once, as MLPerf draws them.

Pick one of seven modes: the whole picture; a crop whose IoU with every box is over .1, .3, .5, .7
or .9; any crop. A crop's sides are .3 to 1 of the picture's and its aspect .5 to 2; it must hold
the centre of a box. One attempt, then a new mode. Boxes with their centre inside are kept, clipped.
Shapes: B batch, G boxes (padded).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.counter_rng import uniform

Floats = NDArray[np.float64]
CROP_STREAM = 2
MIN_IOUS = (0.1, 0.3, 0.5, 0.7, 0.9)
NUM_MODES = len(MIN_IOUS) + 2
WHOLE, FREE = 0, NUM_MODES - 1
# Each attempt ends with the whole picture with probability 1/7: 300 fail once in 10**20 samples.
MAX_ATTEMPTS = 300
ATTEMPTS_AT_ONCE = 6  # drawn and checked together; the first that ends the search counts


class Crops(NamedTuple):
    """A batch's crops and the boxes that remain in them."""

    rect: Floats  # B x 4, ltrb in fractions of the picture
    boxes: NDArray[np.float32]  # B x G x 4, ltrb in fractions of the crop; kept ones first
    labels: NDArray[np.int64]  # B x G; 0 marks padding


def sample_crops(
    seed: int,
    epoch: NDArray[np.int64],
    row: NDArray[np.int64],
    boxes: Floats,
    labels: NDArray[np.int64],
    sizes: NDArray[np.int32] | None = None,
) -> Crops:
    """Draw the crop of each sample.

    Args:
        seed: The run's seed.
        epoch: (B,) the pass in which the sample comes.
        row: (B,) its image.
        boxes: (B, G, 4) ltrb in fractions of the picture.
        labels: (B, G); 0 marks padding.
        sizes: (B, 2) width and height in pixels: the crops are cut at whole pixels, as MLPerf's
            are, and the boxes refer to them exactly. None: anywhere.
    """
    rect = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(row), 1))
    unfinished = np.arange(len(row))
    for first in range(0, MAX_ATTEMPTS, ATTEMPTS_AT_ONCE):
        attempts = np.arange(first, first + ATTEMPTS_AT_ONCE)[:, None]
        keys = (epoch[unfinished, None, None], row[unfinished, None, None], attempts, np.arange(5))
        draw = uniform(CROP_STREAM, seed, *keys).reshape(-1, 5)  # unfinished samples x attempts
        owner = np.repeat(unfinished, ATTEMPTS_AT_ONCE)
        mode = (draw[:, 0] * NUM_MODES).astype(np.int64)
        proposal = _proposal(draw[:, 1:])
        if sizes is not None:
            proposal = _at_whole_pixels(proposal, sizes[owner])
        is_good = _is_valid(proposal, mode, boxes[owner], labels[owner] > 0)
        ends = (is_good | (mode == WHOLE)).reshape(-1, ATTEMPTS_AT_ONCE)
        # The first attempt that ends the search, as an index into all.
        end = ends.argmax(axis=1) + np.arange(len(unfinished)) * ATTEMPTS_AT_ONCE
        is_chosen = is_good[end] & ends.any(axis=1)
        rect[unfinished[is_chosen]] = proposal[end[is_chosen]]
        unfinished = unfinished[~ends.any(axis=1)]
        if not len(unfinished):
            break
    return crop_boxes(rect, boxes, labels)


def whole_images(boxes: Floats, labels: NDArray[np.int64]) -> Crops:
    """Return crops of the full pictures, with the boxes as they are."""
    rect = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(boxes), 1))
    return Crops(rect, boxes.astype(np.float32), labels)


def crop_boxes(rect: Floats, boxes: Floats, labels: NDArray[np.int64]) -> Crops:
    """Return the boxes of crops: those with their centre inside, clipped and rescaled."""
    low, high = rect[:, None, :2], rect[:, None, 2:]
    inside = _centre_inside(rect, boxes) & (labels > 0)
    size = high - low
    ltrb = np.concatenate([(boxes[..., :2] - low) / size, (boxes[..., 2:] - low) / size], axis=-1)
    ltrb = np.where(inside[..., None], ltrb.clip(0, 1), 0.0)
    kept = np.where(inside, labels, 0)
    order = np.argsort(~inside, axis=1, kind="stable")
    return Crops(
        rect,
        np.take_along_axis(ltrb, order[..., None], axis=1).astype(np.float32),
        np.take_along_axis(kept, order, axis=1),
    )


def flip_boxes(boxes: NDArray[np.float32], labels: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return ltrb boxes (..., 4) mirrored left to right; padding stays zero."""
    mirrored = np.stack([1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]], -1)
    return np.where(labels[..., None] > 0, mirrored, boxes)


def _proposal(draw: Floats) -> Floats:
    """(B, 4) uniform numbers -> ltrb rectangles with sides of .3 to 1."""
    width, height = 0.3 + 0.7 * draw[:, 0], 0.3 + 0.7 * draw[:, 1]
    left, top = draw[:, 2] * (1 - width), draw[:, 3] * (1 - height)
    return np.stack([left, top, left + width, top + height], axis=1)


def _at_whole_pixels(rect: Floats, sizes: NDArray[np.int32]) -> Floats:
    """Return the rectangles with edges rounded to pixels, at least one pixel large."""
    low = np.minimum(np.rint(rect[:, :2] * sizes), sizes - 1)
    high = np.maximum(np.rint(rect[:, 2:] * sizes), low + 1)
    return np.concatenate([low / sizes, high / sizes], axis=1)


def _is_valid(
    rect: Floats, mode: NDArray[np.int64], boxes: Floats, is_real: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    size = rect[:, 2:] - rect[:, :2]
    aspect = size[:, 0] / size[:, 1]
    threshold = np.array([0.0, *MIN_IOUS, -1.0])[mode]
    over = (_iou(rect, boxes) > threshold[:, None]) | ~is_real
    has_centre = (_centre_inside(rect, boxes) & is_real).any(axis=1)
    fits = (aspect >= 0.5) & (aspect <= 2.0)
    return np.asarray((mode != WHOLE) & fits & over.all(axis=1) & has_centre)


def _iou(rect: Floats, boxes: Floats) -> Floats:
    (left, top, right, bottom), (x1, y1, x2, y2) = _edges(rect[:, None]), _edges(boxes)
    width = np.maximum(np.minimum(right, x2) - np.maximum(left, x1), 0)
    height = np.maximum(np.minimum(bottom, y2) - np.maximum(top, y1), 0)
    overlap = width * height
    area, areas = (x2 - x1) * (y2 - y1), (right - left) * (bottom - top)
    return np.asarray(overlap / (area + areas - overlap))


def _centre_inside(rect: Floats, boxes: Floats) -> NDArray[np.bool_]:
    (left, top, right, bottom), (x1, y1, x2, y2) = _edges(rect[:, None]), _edges(boxes)
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return np.asarray((x > left) & (x < right) & (y > top) & (y < bottom))


def _edges(boxes: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(..., 4) ltrb -> left, top, right, bottom. numpy reduces short last axes slowly."""
    return boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
