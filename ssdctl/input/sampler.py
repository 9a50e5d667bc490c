"""Draw the samples of a micro-batch before any pixel is read: which images, and their views.

The order is one endless stream, one permutation of the dataset after another. Step s takes the
stream's samples s * G to (s + 1) * G, for a global batch of G; a rank takes its slice of them. So
every image occurs once per epoch at any world size, nothing is dropped or padded, and a resume
needs one integer. All of it is a function of (seed, position in the stream). Images without objects
form a stream of their own, from which each epoch takes a fixed number. Shapes: B batch, G boxes
(padded).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.image_decode import Pixels
from ssdctl.data.store import Split
from ssdctl.input.augmentations import Boxes, Keys, View, change_pixels, hashed, load, whole
from ssdctl.input.batch import LoaderConfig

# Keep the random numbers apart from the augmentations' streams.
ORDER_STREAM, BACKGROUND_STREAM = 1, 6


class SampleStream:
    """The order of one run's samples.

    Args:
        rows: The images of each epoch; an image may occur several times.
        background: Images without objects; each epoch takes the next `num_background`.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        seed: int,
        background: NDArray[np.int64] | None = None,
        num_background: int = 0,
        stream: int = ORDER_STREAM,
    ) -> None:
        assert len(rows) > 0
        self._rows = rows
        self._earlier, self._occurrences = _count_occurrences(rows)
        self._seed = seed
        self._stream = stream
        self._num_background = num_background
        self._background: SampleStream | None = None
        if background is not None and num_background:
            self._background = SampleStream(background, seed, stream=BACKGROUND_STREAM)
        self._permutations: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self._rows) + self._num_background

    @property
    def num_images(self) -> int:
        """The number of different images."""
        others = 0 if self._background is None else self._background.num_images
        return int((self._earlier == 0).sum()) + others

    def samples(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and epochs, (count,) each, of the stream's samples `start` and following.

        The epoch of a sample is the number of earlier samples of its image: each is drawn anew.
        """
        passes, numbers = np.divmod(np.arange(start, start + count), len(self))
        rows, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
        for epoch in np.unique(passes):
            chosen = passes == epoch
            rows[chosen], epochs[chosen] = (
                values[numbers[chosen]] for values in self._permutation(int(epoch))
            )
        return rows, epochs

    def _permutation(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of an epoch in order, and each row's epoch."""
        if epoch not in self._permutations:
            order = np.argsort(
                hashed(self._stream, self._seed, epoch, np.arange(len(self))), kind="stable"
            )
            rows, epochs = self._rows, epoch * self._occurrences + self._earlier
            if self._background is not None:
                number = self._num_background
                others, passes = self._background.samples(epoch * number, number)
                rows, epochs = np.concatenate([rows, others]), np.concatenate([epochs, passes])
            # A batch uses two permutations if it crosses the end of an epoch, or many if it is
            # larger than the dataset; the oldest are never needed again.
            self._permutations = {e: p for e, p in self._permutations.items() if e > epoch - 2}
            self._permutations[epoch] = rows[order], epochs[order]
        return self._permutations[epoch]


def _count_occurrences(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how often each row occurs before its place, and how often in all."""
    _, inverse, counts = np.unique(rows, return_inverse=True, return_counts=True)
    earlier = np.empty(len(rows), np.int64)
    earlier[np.argsort(inverse, kind="stable")] = np.arange(len(rows)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    return earlier, counts[inverse]


class Samples(NamedTuple):
    """A micro-batch without its pixels."""

    rows: NDArray[np.int64]  # B, which images
    view: View
    start: int = 0  # position in the stream of the first one
    is_whole: bool = True  # not augmented: the images are resized exactly as by Pillow
    change: Callable[[int, Pixels], None] | None = None  # the pixels of a slot, by plugins


def draw_samples(
    split: Split,
    config: LoaderConfig,
    rows: NDArray[np.int64],
    epochs: NDArray[np.int64],
    start: int = 0,
) -> Samples:
    """Draw the views of images, each in an epoch: (B,) rows and (B,) epochs."""
    # Only as wide as these images need, because crops cost as much for padding as for boxes.
    most = max(int((split.starts[rows + 1] - split.starts[rows]).max()), 1)
    boxes = padded_boxes(split, rows, min(most, config.max_boxes))
    view = whole(boxes, split.pixel_sizes[rows])
    augmentations = load(config.augment)
    for augmentation in augmentations:
        keys = Keys(augmentation.stream, config, epochs, rows)
        view = augmentation.apply(view, augmentation.draw(keys, view.boxes, view.sizes))
    view = view._replace(boxes=_finished(view.boxes, config.max_boxes))
    change = None
    if steps := [augmentation for augmentation in augmentations if augmentation.pixels]:
        change = functools.partial(change_pixels, steps, Keys(0, config, epochs, rows.copy()))
    return Samples(rows, view, start, not augmentations, change)


def whole_samples(split: Split, rows: NDArray[np.int64], max_boxes: int = 1) -> Samples:
    """Return whole images, for evaluation, with at most `max_boxes` boxes each."""
    boxes = _finished(padded_boxes(split, rows, max_boxes), max_boxes)
    return Samples(rows, whole(boxes, split.pixel_sizes[rows]))


def padded_boxes(split: Split, rows: NDArray[np.int64], max_boxes: int) -> Boxes:
    """Return the boxes of images, zero-padded or cut to `max_boxes`."""
    ltrb = np.zeros((len(rows), max_boxes, 4))
    labels = np.zeros((len(rows), max_boxes), np.int64)
    for i, row in enumerate(rows):
        start = split.starts[row]
        end = min(split.starts[row + 1], start + max_boxes)
        ltrb[i, : end - start] = split.boxes[start:end]
        labels[i, : end - start] = split.labels[start:end]
    return Boxes(ltrb, labels)


def _finished(boxes: Boxes, max_boxes: int) -> Boxes:
    padding = ((0, 0), (0, max_boxes - boxes.labels.shape[1]))
    ltrb = np.pad(boxes.ltrb.astype(np.float32), (*padding, (0, 0)))
    return Boxes(ltrb, np.pad(boxes.labels, padding))
