"""Assign ground-truth boxes to default boxes.

A default box is positive if its best IoU is over the threshold. Also, each ground truth takes the
default box with the highest IoU; if two ground truths take the same one, the last one wins.
Shapes: B batch, G ground-truth boxes (padded), N default boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssdctl.boxes.ops import pairwise_iou

IOU_THRESHOLD = 0.5


class Matcher(nn.Module):
    """Assign a ground truth to every default box; `model/fused.py` has other forms of its parts.

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
            labels_BG: Their labels; 0 marks padding.
            defaults_ltrb_N4: The default boxes.

        Returns:
            (B, N) index of the best ground truth of each default box, and (B, N) its label: 0
            (background) if the box is not positive.
        """
        is_real = labels_BG > 0
        # Padding becomes empty boxes, which overlap nothing: cheaper than masking the table.
        real_BG4 = boxes_BG4.where(is_real.unsqueeze(-1), torch.zeros_like(boxes_BG4))
        best_iou, best_box, favorite = self.best_matches(real_BG4, defaults_ltrb_N4)

        # Forced matches: scatter each ground truth's index to its best default box; the highest
        # index wins, as if written one after the other. Padding writes -1, which never wins.
        index = torch.arange(boxes_BG4.shape[1], device=boxes_BG4.device).expand_as(favorite)
        index = index.where(is_real, torch.full_like(index, -1))
        forced = self.scatter_largest(index, favorite, best_box.shape[1])

        best_box = best_box.where(forced < 0, forced)
        threshold = IOU_THRESHOLD
        is_over = best_iou >= threshold if self._at_threshold else best_iou > threshold
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

    def scatter_largest(self, values_BG: Tensor, place_BG: Tensor, size: int) -> Tensor:
        """Return (B, size) with the largest of the values at each place, -1 where there is none."""
        empty = values_BG.new_full((len(values_BG), size), -1)
        return empty.scatter_reduce(1, place_BG, values_BG, "amax")

    def take(self, values_BKG: Tensor, index_BN: Tensor) -> Tensor:
        """Return `values[b, k, index[b, n]]` as (B, K, N)."""
        return values_BKG.gather(2, index_BN.unsqueeze(1).expand(-1, values_BKG.shape[1], -1))
