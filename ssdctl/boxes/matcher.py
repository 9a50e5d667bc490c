"""Which ground-truth box each default box answers for.

A default box is positive where its best IoU is over the threshold; besides, each ground truth
takes the default box that fits it best. Where two ground truths claim one box, the last one wins.
Shapes: B batch, G ground-truth boxes (padded), N default boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssdctl.boxes.ops import pairwise_iou

IOU_THRESHOLD = 0.5


def match(
    boxes_BG4: Tensor,
    labels_BG: Tensor,
    defaults_ltrb_N4: Tensor,
    *,
    at_threshold: bool = False,
) -> tuple[Tensor, Tensor]:
    """Assign a ground truth to every default box.

    Args:
        boxes_BG4: Ground truth as ltrb.
        labels_BG: Their labels; 0 marks padding.
        defaults_ltrb_N4: The default boxes.
        at_threshold: Whether an IoU equal to the threshold makes a default box positive.

    Returns:
        (B, N) index of the ground truth that fits each default box best, and (B, N) its label:
        0 (background) where the box is not positive.
    """
    is_real = labels_BG > 0
    # Padding becomes boxes that overlap nothing; a mask over the table would cost a pass over it.
    real_BG4 = boxes_BG4.where(is_real.unsqueeze(-1), torch.zeros_like(boxes_BG4))
    iou_BGN = pairwise_iou(real_BG4, defaults_ltrb_N4)
    best_iou, best_box = iou_BGN.max(dim=1)

    # The forced matches: scatter each ground truth's index to its best default box; the highest
    # index wins, as writing one after the other would have it. Padding writes -1, which never wins.
    favourite = iou_BGN.argmax(dim=2)
    index = torch.arange(boxes_BG4.shape[1], device=boxes_BG4.device).expand_as(favourite)
    index = index.where(is_real, torch.full_like(index, -1))
    forced = torch.full_like(best_box, -1).scatter_reduce(1, favourite, index, "amax")

    best_box = best_box.where(forced < 0, forced)
    is_over = best_iou >= IOU_THRESHOLD if at_threshold else best_iou > IOU_THRESHOLD
    is_positive = is_over | (forced >= 0)
    label = labels_BG.gather(1, best_box)
    return best_box, label.where(is_positive, torch.zeros_like(label))
