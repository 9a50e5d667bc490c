"""From predictions to detections: against the plain loop, and in the static shapes of accelerators."""

from unittest.mock import patch

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes import default_boxes_cxcywh
from ssdctl.model import postprocess
from ssdctl.model.backbones import RESNET, ModelConstants
from ssdctl.model.postprocess import ImageDetections, boxes_and_scores, detect, detect_static

DEFAULTS = default_boxes_cxcywh()


def predictions(
    seed: int, num_classes: int, num_boxes: int, spread: float, batch_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random offsets, logits and some of the default boxes; a wider spread detects more."""
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(8732, num_boxes, replace=False))
    offsets = rng.normal(0, 1, (batch_size, 4, num_boxes)).astype(np.float32)
    logits = rng.normal(0, spread, (batch_size, num_classes, num_boxes)).astype(np.float32)
    return torch.from_numpy(offsets), torch.from_numpy(logits), DEFAULTS[chosen]


def run(
    offsets: torch.Tensor,
    logits: torch.Tensor,
    defaults: torch.Tensor,
    score_threshold: float = 0.05,
    nms_iou: float = 0.5,
) -> list[ImageDetections]:
    return detect(offsets, logits, defaults, rules(score_threshold, nms_iou))


def rules(score_threshold: float = 0.05, nms_iou: float = 0.5) -> ModelConstants:
    return RESNET._replace(score_threshold=score_threshold, nms_iou=nms_iou)


def arrays(
    offsets: torch.Tensor, logits: torch.Tensor, defaults: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, list[reference.Box]]:
    """Return the first image's predictions as the loop takes them."""
    return offsets[0].double().numpy(), logits[0].double().numpy(), defaults.tolist()


def check_equal(actual: ImageDetections, expected: list[reference.Detection]) -> None:
    """Compare class by class: between classes, fp32 may order equal scores otherwise."""
    assert actual.scores.diff().le(0).all()
    order = actual.labels.argsort(stable=True)
    expected = sorted(expected, key=lambda d: d.label)
    assert actual.labels[order].tolist() == [d.label for d in expected]
    scores, boxes = [d.score for d in expected], [d.box for d in expected]
    np.testing.assert_allclose(actual.scores[order].numpy(), scores, rtol=2e-6)
    np.testing.assert_allclose(
        actual.boxes[order].numpy(), np.reshape(boxes, (-1, 4)), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize(
    ("seed", "num_classes", "num_boxes", "spread", "thresholds"),
    [
        (2, 6, 1500, 3.0, (0.05, 0.5)),
        (4, 81, 2000, 2.2, (0.05, 0.5)),
        (5, 4, 500, 1.5, (0.3, 0.5)),
        (5, 4, 500, 1.5, (0.01, 0.3)),
        (5, 4, 500, 1.5, (0.2, 0.7)),
    ],
)
def test_equal_to_the_loop(
    seed: int, num_classes: int, num_boxes: int, spread: float, thresholds: tuple[float, float]
) -> None:
    outputs = predictions(seed, num_classes, num_boxes, spread)
    [actual] = run(*outputs, *thresholds)
    expected = reference.detect(*arrays(*outputs), *thresholds)
    assert expected
    check_equal(actual, expected)


@pytest.mark.parametrize(
    ("defaults", "shift"),
    [
        (DEFAULTS[:2], (-8 / 300, 0.0)),  # back onto the first box
        # As its right end is at .7: onto the first one again if class 2 is moved by 1.7.
        (torch.tensor([[0.5, 0.5, 0.4, 0.4]] * 2), (-1.7, -1.7)),
    ],
)
def test_a_box_suppresses_its_own_class(defaults: torch.Tensor, shift: tuple[float, float]) -> None:
    offsets, logits = torch.zeros(1, 4, 2), torch.zeros(1, 3, 2)
    logits[0, 1, 0], logits[0, 2, 1] = 9, 8
    offsets[0, :2, 1] = torch.tensor(shift) / defaults[1, 2:] / 0.1
    [actual] = run(offsets, logits, defaults)
    assert actual.labels.tolist() == [1, 2]


def test_bf16_predictions_are_decoded_in_fp32() -> None:
    offsets, logits, defaults = predictions(10, 5, 400, 2.0)
    rounded = (offsets.bfloat16(), logits.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        [actual] = run(*rounded, defaults)
    [expected] = run(rounded[0].float(), rounded[1].float(), defaults)
    assert actual.boxes.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_one_exploded_box_does_not_touch_the_others() -> None:
    """Neighbors on the finest map overlap by 13/29 < .5, so all of them are kept."""
    offsets, logits = torch.zeros(1, 4, 200), torch.zeros(1, 81, 200)
    logits[0, 0, 38:] = 20
    logits[0, 80, :38] = torch.linspace(9, 6, 38)
    offsets[0, 2:, 199] = 50.0  # exp(10) times its default box
    logits[0, 1, 199] = 30
    defaults = torch.cat([DEFAULTS[:199], DEFAULTS[-1:]])
    [actual] = run(offsets, logits, defaults)
    assert actual.labels.tolist() == [1, *[80] * 38]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_boxes=st.sampled_from([3, 150, 700]),
    num_classes=st.sampled_from([2, 6]),
    threshold=st.sampled_from([0.05, 0.3, 0.999]),
    nms_iou=st.sampled_from([0.2, 0.5, 0.8]),
    many=st.sampled_from([0, 3000]),  # boxes from which classes are suppressed one by one
)
def test_static_shapes_equal_the_ragged_way(
    seed: int, num_boxes: int, num_classes: int, threshold: float, nms_iou: float, many: int
) -> None:
    outputs = predictions(seed, num_classes, num_boxes, 2.0, batch_size=2)
    with patch.object(postprocess, "MANY_BOXES", many):
        ragged = run(*outputs, threshold, nms_iou)
    boxes, scores, labels = detect_static(*boxes_and_scores(*outputs), rules(threshold, nms_iou))
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
