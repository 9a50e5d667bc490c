"""The 8732 default boxes: their number, values, order and clamping."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch

from ssdctl.boxes.default_boxes import BOXES_PER_CELL, FEATURE_SIZES, default_boxes_cxcywh
from ssdctl.boxes.ops import box_cxcywh_to_ltrb


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


def test_values_from_the_paper(boxes: np.ndarray) -> None:
    # The first box is 21 pixels wide and centred in the first 8 x 8 cell; the second's side is
    # sqrt(21 * 45); the third is twice as wide as high. The last map has one cell.
    second, third = 38 * 38, 2 * 38 * 38
    np.testing.assert_allclose(boxes[0] * 300, [4, 4, 21, 21])
    np.testing.assert_allclose(boxes[second] * 300, [4, 4, 945**0.5, 945**0.5])
    np.testing.assert_allclose(boxes[third] * 300, [4, 4, 21 * 2**0.5, 21 / 2**0.5])
    np.testing.assert_allclose(boxes[-4] * 300, [150, 150, 261, 261])


def test_order_is_map_shape_row_column(boxes: np.ndarray) -> None:
    start = 0
    for size, per_cell in zip(FEATURE_SIZES, BOXES_PER_CELL, strict=True):
        level = boxes[start : start + per_cell * size * size].reshape(per_cell, size, size, 4)
        assert np.ptp(level[..., 2:], axis=(1, 2)).max() == 0  # one shape over rows and columns
        assert (np.diff(level[..., 0], axis=2) > 0).all()  # columns go right
        assert (np.diff(level[..., 1], axis=1) > 0).all()  # rows go down
        for shape in range(3, per_cell, 2):  # wide first, then its transpose
            np.testing.assert_array_equal(level[shape, 0, 0, 2:], level[shape - 1, 0, 0, :1:-1])
            assert level[shape - 1, 0, 0, 2] > level[shape - 1, 0, 0, 3]
        start += level[..., 0].size
    assert start == len(boxes)
    assert BOXES_PER_CELL == (4, 6, 6, 6, 4, 4)


def test_centres_and_sizes_are_clamped_but_corners_are_not(boxes: np.ndarray) -> None:
    assert boxes.min() > 0
    assert boxes.max() == 1.0  # 261 * sqrt(2) pixels and 299.5 of the fifth map's wide boxes
    corners = box_cxcywh_to_ltrb(torch.from_numpy(boxes)).numpy()
    assert corners.min() < -0.1
    assert corners.max() > 1.1


def test_fp32_is_the_rounded_fp64(boxes: np.ndarray) -> None:
    assert np.array_equal(default_boxes_cxcywh().numpy(), boxes.astype(np.float32))


def test_no_two_are_equal(boxes: np.ndarray) -> None:
    assert len({tuple(b) for b in boxes}) == 8732
    assert all(a != b for a, b in itertools.pairwise(map(tuple, boxes)))
