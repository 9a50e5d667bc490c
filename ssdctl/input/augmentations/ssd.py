"""The augmentations of SSD training: crop, mirror, recolor and zoom out of a whole batch at once.

Crops are drawn as MLPerf draws them: pick one of seven modes, the whole image; a crop whose IoU
with every box is over .1, .3, .5, .7 or .9; any crop. A crop's sides are .3 to 1 of the image's and
its aspect .5 to 2; it must hold the center of a box, if the image has one. One attempt, then a new
mode. Boxes with their center inside are kept, clipped.
Shapes: B batch, G boxes (padded).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.augmentations import Apply, Boxes, Draw, Floats, Keys, View

MIN_IOUS = (0.1, 0.3, 0.5, 0.7, 0.9)
NUM_MODES = len(MIN_IOUS) + 2
WHOLE = 0
# Each attempt ends with the whole image with probability 1/7: 300 fail once in 10**20 samples.
MAX_ATTEMPTS = 300
ATTEMPTS_AT_ONCE = 6  # drawn and checked together; the first that ends the search counts
MAX_ZOOM = 4.0  # sides of the canvas, in sides of the image


class Functions(NamedTuple):
    """The two functions of an augmentation."""

    draw: Draw
    apply: Apply


def draw_crops(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> Floats:
    """Return (B, 4) crops, ltrb in fractions, cut at whole pixels as MLPerf's are."""
    ltrb, labels = boxes
    rect = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(labels), 1))
    unfinished = np.arange(len(labels))
    for first in range(0, MAX_ATTEMPTS, ATTEMPTS_AT_ONCE):
        attempts = np.arange(first, first + ATTEMPTS_AT_ONCE)[:, None]
        left = keys._replace(epochs=keys.epochs[unfinished], rows=keys.rows[unfinished])
        numbers = left.uniform(attempts, np.arange(5)).reshape(-1, 5)  # samples x attempts
        owner = np.repeat(unfinished, ATTEMPTS_AT_ONCE)
        mode = (numbers[:, 0] * NUM_MODES).astype(np.int64)
        proposal = _at_whole_pixels(_proposal(numbers[:, 1:]), sizes[owner])
        is_good = _is_valid(proposal, mode, ltrb[owner], labels[owner] > 0)
        ends = (is_good | (mode == WHOLE)).reshape(-1, ATTEMPTS_AT_ONCE)
        # The first attempt that ends the search, as an index into all.
        end = ends.argmax(axis=1) + np.arange(len(unfinished)) * ATTEMPTS_AT_ONCE
        is_chosen = is_good[end] & ends.any(axis=1)
        rect[unfinished[is_chosen]] = proposal[end[is_chosen]]
        unfinished = unfinished[~ends.any(axis=1)]
        if not len(unfinished):
            break
    return rect


def cut_out(view: View, rect: Floats) -> View:
    """Return the views of crops. Boxes with their center inside come first, clipped."""
    ltrb, labels = view.boxes
    low, size = rect[:, None, :2], rect[:, None, 2:] - rect[:, None, :2]
    inside = _center_inside(rect, ltrb) & (labels != 0)
    cut = np.concatenate([(ltrb[..., :2] - low) / size, (ltrb[..., 2:] - low) / size], axis=-1)
    cut = np.where(inside[..., None], cut.clip(0, 1), 0.0).astype(np.float32)
    order = np.argsort(~inside, axis=1, kind="stable")
    kept = Boxes(
        np.take_along_axis(cut, order[..., None], axis=1),
        np.take_along_axis(np.where(inside, labels, 0), order, axis=1),
    )
    return view.part(rect, kept)


def _proposal(numbers: Floats) -> Floats:
    """(B, 4) uniform numbers -> ltrb rectangles with sides of .3 to 1."""
    width, height = 0.3 + 0.7 * numbers[:, 0], 0.3 + 0.7 * numbers[:, 1]
    left, top = numbers[:, 2] * (1 - width), numbers[:, 3] * (1 - height)
    return np.stack([left, top, left + width, top + height], axis=1)


def _at_whole_pixels(rect: Floats, sizes: NDArray[np.int32]) -> Floats:
    """Return the rectangles with edges rounded to pixels, at least one pixel large."""
    low = np.minimum(np.rint(rect[:, :2] * sizes), sizes - 1)
    high = np.maximum(np.rint(rect[:, 2:] * sizes), low + 1)
    return np.concatenate([low / sizes, high / sizes], axis=1)


