"""The multibox loss (SSD paper, section 2.2), in fp32 for every precision of the network.

Per image: smooth L1 over the positives, plus cross-entropy over the positives and the hardest
negatives (three per positive), divided by the image's number of positives; then the mean over
the batch. An image without objects counts as 0, or with its K hardest negatives, divided as if it
had K / 3 positives. Masks select with `where`, never by multiplication, so an infinity outside the
mask does not reach the loss. (The gradient of an infinite logit is still NaN: the guard in
training/step.py checks gradients too.)
Shapes: B batch, C classes with background, G ground-truth boxes (padded), N default boxes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdctl.boxes import (
    Matcher,
    box_cxcywh_to_ltrb,
    box_ltrb_to_cxcywh,
    column_major,
    default_boxes_cxcywh,
    encode,
)
from ssdctl.errors import UsageError
from ssdctl.model.backbones import RESNET, ModelConstants

NEGATIVES_PER_POSITIVE = 3


class Losses(NamedTuple):
    """Means over the batch; `total` is what is minimized, the others are its terms."""

    total: Tensor
    box: Tensor
    classification: Tensor


class Targets(nn.Module):
    """Matching and coding of one batch: the values that each default box should predict."""

    defaults_cxcywh: Tensor
    defaults_ltrb: Tensor

    def __init__(
        self, dtype: torch.dtype = torch.float32, *, constants: ModelConstants = RESNET
    ) -> None:
        super().__init__()
        self.matcher = Matcher(at_threshold=constants.matches_at_threshold)
        defaults = default_boxes_cxcywh(dtype)
        corners = box_cxcywh_to_ltrb(defaults)
        self.register_buffer("defaults_cxcywh", column_major(defaults), persistent=False)
        self.register_buffer("defaults_ltrb", column_major(corners), persistent=False)

    def forward(self, boxes_BG4: Tensor, labels_BG: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets (B, 4, N) and labels (B, N) of padded ground truth.

        Labels are 0 for background, and -1 for what is neither that nor an object to learn.

        Args:
            boxes_BG4: Ground truth as ltrb fractions of the image.
            labels_BG: Their labels; 0 marks padding, -1 an object to ignore.
        """
        if not labels_BG.shape[1]:  # matching needs one column
            boxes_BG4, labels_BG = F.pad(boxes_BG4, (0, 0, 0, 1)), F.pad(labels_BG, (0, 1))
        assigned_BN, label_BN = self.matcher(boxes_BG4, labels_BG, self.defaults_ltrb)
        centers_B4G = box_ltrb_to_cxcywh(boxes_BG4).transpose(1, 2)
        matched_B4N = self.matcher.take(centers_B4G, assigned_BN)
        offsets_BN4 = encode(matched_B4N.transpose(1, 2), self.defaults_cxcywh)
        return offsets_BN4.transpose(1, 2), label_BN


