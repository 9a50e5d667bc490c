"""Random numbers by counter: a number is a function of its key, drawn in any order, by any thread.

The generator is SplitMix64 (Steele, Lea, Flood 2014) used as a hash, written in numpy so that a
whole batch is drawn at once and the numbers never change with a library's version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(*keys: ArrayLike) -> NDArray[np.uint64]:
    """Return 64 random bits for each element of the (broadcast, non-negative) integer keys."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):  # wrapping around is the point
        for key in keys:
            state = _mix((state + GOLDEN) ^ _mix(np.asarray(key).astype(np.uint64) + GOLDEN))
    return state


def uniform(*keys: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each element of the broadcast keys."""
    return (hashed(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
