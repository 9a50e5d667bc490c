"""Matching against the plain loop, padding included."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes import Matcher

Truth = tuple[reference.Box, int]  # ltrb, label


@st.composite
def ltrb_boxes(draw: st.DrawFn) -> tuple[float, float, float, float]:
    """On a grid of eighths half of the time: ties, equal boxes, an IoU of exactly 1/2."""
    if draw(st.booleans()):
        left, top = draw(st.integers(0, 7)), draw(st.integers(0, 7))
        right, bottom = draw(st.integers(left, 8)), draw(st.integers(top, 8))  # maybe no area
        return (left / 8, top / 8, right / 8, bottom / 8)
    unit = st.floats(0, 1)
    left, right = sorted((draw(unit), draw(unit)))
    top, bottom = sorted((draw(unit), draw(unit)))
    return (left, top, right, bottom)


match = Matcher()
TRUTHS = st.lists(st.tuples(ltrb_boxes(), st.integers(1, 80)), max_size=6)


def padded(images: list[list[Truth]], num_boxes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, G, 4) float64 boxes and (B, G) labels, zeros behind the real ones."""
    boxes = torch.zeros(len(images), num_boxes, 4, dtype=torch.float64)
    labels = torch.zeros(len(images), num_boxes, dtype=torch.int64)
    for i, truths in enumerate(images):
        for g, (box, label) in enumerate(truths):
            boxes[i, g] = torch.tensor(box, dtype=torch.float64)
            labels[i, g] = label
    return boxes, labels


def check(images: list[list[Truth]], defaults: list[reference.Box], padding: int) -> None:
    num_boxes = max((len(t) for t in images), default=0) + padding
    boxes, labels = padded(images, num_boxes)
    index, label = match(boxes, labels, torch.tensor(defaults, dtype=torch.float64))
    for i, truths in enumerate(images):
        expected = reference.match([t[0] for t in truths], [t[1] for t in truths], defaults)
        assert label[i].tolist() == expected[1]
        is_positive = label[i] > 0
        actual = index[i].where(is_positive, torch.full_like(index[i], -1)).tolist()
        assert actual == expected[0]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(TRUTHS, min_size=1, max_size=3),
    st.lists(ltrb_boxes(), min_size=1, max_size=25),
    st.integers(1, 4),
)
def test_equal_to_the_loop(
    images: list[list[Truth]], defaults: list[reference.Box], padding: int
) -> None:
    check(images, defaults, padding)


def test_equal_to_the_loop_on_the_default_boxes() -> None:
    rng = np.random.default_rng(1)
    defaults = [reference.ltrb(d) for d in reference.default_boxes()]
    images: list[list[Truth]] = [[]]
    for count in (1, 4):
        corner, size = rng.uniform(0, 0.8, (count, 2)), rng.uniform(0.02, 0.6, (count, 2))
        boxes = np.concatenate([corner, np.minimum(corner + size, 1)], 1)
        images.append([(tuple(map(float, b)), int(rng.integers(1, 81))) for b in boxes])
    check(images, defaults, 2)


def test_an_iou_of_exactly_one_half_is_no_match() -> None:
    defaults = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 1.0, 1.0]])
    boxes, labels = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]), torch.tensor([[3]])
    assert match(boxes, labels, defaults)[1].tolist() == [[0, 3]]


def test_padding_never_matches() -> None:
    """Not even if a default box equals the padding and no image has a real box."""
    defaults = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    boxes = torch.zeros(2, 3, 4)
    boxes[1, 1] = torch.tensor([0.0, 0.0, 1.0, 1.0])  # garbage in the padding is padding still
    assert match(boxes, torch.zeros(2, 3, dtype=torch.int64), defaults)[1].eq(0).all()


@pytest.mark.parametrize("box", [(0.5, 0.5, 0.6, 0.5), (0.5, 0.5, 0.5, 0.5)])
def test_a_box_without_area_takes_one_box_and_no_more(box: reference.Box) -> None:
    defaults = torch.tensor([reference.ltrb(d) for d in reference.default_boxes()])
    boxes, labels = padded([[(box, 5), ((0.1, 0.1, 0.5, 0.6), 2)]], 4)
    _, label = match(boxes.float(), labels, defaults)
    assert label.eq(5).sum() == 1
    assert label.eq(2).sum() > 1
