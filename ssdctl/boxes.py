"""Boxes as tensors: default boxes, formats, overlap, coding and matching.

Coordinates are fractions of the image. The 8732 default boxes are the same in every system that
ssdctl replaces, in the order of the heads' outputs: feature map, shape, row, column.
Shapes: B batch, G ground-truth boxes, N default boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssdctl.data import default_boxes
from ssdctl.data.default_boxes import ASPECT_RATIOS, IOU_THRESHOLD, STRIDES, shapes

IMAGE_SIZE, FEATURE_SIZES = default_boxes.IMAGE_SIZE, default_boxes.FEATURE_SIZES
BOXES_PER_CELL = tuple(2 + 2 * len(ratios) for ratios in ASPECT_RATIOS)  # 4, 6, 6, 6, 4, 4
NUM_BOXES = sum(n * size * size for n, size in zip(BOXES_PER_CELL, FEATURE_SIZES, strict=True))

CENTER_VARIANCE = 0.1
SIZE_VARIANCE = 0.2
MIN_RATIO = 1e-6  # keeps the logarithm of an empty box finite; real boxes are larger
# exp(10) default boxes are larger than any image; an unbounded prediction would overflow.
MAX_LOG_RATIO = 10.0


def default_boxes_cxcywh(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (8732, 4) centers and sizes, each clamped to [0, 1]; their corners may exceed it."""
    boxes = []
    for level, size in enumerate(FEATURE_SIZES):
        for width, height in shapes(level):
            for row in range(size):
                for column in range(size):
                    cx = (column + 0.5) * STRIDES[level] / IMAGE_SIZE
                    cy = (row + 0.5) * STRIDES[level] / IMAGE_SIZE
                    boxes.append((cx, cy, width, height))
    return torch.tensor(boxes, dtype=torch.float64, device="cpu").clamp(0, 1).to(dtype)


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
    # Clamp areas before they become a table: a pass over the table costs as much as the rest.
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


class Matcher(nn.Module):
    """Assign a ground truth to every default box; `model/fused.py` has other forms of its parts.

    A default box is positive if its best IoU is over the threshold. Also, each ground truth takes
    the default box with the highest IoU; if two ground truths take the same one, the last one wins.

    Args:
        at_threshold: Whether an IoU equal to the threshold makes a default box positive.
    """

    def __init__(self, *, at_threshold: bool = False) -> None:
        super().__init__()
        self._at_threshold = at_threshold

    def forward(
        self, boxes_BG4: Tensor, labels_BG: Tensor, defaults_ltrb_N4: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Match a batch.

        Args:
            boxes_BG4: Ground truth as ltrb.
            labels_BG: Their labels; 0 marks padding, -1 an object to ignore.
            defaults_ltrb_N4: The default boxes.

        Returns:
            (B, N) index of the best ground truth of each default box, and (B, N) its label: 0
            (background) if the box matches none, -1 if it is to be ignored.
        """
        # Padding becomes empty boxes, which overlap nothing: cheaper than masking the table.
        real_BG4 = boxes_BG4.where((labels_BG != 0).unsqueeze(-1), torch.zeros_like(boxes_BG4))
        best_iou, best_box, favorite = self.best_matches(real_BG4, defaults_ltrb_N4)

        # Forced matches: scatter each ground truth's index to its best default box; the highest
        # index wins, as if written one after the other. Padding writes -1, which never wins, and
        # so do objects to ignore.
        index = torch.arange(boxes_BG4.shape[1], device=boxes_BG4.device).expand_as(favorite)
        index = index.where(labels_BG > 0, torch.full_like(index, -1))
        forced = self.scatter_largest(index, favorite, best_box.shape[1])

        best_box = best_box.where(forced < 0, forced)
        is_over = best_iou > IOU_THRESHOLD
        if self._at_threshold:
            is_over = best_iou >= IOU_THRESHOLD
        label = self.take(labels_BG.unsqueeze(1), best_box).squeeze(1)
        return best_box, label.where(is_over | (forced >= 0), torch.zeros_like(label))

    def best_matches(self, boxes_BG4: Tensor, defaults_N4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the best matches of default boxes and of ground truths, all ltrb.

        Returns:
            (B, N) IoU of each default box's best ground truth, (B, N) index of that ground truth,
            and (B, G) index of each ground truth's best default box. The first of equals is best.
        """
        iou_BGN = pairwise_iou(boxes_BG4, defaults_N4)
        best_iou, best_box = iou_BGN.max(dim=1)
        return best_iou, best_box, iou_BGN.argmax(dim=2)

    def scatter_largest(self, values_BG: Tensor, index_BG: Tensor, size: int) -> Tensor:
        """Return (B, size) with the largest of the values of each index, -1 where there is none."""
        empty = values_BG.new_full((len(values_BG), size), -1)
        return empty.scatter_reduce(1, index_BG, values_BG, "amax")

    def take(self, values_BKG: Tensor, index_BN: Tensor) -> Tensor:
        """Return `values[b, k, index[b, n]]` as (B, K, N)."""
        return values_BKG.gather(2, index_BN.unsqueeze(1).expand(-1, values_BKG.shape[1], -1))
