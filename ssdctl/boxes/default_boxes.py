"""The 8732 default boxes of SSD300, the same in every system that ssdctl replaces.

Order: feature map, shape, row, column, as in the outputs of the heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

IMAGE_SIZE = 300
FEATURE_SIZES = (38, 19, 10, 5, 3, 1)
STRIDES = (8, 16, 32, 64, 100, 300)  # pixels
SCALES = (21, 45, 99, 153, 207, 261, 315)  # pixels
ASPECT_RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
BOXES_PER_CELL = tuple(2 + 2 * len(ratios) for ratios in ASPECT_RATIOS)  # 4, 6, 6, 6, 4, 4
NUM_BOXES = sum(n * size * size for n, size in zip(BOXES_PER_CELL, FEATURE_SIZES, strict=True))


def default_boxes_cxcywh(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (8732, 4) centers and sizes, each clamped to [0, 1]; their corners may exceed it."""
    boxes = []
    for level, size in enumerate(FEATURE_SIZES):
        for width, height in _shapes(level):
            for row in range(size):
                for column in range(size):
                    cx = (column + 0.5) * STRIDES[level] / IMAGE_SIZE
                    cy = (row + 0.5) * STRIDES[level] / IMAGE_SIZE
                    boxes.append((cx, cy, width, height))
    return torch.tensor(boxes, dtype=torch.float64).clamp(0, 1).to(dtype)


def _shapes(level: int) -> list[tuple[float, float]]:
    """Return widths and heights of a feature map's boxes, as fractions of the image."""
    scale, next_scale = SCALES[level] / IMAGE_SIZE, SCALES[level + 1] / IMAGE_SIZE
    between = math.sqrt(scale * next_scale)
    shapes = [(scale, scale), (between, between)]
    for ratio in ASPECT_RATIOS[level]:
        wide, narrow = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
        shapes += [(wide, narrow), (narrow, wide)]
    return shapes
