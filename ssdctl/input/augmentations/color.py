"""Change brightness, contrast, saturation and hue. Shapes: B batch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.augmentations import Boxes, Floats, Keys, View


def draw(keys: Keys, boxes: Boxes, sizes: NDArray[np.int32]) -> Floats:
    """Return (B, 4): brightness .875 to 1.125, contrast, saturation .5 to 1.5, hue in radians."""
    spread = np.array([0.125, 0.5, 0.5, math.radians(keys.config.hue_degrees)])
    return np.array([1.0, 1.0, 1.0, 0.0]) + spread * (2 * keys.uniform(np.arange(4)) - 1)


def apply(view: View, jitter: Floats) -> View:
    return view._replace(jitter=jitter.astype(np.float32))
