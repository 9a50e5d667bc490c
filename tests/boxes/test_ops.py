"""Box formats and overlap against the plain loops of tests/reference.py."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes import box_cxcywh_to_ltrb, box_ltrb_to_cxcywh, pairwise_iou


def eighths(low: int, high: int) -> st.SearchStrategy[float]:
    """Multiples of 1/8: exact in floating point, so touching and equal boxes come up often."""
    return st.integers(low, high).map(lambda v: v / 8)


@st.composite
def boxes_ltrb(draw: st.DrawFn) -> tuple[float, float, float, float]:
    """A box with or without area, possibly reaching out of the image."""
    left, top = draw(eighths(-2, 8)), draw(eighths(-2, 8))
    return (left, top, left + draw(eighths(0, 6)), top + draw(eighths(0, 6)))


@settings(max_examples=40, deadline=None)
@given(st.lists(boxes_ltrb(), min_size=1, max_size=6))
def test_formats_round_trip(boxes: list[reference.Box]) -> None:
    tensor = torch.tensor(boxes, dtype=torch.float64)
    assert box_ltrb_to_cxcywh(tensor).tolist() == [list(reference.cxcywh(b)) for b in boxes]
    assert torch.equal(box_cxcywh_to_ltrb(box_ltrb_to_cxcywh(tensor)), tensor)


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes_ltrb(), min_size=1, max_size=5), st.lists(boxes_ltrb(), min_size=1))
def test_iou_equals_the_loop(a: list[reference.Box], b: list[reference.Box]) -> None:
    actual = pairwise_iou(
        torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    )
    expected = [[reference.iou(x, y) for y in b] for x in a]
    assert actual.shape == (len(a), len(b))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-14, atol=0)


def test_iou_of_a_batch_is_each_images() -> None:
    generator = np.random.default_rng(0)
    corner, size = generator.uniform(0, 0.7, (3, 5, 2)), generator.uniform(0.01, 0.5, (3, 5, 2))
    batch = torch.from_numpy(np.concatenate([corner, corner + size], -1))
    actual = pairwise_iou(batch, batch[0])
    assert actual.shape == (3, 5, 5)
    for i in range(3):
        assert torch.equal(actual[i], pairwise_iou(batch[i], batch[0]))
    assert torch.allclose(actual[0].diagonal(), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_without_area_overlap_nothing(dtype: torch.dtype) -> None:
    boxes = torch.tensor([[0.3, 0.3, 0.3, 0.3], [0.1, 0.2, 0.4, 0.2], [0, 0, 0, 0]], dtype=dtype)
    full_image = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=dtype)
    assert pairwise_iou(boxes, torch.cat([boxes, full_image])).eq(0).all()
