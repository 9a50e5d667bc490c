"""The geometry of SSD300's default boxes, and which objects they can match.

    can_match(fractions)      # (M,) of bool

ssdctl/boxes.py makes tensors of the same numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

IMAGE_SIZE = 300
FEATURE_SIZES = (38, 19, 10, 5, 3, 1)
STRIDES = (8, 16, 32, 64, 100, 300)  # pixels
SCALES = (21, 45, 99, 153, 207, 261, 315)  # pixels
ASPECT_RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
IOU_THRESHOLD = 0.5  # for a match
BLOCK = 1 << 16  # objects that are compared at a time


def shapes(level: int) -> list[tuple[float, float]]:
    """Return widths and heights of a feature map's boxes, as fractions of the image."""
    scale, next_scale = SCALES[level] / IMAGE_SIZE, SCALES[level + 1] / IMAGE_SIZE
    between = math.sqrt(scale * next_scale)
    result = [(scale, scale), (between, between)]
    for ratio in ASPECT_RATIOS[level]:
        wide, narrow = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
        result += [(wide, narrow), (narrow, wide)]
    return result


def can_match(boxes: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return whether a default box overlaps each object by an IoU of at least 0.5, (M,).

    Args:
        boxes: (M, 4) left, top, right, bottom in fractions of the image.
    """
    matched = np.ones(len(boxes), np.bool_)
    for start in range(0, len(boxes), BLOCK):
        block = np.ascontiguousarray(boxes[start : start + BLOCK].T)
        rest = np.arange(block.shape[1])  # not matched by an earlier feature map
        for level in range(len(FEATURE_SIZES)):
            rest = rest[~_matches_level(block[:, rest], level)]
        matched[start + rest] = False
    return matched


def _matches_level(edges: NDArray[np.float32], level: int) -> NDArray[np.bool_]:
    """Compare objects (4, M) with the boxes of a feature map whose centers are nearest to them."""
    centers = (np.arange(FEATURE_SIZES[level], dtype=np.float32) + 0.5) * STRIDES[level]
    centers = np.minimum(centers / IMAGE_SIZE, 1)
    between = (centers[1:] + centers[:-1]) / 2
    low, high = edges[:2], edges[2:]
    center = centers[np.searchsorted(between, (low + high) / 2)]
    below, above = center - low, high - center  # of the center, along each axis
    area = (high[0] - low[0]) * (high[1] - low[1])
    sides = {side: np.float32(min(side, 1) / 2) for shape in shapes(level) for side in shape}
    shared = {s: np.minimum(below, half) + np.minimum(above, half) for s, half in sides.items()}
    matched = np.zeros(edges.shape[1], np.bool_)
    for width, height in shapes(level):
        overlap = np.maximum(shared[width][0], 0) * np.maximum(shared[height][1], 0)
        default_area = 4 * sides[width] * sides[height]
        matched |= overlap * (1 + IOU_THRESHOLD) >= IOU_THRESHOLD * (area + default_area)
    return matched
