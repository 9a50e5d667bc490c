"""A whole image is resized exactly as by Pillow; a crop within one level of it."""

from __future__ import annotations

import numpy as np
from data.samples import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ssdctl.input.loader import resize, resize_crop


@settings(max_examples=60, deadline=None)
@given(
    box=st.tuples(
        st.integers(0, 299), st.integers(0, 199), st.integers(1, 300), st.integers(1, 200)
    ),
    flip=st.booleans(),
)
def test_a_crop_is_within_one_level_of_pillows(box: tuple[int, int, int, int], flip: bool) -> None:
    left, top = min(box[0], box[2] - 1), min(box[1], box[3] - 1)
    window = (left, top, max(box[2], left + 1), max(box[3], top + 1))
    pixels = np.array(sample(300, 200, 5))
    out = np.zeros((300, 300, 3), np.uint8)
    resize_crop(pixels, window, flip, out)
    cut = Image.fromarray(pixels).crop(window)
    expected = np.asarray(cut.resize((300, 300), Image.Resampling.BILINEAR)).astype(int)
    error = np.abs(out[:, ::-1] - expected if flip else out - expected)
    assert error.max() <= 1
    assert error.mean() < 0.1


def test_an_uncropped_image_equals_pillows() -> None:
    image = sample(333, 222, 7)
    out = np.zeros((300, 300, 3), np.uint8)
    resize(np.asarray(image), out)
    assert np.array_equal(out, np.asarray(image.resize((300, 300), Image.Resampling.BILINEAR)))
