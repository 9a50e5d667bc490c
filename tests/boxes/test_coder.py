"""Offsets from default boxes: the round trip, and finite results for any input."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.boxes import decode, encode

CENTRES = st.floats(-1, 2)
SIZES = st.floats(1e-3, 2)
BOXES = st.tuples(CENTRES, CENTRES, SIZES, SIZES)
ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False, width=32)
DEFAULTS = reference.default_boxes()


@settings(max_examples=100, deadline=None)
@given(BOXES, BOXES)
def test_equal_to_the_formula_and_back(box: reference.Box, default: reference.Box) -> None:
    boxes = torch.tensor([box], dtype=torch.float64)
    defaults = torch.tensor([default], dtype=torch.float64)
    offsets = encode(boxes, defaults)
    expected = reference.encode(box, default)
    np.testing.assert_allclose(offsets[0].numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(decode(offsets, defaults)[0].numpy(), box, rtol=1e-12, atol=1e-12)
    there = reference.decode(expected, default)
    np.testing.assert_allclose(decode(offsets, defaults)[0].numpy(), there, rtol=1e-12, atol=1e-12)


def test_a_default_box_has_offset_zero() -> None:
    defaults = torch.tensor(DEFAULTS)
    assert encode(defaults, defaults).eq(0).all()
    batch = torch.zeros(2, len(defaults), 4)
    assert torch.equal(decode(batch, defaults), defaults.expand(2, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_without_size_stay_finite(dtype: torch.dtype) -> None:
    defaults = torch.tensor(DEFAULTS, dtype=dtype)
    for size in ((0.0, 0.3), (0.3, 0.0), (0.0, 0.0), (-0.1, -0.1)):
        offsets = encode(torch.tensor([[0.5, 0.5, *size]], dtype=dtype), defaults)
        assert offsets.isfinite().all()
        assert offsets.abs().max() < 1e3
        assert decode(offsets, defaults).isfinite().all()


def test_the_floor_of_sizes_is_below_any_real_box() -> None:
    """A tenth of a pixel of a image 3000 pixels wide, against the largest default box."""
    box = torch.tensor([[0.5, 0.5, 0.1 / 3000, 0.1 / 3000]], dtype=torch.float64)
    default = torch.ones(1, 4, dtype=torch.float64)
    expected = reference.encode(box[0].tolist(), default[0].tolist())
    np.testing.assert_allclose(encode(box, default)[0].numpy(), expected, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.tuples(ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT))
def test_sizes_decode_finite_from_any_finite_offset(offset: tuple[float, ...]) -> None:
    defaults = torch.tensor(DEFAULTS)[::500]
    actual = decode(torch.tensor([offset]).expand(len(defaults), 4), defaults)
    assert actual.isfinite().all()
    assert actual[:, 2:].ge(0).all()


def test_gradients_are_finite_at_the_clamps() -> None:
    box = torch.tensor([[0.5, 0.5, 0.0, 0.1]], requires_grad=True)
    default = torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    encode(box, default).sum().backward()
    offsets = torch.tensor([[0.0, 0.0, 1e30, -1e30]], requires_grad=True)
    decode(offsets, default).sum().backward()
    assert box.grad is not None
    assert offsets.grad is not None
    assert box.grad.isfinite().all()
    assert offsets.grad.isfinite().all()
