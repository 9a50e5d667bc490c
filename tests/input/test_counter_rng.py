"""Random numbers by counter: uniform, unrelated between keys, and never changing."""

from __future__ import annotations

import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.input.augmentations import hashed, uniform

KEYS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6)


def test_golden_numbers() -> None:
    """A change here changes every crop and order of every run: resumed runs would differ."""
    for keys, value in reference.read_golden("random"):
        assert hashed(*keys).tolist() == [int(value, 16)]
        assert uniform(*keys).tolist() == [(int(value, 16) >> 11) / 2**53]


@settings(max_examples=60, deadline=None)
@given(KEYS)
def test_equal_to_unbounded_integers(keys: list[int]) -> None:
    assert hashed(*keys).tolist() == [reference.hashed(*keys)]


def test_keys_broadcast() -> None:
    rows, columns = np.arange(3), np.arange(4)
    grid = hashed(9, rows[:, None], columns)
    assert grid.shape == (3, 4)
    for row in rows:
        for column in columns:
            assert grid[row, column] == hashed(9, row, column)[0]
