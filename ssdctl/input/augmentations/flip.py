"""Mirror half of the images left to right. Shapes: B batch, G boxes (padded)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.augmentations import Boxes, Keys, View


def draw(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which images are mirrored, (B,)."""
    return keys.uniform() < 0.5


def apply(view: View, is_mirrored: NDArray[np.bool_]) -> View:
    """Return the mirrored views; padding stays zero."""
    ltrb, labels = view.boxes
    mirrored = np.stack([1 - ltrb[..., 2], ltrb[..., 1], 1 - ltrb[..., 0], ltrb[..., 3]], axis=-1)
    is_changed = is_mirrored[:, None] & (labels != 0)
    boxes = Boxes(np.where(is_changed[..., None], mirrored, ltrb), labels)
    return view._replace(boxes=boxes, flip=view.flip ^ is_mirrored)
