"""Default boxes, overlap, coding and matching against the plain loops of tests/reference.py."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes import (
    Matcher,
    box_cxcywh_to_ltrb,
    box_ltrb_to_cxcywh,
    decode,
    default_boxes_cxcywh,
    encode,
    pairwise_iou,
)

Truth = tuple[reference.Box, int]  # ltrb, label

DEFAULTS = reference.default_boxes()
UNIT = st.floats(0, 1)
CENTERS = st.floats(-1, 2)
SIZES = st.floats(1e-3, 2)
CXCYWH = st.tuples(CENTERS, CENTERS, SIZES, SIZES)
ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def ltrb_boxes(draw: st.DrawFn) -> tuple[float, float, float, float]:
    """With or without area; on a grid of eighths half of the time: ties, equal boxes, IoUs of 1/2."""
    if draw(st.booleans()):
        (left, right), (top, bottom) = (sorted((draw(UNIT), draw(UNIT))) for _ in range(2))
        return (left, top, right, bottom)
    eighths = st.integers(-1, 8)
    (left, right), (top, bottom) = (sorted((draw(eighths), draw(eighths))) for _ in range(2))
    return (left / 8, top / 8, right / 8, bottom / 8)


BOXES = st.lists(ltrb_boxes(), min_size=1, max_size=25)


def exact(boxes: object) -> torch.Tensor:
    return torch.tensor(boxes, dtype=torch.float64)


def test_default_boxes() -> None:
    """Centers and sizes are clamped, corners are not; fp32 is the rounded fp64."""
    boxes = default_boxes_cxcywh(torch.float64)
    assert boxes.shape == (8732, 4)
    np.testing.assert_allclose(boxes.numpy(), DEFAULTS, rtol=0, atol=1e-15)
    assert boxes.max() == 1.0  # 261 * sqrt(2) pixels and 299.5 of the fifth map's wide boxes
    corners = box_cxcywh_to_ltrb(boxes)
    assert corners.min() < -0.1
    assert corners.max() > 1.1
    assert torch.equal(default_boxes_cxcywh(), boxes.float())


@settings(max_examples=60, deadline=None)
@given(BOXES, BOXES)
def test_formats_and_iou(a: list[reference.Box], b: list[reference.Box]) -> None:
    boxes = exact(a)
    np.testing.assert_array_equal(box_ltrb_to_cxcywh(boxes), [reference.cxcywh(x) for x in a])
    np.testing.assert_allclose(box_cxcywh_to_ltrb(box_ltrb_to_cxcywh(boxes)), a, rtol=0, atol=1e-15)
    expected = [[reference.iou(x, y) for y in b] for x in a]
    np.testing.assert_allclose(pairwise_iou(boxes, exact(b)).numpy(), expected, rtol=1e-12)
    batch = torch.stack([boxes, boxes.flip(0)])
    assert torch.equal(pairwise_iou(batch, exact(b))[1], pairwise_iou(batch[1], exact(b)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_without_area_overlap_nothing_and_stay_finite(dtype: torch.dtype) -> None:
    boxes = torch.tensor([[0.3, 0.3, 0.3, 0.3], [0.1, 0.2, 0.4, 0.2], [0, 0, 0, 0]], dtype=dtype)
    full_image = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=dtype)
    assert pairwise_iou(boxes, torch.cat([boxes, full_image])).eq(0).all()
    defaults = torch.tensor(DEFAULTS, dtype=dtype)
    for size in ((0.0, 0.3), (0.3, 0.0), (0.0, 0.0), (-0.1, -0.1)):
        offsets = encode(torch.tensor([[0.5, 0.5, *size]], dtype=dtype), defaults)
        assert offsets.isfinite().all()
        assert offsets.abs().max() < 1e3
        assert decode(offsets, defaults).isfinite().all()


@settings(max_examples=100, deadline=None)
@given(CXCYWH, CXCYWH)
def test_coding_is_the_formula_and_back(box: reference.Box, default: reference.Box) -> None:
    offsets = encode(exact([box]), exact([default]))
    expected = reference.encode(box, default)
    np.testing.assert_allclose(offsets[0].numpy(), expected, rtol=1e-12, atol=1e-12)
    actual = decode(offsets, exact([default]))[0].numpy()
    np.testing.assert_allclose(actual, box, rtol=1e-12, atol=1e-12)
    there = reference.decode(expected, default)
    np.testing.assert_allclose(actual, there, rtol=1e-12, atol=1e-12)


def test_coding_of_batches_and_small_boxes() -> None:
    defaults = torch.tensor(DEFAULTS)
    assert encode(defaults, defaults).eq(0).all()
    assert torch.equal(decode(torch.zeros(2, 8732, 4), defaults), defaults.expand(2, -1, -1))
    # A tenth of a pixel of an image 3000 pixels wide is above the floor of sizes.
    box, default = [0.5, 0.5, 0.1 / 3000, 0.1 / 3000], [1.0, 1.0, 1.0, 1.0]
    offsets = encode(exact([box]), exact([default]))[0]
    np.testing.assert_allclose(offsets.numpy(), reference.encode(box, default), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.tuples(ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT))
def test_any_finite_offset_decodes_to_a_finite_size(offset: tuple[float, ...]) -> None:
    defaults = torch.tensor(DEFAULTS)[::500]
    actual = decode(torch.tensor([offset]).expand(len(defaults), 4), defaults)
    assert actual.isfinite().all()
    assert actual[:, 2:].ge(0).all()


match = Matcher()
TRUTHS = st.lists(st.tuples(ltrb_boxes(), st.sampled_from([1, 2, 80, -1])), max_size=6)


def padded(images: list[list[Truth]], num_boxes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, G, 4) float64 boxes and (B, G) labels, zeros behind the real ones."""
    boxes = torch.zeros(len(images), num_boxes, 4, dtype=torch.float64)
    labels = torch.zeros(len(images), num_boxes, dtype=torch.int64)
    for i, truths in enumerate(images):
        for g, (box, label) in enumerate(truths):
            boxes[i, g] = exact(box)
            labels[i, g] = label
    return boxes, labels


