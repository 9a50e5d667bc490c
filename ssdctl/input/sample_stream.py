"""The order of samples: one endless stream, one permutation of the dataset after another.

Step s takes the stream's samples s * G to (s + 1) * G, for a global batch of G; a rank takes its
slice of them. So every image occurs once per epoch at any world size, nothing is dropped or padded,
and a resume needs one integer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.input.counter_rng import hashed

ORDER_STREAM = 1  # separates these random numbers from those of crops and colours


class Sample(NamedTuple):
    """Samples of the stream, as arrays of equal length."""

    row: NDArray[np.int64]  # which image
    epoch: NDArray[np.int64]  # which pass over the dataset: the key of its crop and colour


class SampleStream:
    """The stream of one run.

    Args:
        rows: The images that are trained on.
        seed: The run's seed.
    """

    def __init__(self, rows: NDArray[np.int64], seed: int) -> None:
        assert len(rows) > 0
        self._rows = rows
        self._seed = seed
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def samples(self, start: int, count: int) -> Sample:
        """Return the samples `start` to `start + count` of the stream."""
        position = np.arange(start, start + count)
        epoch, place = np.divmod(position, len(self._rows))
        row = np.empty(count, np.int64)
        for number in np.unique(epoch):
            chosen = epoch == number
            row[chosen] = self._permutation(int(number))[place[chosen]]
        return Sample(row, epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            keys = hashed(ORDER_STREAM, self._seed, epoch, np.arange(len(self._rows)))
            # A batch uses two permutations if it crosses the end of an epoch, or many if it is
            # larger than the dataset; the oldest are never needed again.
            self._permutations = {e: p for e, p in self._permutations.items() if e > epoch - 2}
            self._permutations[epoch] = self._rows[np.argsort(keys, kind="stable")]
        return self._permutations[epoch]
