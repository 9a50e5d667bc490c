"""Assign ground-truth boxes to default boxes.

A default box is positive if its best IoU is over the threshold. Also, each ground truth takes the
default box with the highest IoU; if two ground truths take the same one, the last one wins.
Shapes: B batch, G ground-truth boxes (padded), N default boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssdctl.boxes.ops import gather_by_comparison, pairwise_iou, pairwise_iou_transposed

IOU_THRESHOLD = 0.5


def match(
    boxes_BG4: Tensor,
    labels_BG: Tensor,
    defaults_ltrb_N4: Tensor,
    *,
    at_threshold: bool = False,
    fused: bool = False,
    by_comparison: bool = False,
) -> tuple[Tensor, Tensor]:
    """Assign a ground truth to every default box.

    Args:
        boxes_BG4: Ground truth as ltrb.
        labels_BG: Their labels; 0 marks padding.
        defaults_ltrb_N4: The default boxes.
        at_threshold: Whether an IoU equal to the threshold makes a default box positive.
        fused: Use the formulation for a GPU's compiler; the result is the same.
        by_comparison: Use comparisons and sums instead of gather and scatter, for XLA; the result
            is the same.

    Returns:
        (B, N) index of the best ground truth of each default box, and (B, N) its label: 0
        (background) if the box is not positive.
    """
    is_real = labels_BG > 0
    # Padding becomes empty boxes, which overlap nothing: cheaper than masking the table.
    real_BG4 = boxes_BG4.where(is_real.unsqueeze(-1), torch.zeros_like(boxes_BG4))
    find = _best_matches_fused if fused else _best_matches
    best_iou, best_box, favourite = find(real_BG4, defaults_ltrb_N4)

    # Forced matches: scatter each ground truth's index to its best default box; the highest index
    # wins, as if written one after the other. Padding writes -1, which never wins.
    index = torch.arange(boxes_BG4.shape[1], device=boxes_BG4.device).expand_as(favourite)
    index = index.where(is_real, torch.full_like(index, -1))
    if by_comparison:
        place_N = torch.arange(best_box.shape[1], device=favourite.device)
        is_favourite_BGN = favourite.unsqueeze(2) == place_N
        none = torch.full_like(index, -1).unsqueeze(2)
        forced = index.unsqueeze(2).where(is_favourite_BGN, none).amax(dim=1)
    else:
        forced = torch.full_like(best_box, -1).scatter_reduce(1, favourite, index, "amax")

    best_box = best_box.where(forced < 0, forced)
    is_over = best_iou >= IOU_THRESHOLD if at_threshold else best_iou > IOU_THRESHOLD
    is_positive = is_over | (forced >= 0)
    if by_comparison:
        label = gather_by_comparison(labels_BG.unsqueeze(1), best_box).squeeze(1)
    else:
        label = labels_BG.gather(1, best_box)
    return best_box, label.where(is_positive, torch.zeros_like(label))


def _best_matches(boxes_BG4: Tensor, defaults_N4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best matches of default boxes and of ground truths, all ltrb.

    Returns:
        (B, N) IoU of each default box's best ground truth, (B, N) index of that ground truth, and
        (B, G) index of each ground truth's best default box. The first of equals is the best.
    """
    iou_BGN = pairwise_iou(boxes_BG4, defaults_N4)
    best_iou, best_box = iou_BGN.max(dim=1)
    return best_iou, best_box, iou_BGN.argmax(dim=2)


def _best_matches_fused(boxes_BG4: Tensor, defaults_N4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_best_matches` returns, from two tables that a GPU's compiler never stores.

    Each is computed within its reduction, so neither is written to memory and read again.
    """
    favourite = pairwise_iou(boxes_BG4, defaults_N4).argmax(dim=2)
    best_iou, best_box = pairwise_iou_transposed(boxes_BG4, defaults_N4).max(dim=2)
    return best_iou, best_box, favourite