class MultiboxLoss(nn.Module):
    """The loss of the SSD paper: matched boxes by smooth L1, classes by cross entropy on them and
    on the three hardest negatives for each.

    Args:
        dtype: Precision of matching and loss, independent of the network's.
        constants: Rules of matching, and what the loss is divided by.
        background_negatives: Hardest negatives (K) of an image without objects.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        constants: ModelConstants = RESNET,
        background_negatives: int = 0,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"dtype: {dtype!r}", hint="the loss needs no number of classes: MultiboxLoss()"
            )
        super().__init__()
        self.targets = Targets(dtype, constants=constants)
        self.divisor = constants.loss_divisor
        self.background_negatives = background_negatives

    def forward(
        self,
        offsets_B4N: Tensor,
        logits_BCN: Tensor,
        boxes_BG4: Tensor,
        labels_BG: Tensor,
    ) -> Losses:
        """Return the loss of the network's output against padded ground truth.

        Args:
            offsets_B4N: Predicted offsets.
            logits_BCN: Predicted class logits, background first.
            boxes_BG4: Ground truth as ltrb fractions of the image.
            labels_BG: Their labels; 0 marks padding, -1 an object to ignore.
        """
        tensors = offsets_B4N, logits_BCN, boxes_BG4, labels_BG
        if not torch.compiler.is_compiling() and len({*map(len, tensors)}) > 1:
            raise UsageError("offsets, logits, boxes and labels are of different numbers of images")
        with torch.autocast(offsets_B4N.device.type, enabled=False):
            target_B4N, label_BN = self.targets(boxes_BG4, labels_BG)
            dtype = target_B4N.dtype
            return self.compare(offsets_B4N.to(dtype), logits_BCN.to(dtype), target_B4N, label_BN)

    def compare(
        self, offsets_B4N: Tensor, logits_BCN: Tensor, target_B4N: Tensor, label_BN: Tensor
    ) -> Losses:
        """Return the loss against targets that are already matched and coded."""
        is_positive = label_BN > 0
        num_positives = is_positive.sum(dim=1)
        zero = offsets_B4N.new_zeros(())

        distance = F.smooth_l1_loss(offsets_B4N, target_B4N, reduction="none").sum(dim=1)
        box_loss = torch.where(is_positive, distance, zero).sum(dim=1)

        entropy = self.cross_entropy(logits_BCN, label_BN.clamp(min=0))
        positive_loss = torch.where(is_positive, entropy, zero).sum(dim=1)
        # Only the sum of the k hardest is needed: sort once, add up the first k. (Gaudi's eager
        # mode sorts on the host unless the sort is stable; elsewhere that costs nothing.)
        negatives = torch.where(label_BN == 0, entropy, zero)
        hardest = negatives.sort(dim=1, descending=True, stable=True).values
        rank = torch.arange(hardest.shape[1], device=hardest.device)
        num_negatives = NEGATIVES_PER_POSITIVE * num_positives
        # Without positives both sums are 0 (no box, no negative), so the image counts as 0.
        weight = num_positives
        if self.background_negatives:
            is_empty = num_positives == 0
            num_negatives = num_negatives.masked_fill(is_empty, self.background_negatives)
            weight = num_negatives.to(zero.dtype) / NEGATIVES_PER_POSITIVE
        negative_loss = torch.where(rank < num_negatives.unsqueeze(1), hardest, zero).sum(dim=1)

        if self.divisor == "image":
            share = weight.clamp(min=1) * label_BN.shape[0]
        else:
            share = weight.sum().clamp(min=1)
        box = (box_loss / share).sum()
        classification = ((positive_loss + negative_loss) / share).sum()
        return Losses(box + classification, box, classification)

    def cross_entropy(self, logits_BCN: Tensor, label_BN: Tensor) -> Tensor:
        """Return the cross-entropy of each box, (B, N); `model/fused.py` has another form."""
        entropy: Tensor = _CrossEntropy.apply(logits_BCN, label_BN)
        return entropy


class _CrossEntropy(torch.autograd.Function):
    """Compute the cross-entropy of each box: (B, C, N) logits and (B, N) labels -> (B, N).

    Equal to PyTorch's own with two passes less over a table of the logits' size, nearly the whole
    cost of the loss: PyTorch's backward writes a table of zeros and reads it again.
    """

    @staticmethod
    def forward(ctx: Any, logits_BCN: Tensor, label_BN: Tensor) -> Tensor:
        log_p = logits_BCN.log_softmax(dim=1)
        ctx.save_for_backward(log_p, label_BN)
        return log_p.gather(1, label_BN.unsqueeze(1)).squeeze(1).neg_()

    @staticmethod
    def backward(ctx: Any, grad_BN: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError("the loss has no second derivatives (create_graph=True)")
        log_p, label_BN = ctx.saved_tensors
        grad_B1N = grad_BN.unsqueeze(1)
        grad_BCN = log_p.exp().mul_(grad_B1N)
        return grad_BCN.scatter_add_(1, label_BN.unsqueeze(1), -grad_B1N), None
