"""Boxes become fractions of their image by one correctly rounded quotient."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ssdctl.data.check import CLIPPED, clip


def nearest_float32(value: Fraction) -> np.float32:
    """Round an exact value to the nearest float32, by comparing its neighbors exactly."""
    guess = np.float32(float(value))
    around = (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(2)))
    return min(around, key=lambda candidate: abs(Fraction(float(candidate)) - value))


def test_fractions_equal_exact_arithmetic() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 700, (1000, 2))
    low = rng.uniform(0, sizes - 3)
    boxes = np.concatenate([low, rng.uniform(1, sizes - low)], axis=1)
    for decimals in (0, 1, 2):
        boxes[decimals::4] = boxes[decimals::4].round(decimals)
    _, fractions, kinds = clip(boxes, sizes)
    assert (kinds <= CLIPPED).all()
    for box, size, actual in zip(boxes.tolist(), sizes.tolist(), fractions.tolist(), strict=True):
        low_exact = [Fraction(v) for v in box[:2]]
        high = [a + Fraction(v) for a, v in zip(low_exact, box[2:], strict=True)]
        high = [min(v, Fraction(side)) for v, side in zip(high, size, strict=True)]
        exact = [v / side for v, side in zip([*low_exact, *high], size * 2, strict=True)]
        assert actual == [float(nearest_float32(v)) for v in exact]