def check_matches(images: list[list[Truth]], defaults: list[reference.Box], padding: int) -> None:
    num_boxes = max((len(t) for t in images), default=0) + padding
    index, label = match(*padded(images, num_boxes), exact(defaults))
    for i, truths in enumerate(images):
        expected = reference.match([t[0] for t in truths], [t[1] for t in truths], defaults)
        assert label[i].tolist() == expected[1]
        used = [g if n > 0 else -1 for g, n in zip(*expected, strict=True)]
        assert index[i].where(label[i] > 0, torch.tensor(-1)).tolist() == used


@settings(max_examples=150, deadline=None)
@given(st.lists(TRUTHS, min_size=1, max_size=3), BOXES, st.integers(1, 4))
def test_matches_are_those_of_the_loop(
    images: list[list[Truth]], defaults: list[reference.Box], padding: int
) -> None:
    check_matches(images, defaults, padding)


@pytest.mark.parametrize(("at_threshold", "label"), [(False, 0), (True, 3)])
def test_an_iou_of_exactly_one_half(at_threshold: bool, label: int) -> None:
    defaults = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 1.0, 1.0]])
    boxes, labels = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]), torch.tensor([[3]])
    matcher = Matcher(at_threshold=at_threshold)
    assert matcher(boxes, labels, defaults)[1].tolist() == [[label, 3]]


def test_gradients_are_finite_at_the_clamps() -> None:
    box = torch.tensor([[0.5, 0.5, 0.0, 0.1]], requires_grad=True)
    offsets = torch.tensor([[0.0, 0.0, 1e30, -1e30]], requires_grad=True)
    default = torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    (encode(box, default).sum() + decode(offsets, default).sum()).backward()
    for leaf in (box, offsets):
        assert leaf.grad.isfinite().all()
