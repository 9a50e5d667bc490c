"""Convert the network's output to detections, as every replaced system does.

Softmax; per class the 200 best above the score threshold and hard NMS; the 200 best of the image.
On the CPU the few candidates are selected first. On other devices every shape is static: nothing
synchronizes to read a count and nothing is recompiled.
Shapes: B batch, C classes with background, N default boxes, K detections of an image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssdctl.boxes.nms import batched_nms, nms_static
from ssdctl.boxes.ops import box_cxcywh_to_ltrb, decode

CANDIDATES_PER_CLASS = 200
DETECTIONS_PER_IMAGE = 200


class ImageDetections(NamedTuple):
    """The detections of one image, best first."""

    boxes: Tensor  # K x 4, ltrb as fractions of the image; they may exceed it
    scores: Tensor  # K
    labels: Tensor  # K, 1 and up


def detect(
    offsets_B4N: Tensor,
    logits_BCN: Tensor,
    defaults_cxcywh: Tensor,
    *,
    score_threshold: float,
    nms_iou: float,
    candidates: int = CANDIDATES_PER_CLASS,
    clips_boxes: bool = False,
) -> list[ImageDetections]:
    """Decode a batch in fp32 and return the detections of each image, on the CPU.

    Args:
        score_threshold: Candidates have a higher score.
        nms_iou: A box with a higher IoU with a better box of its class is dropped.
        candidates: The best of each class before NMS.
        clips_boxes: Clip boxes to the image before NMS.
    """
    outputs = (offsets_B4N, logits_BCN, defaults_cxcywh)
    with torch.autocast(offsets_B4N.device.type, enabled=False):
        boxes, scores = boxes_and_scores(*outputs, clips_boxes=clips_boxes)
        return select_detections(boxes, scores, score_threshold, nms_iou, candidates)


def select_detections(
    boxes_BN4: Tensor,
    scores_BCN: Tensor,
    score_threshold: float,
    nms_iou: float,
    candidates: int = CANDIDATES_PER_CLASS,
) -> list[ImageDetections]:
    """Return the detections in decoded fp32 boxes and scores, on the CPU; see `detect`."""
    rules = (score_threshold, nms_iou, candidates)
    if boxes_BN4.device.type == "cpu":
        return [_detect_one(b, s, *rules) for b, s in zip(boxes_BN4, scores_BCN, strict=True)]
    padded = [t.cpu() for t in detect_static(boxes_BN4, scores_BCN, *rules)]
    return [
        ImageDetections(b[real], s[real], label[real])
        for b, s, label in zip(*padded, strict=True)
        for real in [label > 0]
    ]


def boxes_and_scores(
    offsets_B4N: Tensor,
    logits_BCN: Tensor,
    defaults_cxcywh: Tensor,
    *,
    clips_boxes: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode to (B, N, 4) ltrb boxes and (B, C - 1, N) scores without background."""
    boxes = box_cxcywh_to_ltrb(decode(offsets_B4N.float().transpose(1, 2), defaults_cxcywh))
    if clips_boxes:
        boxes = boxes.clamp(0, 1)
    return boxes, logits_BCN.float().softmax(dim=1)[:, 1:]


def detect_static(
    boxes_BN4: Tensor,
    scores_BCN: Tensor,
    threshold: float,
    nms_iou: float,
    candidates_per_class: int = CANDIDATES_PER_CLASS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same detections in static shapes, best first, padded with label 0.

    Returns:
        (B, K, 4) boxes, (B, K) scores, (B, K) labels, where K = 200.
    """
    num_classes = scores_BCN.shape[1]
    scores, index = scores_BCN.topk(min(candidates_per_class, scores_BCN.shape[2]), dim=2)
    candidates = boxes_BN4.unsqueeze(1).expand(-1, num_classes, -1, -1)
    candidates = candidates.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 4))
    keep = nms_static(candidates, scores > threshold, nms_iou)
    flat = torch.where(keep, scores, 0).flatten(1)
    best, place = flat.topk(min(DETECTIONS_PER_IMAGE, flat.shape[1]), dim=1)
    labels = torch.where(best > 0, place // scores.shape[2] + 1, 0)
    kept = candidates.flatten(1, 2).gather(1, place.unsqueeze(-1).expand(-1, -1, 4))
    return kept, best, labels


def _detect_one(
    boxes_N4: Tensor, scores_CN: Tensor, threshold: float, nms_iou: float, candidates: int
) -> ImageDetections:
    row, index = (scores_CN > threshold).nonzero(as_tuple=True)
    scores, boxes, labels = scores_CN[row, index], boxes_N4[index], row + 1
    if len(scores) > candidates:
        best = _best_per_class(scores, labels, candidates)
        scores, boxes, labels = scores[best], boxes[best], labels[best]
    keep = batched_nms(boxes, scores, labels, nms_iou)[:DETECTIONS_PER_IMAGE]
    return ImageDetections(boxes[keep], scores[keep], labels[keep])


def _best_per_class(scores_K: Tensor, labels_K: Tensor, count: int) -> Tensor:
    """Return the indices of the candidates among the `count` best of their class."""
    order = scores_K.argsort(descending=True, stable=True)
    order = order[labels_K[order].argsort(stable=True)]  # by class, best first
    ranked = labels_K[order]
    first_of_class = torch.searchsorted(ranked, ranked)
    rank = torch.arange(len(order), device=order.device) - first_of_class
    return order[rank < count]
