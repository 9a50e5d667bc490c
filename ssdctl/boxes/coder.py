"""Boxes relative to default boxes, as the network predicts them (SSD paper, eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

CENTRE_VARIANCE = 0.1
SIZE_VARIANCE = 0.2
MIN_RATIO = 1e-6  # keeps the logarithm of an empty box finite; real boxes are larger
# exp(10) default boxes are larger than any image; an unbounded prediction would overflow.
MAX_LOG_RATIO = 10.0


def encode(boxes_cxcywh: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """Encode (..., N, 4) boxes against (N, 4) default boxes as (..., N, 4) finite offsets."""
    centre = (boxes_cxcywh[..., :2] - defaults_cxcywh[:, :2]) / defaults_cxcywh[:, 2:]
    ratio = boxes_cxcywh[..., 2:] / defaults_cxcywh[:, 2:]
    size = ratio.clamp(min=MIN_RATIO).log()
    # Concatenated as columns, the memory layout of the network's output and of the loss.
    return torch.cat([centre.mT / CENTRE_VARIANCE, size.mT / SIZE_VARIANCE], dim=-2).mT


def decode(offsets: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """Decode (..., N, 4) offsets against (N, 4) default boxes to (..., N, 4) centres and sizes."""
    size, origin = defaults_cxcywh[:, 2:], defaults_cxcywh[:, :2]
    centre = offsets[..., :2] * CENTRE_VARIANCE * size + origin
    ratio = (offsets[..., 2:] * SIZE_VARIANCE).clamp(max=MAX_LOG_RATIO).exp()
    return torch.cat([centre, ratio * size], dim=-1)
