"""Mirror, recolor or zoom out of images. Shapes: B batch, G boxes (padded)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.augmentations import Apply, Boxes, Draw, Floats, Keys, View

MAX_ZOOM = 4.0  # sides of the canvas, in sides of the image


class Functions(NamedTuple):
    """The two functions of an augmentation."""

    draw: Draw
    apply: Apply


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


flip = Functions(draw_mirrored, mirror)
color = Functions(draw_colors, recolor)
# In a list it comes before the crop: the border around a crop would show the image again.
zoom = Functions(draw_canvases, zoom_out)
