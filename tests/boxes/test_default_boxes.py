"""The 8732 default boxes: their number, values, order and clamping."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from ssdctl.boxes import box_cxcywh_to_ltrb, default_boxes_cxcywh


@pytest.fixture(scope="module")
def boxes() -> np.ndarray:
    return default_boxes_cxcywh(torch.float64).numpy()


def test_equal_to_the_loop(boxes: np.ndarray) -> None:
    assert boxes.shape == (8732, 4)
    np.testing.assert_allclose(boxes, reference.default_boxes(), rtol=0, atol=1e-15)


def test_golden_values(boxes: np.ndarray) -> None:
    golden = reference.read_golden("default_boxes")
    for index, box in golden["cxcywh"].items():
        np.testing.assert_allclose(boxes[int(index)], box, rtol=0, atol=1e-15)
    np.testing.assert_allclose(boxes.sum(axis=0), golden["sums"], rtol=1e-13)


def test_centers_and_sizes_are_clamped_but_corners_are_not(boxes: np.ndarray) -> None:
    assert boxes.min() > 0
    assert boxes.max() == 1.0  # 261 * sqrt(2) pixels and 299.5 of the fifth map's wide boxes
    corners = box_cxcywh_to_ltrb(torch.from_numpy(boxes)).numpy()
    assert corners.min() < -0.1
    assert corners.max() > 1.1


def test_fp32_is_the_rounded_fp64(boxes: np.ndarray) -> None:
    assert np.array_equal(default_boxes_cxcywh().numpy(), boxes.astype(np.float32))
