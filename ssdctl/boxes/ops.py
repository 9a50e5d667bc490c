"""Box formats and overlap. Coordinates are fractions of the image unless stated otherwise.

Shapes: B batch, G ground-truth boxes, N default boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor

CENTER_VARIANCE = 0.1
SIZE_VARIANCE = 0.2
MIN_RATIO = 1e-6  # keeps the logarithm of an empty box finite; real boxes are larger
# exp(10) default boxes are larger than any image; an unbounded prediction would overflow.
MAX_LOG_RATIO = 10.0


def box_cxcywh_to_ltrb(boxes: Tensor) -> Tensor:
    """Convert (..., 4) center and size to left, top, right, bottom."""
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], dim=-1)


def box_ltrb_to_cxcywh(boxes: Tensor) -> Tensor:
    """Convert (..., 4) left, top, right, bottom to center and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def column_major(boxes_N4: Tensor) -> Tensor:
    """Return the same boxes in column-major memory: all first coordinates, then all second ones.

    Code compiled for the CPU reads columns as vectors: overlaps take an eighth of the time.
    """
    return boxes_N4.T.contiguous().T


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of (..., G, 4) and (N, 4) ltrb boxes as (..., G, N).

    Two boxes without area have an IoU of 0, not NaN.
    """
    # Contiguous columns and in-place arithmetic: the (G, N) table dominates the cost.
    left, top, right, bottom = b.T.contiguous()
    a = a.unsqueeze(-2)
    overlap = (torch.minimum(a[..., 2], right) - torch.maximum(a[..., 0], left)).clamp_(min=0)
    overlap *= (torch.minimum(a[..., 3], bottom) - torch.maximum(a[..., 1], top)).clamp_(min=0)
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (right - left) * (bottom - top)
    least = torch.finfo(area_b.dtype).tiny
    # Areas are clamped before they become a table: a pass over the table costs as much as the rest.
    union = (area_a.clamp(min=0) + area_b.clamp(min=least)).sub_(overlap)
    return overlap.div_(union)


def encode(boxes_cxcywh: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """Encode (..., N, 4) boxes against (N, 4) default boxes as (..., N, 4) finite offsets."""
    center = (boxes_cxcywh[..., :2] - defaults_cxcywh[:, :2]) / defaults_cxcywh[:, 2:]
    ratio = boxes_cxcywh[..., 2:] / defaults_cxcywh[:, 2:]
    size = ratio.clamp(min=MIN_RATIO).log()
    # Concatenated as columns, the memory layout of the network's output and of the loss.
    return torch.cat([center.mT / CENTER_VARIANCE, size.mT / SIZE_VARIANCE], dim=-2).mT


def decode(offsets: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """Decode (..., N, 4) offsets against (N, 4) default boxes to (..., N, 4) centers and sizes."""
    size, origin = defaults_cxcywh[:, 2:], defaults_cxcywh[:, :2]
    center = offsets[..., :2] * CENTER_VARIANCE * size + origin
    ratio = (offsets[..., 2:] * SIZE_VARIANCE).clamp(max=MAX_LOG_RATIO).exp()
    return torch.cat([center, ratio * size], dim=-1)
