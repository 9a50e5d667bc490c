"""The static shapes of accelerators give the detections of the CPU's ragged ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.model.postprocess import boxes_and_scores, detect, detect_static


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_boxes=st.sampled_from([3, 150, 700]),
    num_classes=st.sampled_from([2, 6]),
    threshold=st.sampled_from([0.05, 0.3, 0.999]),
    nms_iou=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_equal_to_the_ragged_way(
    seed: int, num_boxes: int, num_classes: int, threshold: float, nms_iou: float
) -> None:
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(8732, num_boxes, replace=False))
    defaults = default_boxes_cxcywh()[chosen]
    offsets = torch.from_numpy(rng.normal(0, 1, (2, 4, num_boxes)).astype(np.float32))
    logits = torch.from_numpy(rng.normal(0, 2, (2, num_classes, num_boxes)).astype(np.float32))
    ragged = detect(offsets, logits, defaults, score_threshold=threshold, nms_iou=nms_iou)
    decoded = boxes_and_scores(offsets, logits, defaults)
    boxes, scores, labels = detect_static(*decoded, threshold, nms_iou)
    for i, actual in enumerate(ragged):
        count = int((labels[i] > 0).sum())
        assert (labels[i, count:] == 0).all()
        assert torch.equal(scores[i, :count], actual.scores)
        static = (boxes[i, :count], scores[i, :count], labels[i, :count])
        for one, other in zip(_by_score(*static), _by_score(*actual), strict=True):
            assert torch.equal(one, other)


def _by_score(*columns: torch.Tensor) -> list[torch.Tensor]:
    """Sort detections by score, those of equal scores by their left edge."""
    boxes, scores, _ = columns
    order = np.lexsort((boxes[:, 0].numpy(), scores.numpy()))
    return [column[order] for column in columns]


def test_nothing_found() -> None:
    boxes, scores = torch.rand(1, 10, 4), torch.zeros(1, 3, 10)
    assert (detect_static(boxes, scores, 0.05, 0.5)[2] == 0).all()


@pytest.mark.parametrize("num_boxes", [1, 8732])
def test_padding_has_the_declared_length(num_boxes: int) -> None:
    boxes, scores = torch.rand(1, num_boxes, 4), torch.rand(1, 2, num_boxes)
    labels = detect_static(boxes, scores, 0.05, 0.5)[2]
    assert labels.shape == (1, min(200, 2 * min(200, num_boxes)))
