"""Boxes relative to default boxes, as the network predicts them (SSD paper, eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

CENTRE_VARIANCE = 0.1
SIZE_VARIANCE = 0.2
SMALLEST_RATIO = 1e-6  # keeps the log of a box without size finite; real boxes never reach it
# exp(MOST_LOG_RATIO) pictures is wider than any box; a larger prediction must not overflow.
MOST_LOG_RATIO = 10.0


def encode(boxes_cxcywh: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """(..., N, 4) boxes and (N, 4) default boxes -> (..., N, 4) offsets, finite for any box."""
    centre = (boxes_cxcywh[..., :2] - defaults_cxcywh[:, :2]) / defaults_cxcywh[:, 2:]
    ratio = boxes_cxcywh[..., 2:] / defaults_cxcywh[:, 2:]
    size = ratio.clamp(min=SMALLEST_RATIO).log()
    # Joined as columns, which is how boxes lie in the network's output and its loss.
    return torch.cat([centre.mT / CENTRE_VARIANCE, size.mT / SIZE_VARIANCE], dim=-2).mT


def decode(offsets: Tensor, defaults_cxcywh: Tensor) -> Tensor:
    """(..., N, 4) offsets and (N, 4) default boxes -> (..., N, 4) centres and sizes."""
    size, origin = defaults_cxcywh[:, 2:], defaults_cxcywh[:, :2]
    centre = offsets[..., :2] * CENTRE_VARIANCE * size + origin
    ratio = (offsets[..., 2:] * SIZE_VARIANCE).clamp(max=MOST_LOG_RATIO).exp()
    return torch.cat([centre, ratio * size], dim=-1)
