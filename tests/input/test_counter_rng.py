"""Random numbers by counter: uniform, unrelated between keys, and never changing."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.input.counter_rng import hashed, uniform

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


def test_every_key_and_its_place_counts() -> None:
    values = [hashed(*keys)[0] for keys in [(0,), (0, 0), (0, 0, 0), (1, 0), (0, 1), (1, 1), (1,)]]
    assert len(set(values)) == len(values)
    assert len(np.unique(hashed(np.arange(300)[:, None], np.arange(300)))) == 300 * 300


@pytest.mark.parametrize(
    "keys",
    [
        (np.arange(100_000),),
        (2, 0, np.arange(1000)[:, None], np.arange(100)),
        (2, np.arange(100_000), 3, 4),
        (4, 7, 1, 118_000, np.arange(100_000)),
    ],
)
def test_uniform(keys: tuple[np.ndarray | int, ...]) -> None:
    """Chi-square over 128 bins, and each of the 64 bits, at five standard errors."""
    draw = uniform(*keys).ravel()
    assert draw.shape == (100_000,)
    assert draw.min() >= 0
    assert draw.max() < 1
    counts = np.histogram(draw, bins=128, range=(0, 1))[0]
    expected = len(draw) / 128
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 127) < 5 * np.sqrt(2 * 127)
    bits = hashed(*keys).ravel()[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(draw))


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbors_are_unrelated(place: int, distance: int) -> None:
    """Correlation of numbers with slightly different keys."""
    keys = [3, 0, 5, 11]
    draws = []
    for shift in (0, distance):
        moved: list[int | np.ndarray] = [*keys]
        moved[place] = np.arange(50_000) + shift
        draws.append(uniform(*moved))
    correlation = np.corrcoef(*draws)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(50_000)