def _is_valid(
    rect: Floats, mode: NDArray[np.int64], boxes: NDArray[np.floating], is_real: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    size = rect[:, 2:] - rect[:, :2]
    aspect = size[:, 0] / size[:, 1]
    threshold = np.array([0.0, *MIN_IOUS, -1.0])[mode]
    over = (_iou(rect, boxes) > threshold[:, None]) | ~is_real
    has_center = (_center_inside(rect, boxes) & is_real).any(axis=1) | ~is_real.any(axis=1)
    fits = (aspect >= 0.5) & (aspect <= 2.0)
    return np.asarray((mode != WHOLE) & fits & over.all(axis=1) & has_center)


def _iou(rect: Floats, boxes: NDArray[np.floating]) -> Floats:
    (left, top, right, bottom), (x1, y1, x2, y2) = _edges(rect[:, None]), _edges(boxes)
    width = np.maximum(np.minimum(right, x2) - np.maximum(left, x1), 0)
    height = np.maximum(np.minimum(bottom, y2) - np.maximum(top, y1), 0)
    overlap = width * height
    area, areas = (x2 - x1) * (y2 - y1), (right - left) * (bottom - top)
    return np.asarray(overlap / (area + areas - overlap))


def _center_inside(rect: Floats, boxes: NDArray[np.floating]) -> NDArray[np.bool_]:
    (left, top, right, bottom), (x1, y1, x2, y2) = _edges(rect[:, None]), _edges(boxes)
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return np.asarray((x > left) & (x < right) & (y > top) & (y < bottom))


def _edges(boxes: NDArray[np.floating]) -> tuple[Any, Any, Any, Any]:
    """(..., 4) ltrb -> left, top, right, bottom. numpy reduces short last axes slowly."""
    return boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]


def draw_mirrored(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which images are mirrored left to right, (B,): half of them."""
    return keys.uniform() < 0.5


def mirror(view: View, is_mirrored: NDArray[np.bool_]) -> View:
    """Return the mirrored views; padding stays zero."""
    ltrb, labels = view.boxes
    mirrored = np.stack([1 - ltrb[..., 2], ltrb[..., 1], 1 - ltrb[..., 0], ltrb[..., 3]], axis=-1)
    is_changed = is_mirrored[:, None] & (labels != 0)
    boxes = Boxes(np.where(is_changed[..., None], mirrored, ltrb), labels)
    return view._replace(boxes=boxes, flip=view.flip ^ is_mirrored)


def draw_colors(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> Floats:
    """Return (B, 4): brightness .875 to 1.125, contrast, saturation .5 to 1.5, hue in radians."""
    spread = np.array([0.125, 0.5, 0.5, math.radians(keys.config.hue_degrees)])
    return np.array([1.0, 1.0, 1.0, 0.0]) + spread * (2 * keys.uniform(np.arange(4)) - 1)


def recolor(view: View, jitter: Floats) -> View:
    return view._replace(jitter=jitter.astype(np.float32))


def draw_canvases(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Return (B, 2) sizes of the canvases and offsets of the images, in sides of the image.

    Half of the images are placed on a larger canvas (SSD paper, 3.6).
    """
    numbers = keys.uniform(np.arange(4))
    zoom = np.where(numbers[:, 0] < 0.5, 1 + (MAX_ZOOM - 1) * numbers[:, 1], 1.0)[:, None]
    canvas = np.rint(sizes * zoom)  # whole pixels
    return canvas / sizes, np.floor(numbers[:, 2:] * (canvas - sizes)) / sizes


def zoom_out(view: View, canvases: tuple[Floats, Floats]) -> View:
    scale, offset = canvases
    ltrb, labels = view.boxes
    placed = (ltrb + np.tile(offset, 2)[:, None]) / np.tile(scale, 2)[:, None]
    boxes = Boxes(np.where(labels[..., None] != 0, placed, 0.0), labels)
    return view.part(np.concatenate([-offset, scale - offset], axis=1), boxes)


crop = Functions(draw_crops, cut_out)
flip = Functions(draw_mirrored, mirror)
color = Functions(draw_colors, recolor)
# In a list it comes before the crop: the border around a crop would show the image again.
zoom = Functions(draw_canvases, zoom_out)
