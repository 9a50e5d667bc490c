"""Place half of the images on a larger canvas (SSD paper, 3.6).

In a list it comes before the crop: the border around a crop would show the image again.
Shapes: B batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.augmentations import Boxes, Floats, Keys, View

MAX_ZOOM = 4.0  # sides of the canvas, in sides of the image


def draw(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Return (B, 2) sizes of the canvases and offsets of the images, in sides of the image."""
    numbers = keys.uniform(np.arange(4))
    zoom = np.where(numbers[:, 0] < 0.5, 1 + (MAX_ZOOM - 1) * numbers[:, 1], 1.0)[:, None]
    canvas = np.rint(sizes * zoom)  # whole pixels
    return canvas / sizes, np.floor(numbers[:, 2:] * (canvas - sizes)) / sizes


def apply(view: View, canvases: tuple[Floats, Floats]) -> View:
    scale, offset = canvases
    ltrb, labels = view.boxes
    placed = (ltrb + np.tile(offset, 2)[:, None]) / np.tile(scale, 2)[:, None]
    boxes = Boxes(np.where(labels[..., None] != 0, placed, 0.0), labels)
    return view.part(np.concatenate([-offset, scale - offset], axis=1), boxes)
