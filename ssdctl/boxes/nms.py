"""Hard non-maximum suppression (NMS), per class.

Shapes: B batch, C classes without background, K candidates.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def batched_nms(boxes_K4: Tensor, scores_K: Tensor, labels_K: Tensor, nms_iou: float) -> Tensor:
    """Return the indices of the boxes that are kept, best first, on the CPU.

    A box with an IoU over `nms_iou` with a better box of its class is dropped. Scores are compared
    in fp64.
    """
    return _nms_kernel()(_offset_by_class(boxes_K4, labels_K), scores_K.double(), nms_iou)


def nms_static(boxes_BCK4: Tensor, keep_BCK: Tensor, nms_iou: float) -> Tensor:
    """Return (B, C, K) flags of the boxes that are kept, in static shapes.

    Args:
        boxes_BCK4: Candidates in ltrb, best first in each class.
        keep_BCK: The candidates that take part.
        nms_iou: A box with a higher IoU with a better box of its class is dropped.
    """
    # The overlaps of one image at a time: those of a batch would take gigabytes.
    over = torch.stack([_overlaps(boxes_CK4, nms_iou) for boxes_CK4 in boxes_BCK4])
    for i in range(boxes_BCK4.shape[2]):  # greedy: a removed box removes no other
        keep_BCK = keep_BCK & ~(over[:, :, i] & keep_BCK[:, :, i : i + 1])
    return keep_BCK


def _overlaps(boxes_CK4: Tensor, nms_iou: float) -> Tensor:
    """Return (C, K, K) flags: box i has an IoU over `nms_iou` with a worse box j of its class."""
    a, b = boxes_CK4.unsqueeze(2), boxes_CK4.unsqueeze(1)
    size = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    overlap = size.clamp(min=0).prod(dim=-1)
    area = (boxes_CK4[..., 2:] - boxes_CK4[..., :2]).prod(dim=-1)
    union = area.unsqueeze(2) + area.unsqueeze(1) - overlap
    return (overlap > nms_iou * union).triu(diagonal=1)


@functools.cache
def _nms_kernel() -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return torchvision's NMS kernel, loaded without the Python package if possible.

    The package takes 9 seconds of CPU time to import, its compiled library a few milliseconds.
    """
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(library)
    if hasattr(torch.ops.torchvision, "nms"):
        kernel: Callable[[Tensor, Tensor, float], Tensor] = torch.ops.torchvision.nms
        return kernel
    from torchvision.ops import nms

    return nms


def _offset_by_class(boxes_K4: Tensor, labels_K: Tensor) -> Tensor:
    """Shift the boxes of each class so that classes never overlap and one NMS serves all.

    In fp64 and relative to the leftmost box. torchvision's batched_nms shifts in fp32 relative to
    0: boxes left of the image overlap another class, and a huge box rounds the others away.
    """
    boxes = boxes_K4.double()
    if not len(boxes):
        return boxes
    low = boxes.min()
    extent = boxes.max() - low + 1
    return boxes - low + (labels_K * extent).unsqueeze(1)
