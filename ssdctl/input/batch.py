"""Batches: which samples, which crops, which pixels. A batch is a function of (seed, step)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from ssdctl.config import TrainConfig
    from ssdctl.data.store import Split


class BadImage(NamedTuple):
    """An image that could not be trained on, and its replacement."""

    image_id: int
    file: str
    problem: str
    sample: int  # the position in the stream
    replaced_by: int  # image id


class Batch(NamedTuple):
    """One rank's share of one micro-batch.

    The pixels are in a buffer that is reused: they are valid until the next step's batches are
    requested.
    """

    images: Tensor  # B x 300 x 300 x 3, uint8 RGB
    boxes: Tensor  # B x G x 4, float32 ltrb in fractions of the image
    labels: Tensor  # B x G, int64; 0 marks padding, -1 an object to ignore
    jitter: Tensor | None  # B x 4, float32: see ssdctl.input.normalize
    rows: NDArray[np.int64]  # B, which images
    bad: tuple[BadImage, ...] = ()  # replaced in this batch


def trim_padding(batch: Batch) -> Batch:
    """Drop the boxes that are padding in every image: matching them costs as much as others.

    The shapes then change from batch to batch, which only eager steps on the host support.
    """
    used = (batch.labels != 0).any(dim=0).nonzero()
    num_used = int(used.max()) + 1 if len(used) else 1
    return batch._replace(boxes=batch.boxes[:, :num_used], labels=batch.labels[:, :num_used])


def num_background(images: int, share: float) -> int:
    """Return the number of samples without objects for `images` others; 1 for a tiny share."""
    return max(round(images * share / (1 - share)), int(share > 0))


class LoaderConfig(NamedTuple):
    """The part of the stream that a rank loads, and its settings."""

    seed: int
    batch_size: int  # per rank and micro-batch
    threads: int
    max_boxes: int  # G: the same for every batch, so that shapes are static
    augment: str = "ssd"
    hue_degrees: float = 18.0
    accumulate: int = 1
    first_sample: int = 0  # position in the stream at step 0 of `TrainLoader.batches`
    rank: int = 0
    world_size: int = 1
    background: int = 0  # samples without objects in each epoch

    @classmethod
    def of(
        cls, config: TrainConfig, split: Split, *, batch_size: int, threads: int, **others: Any
    ) -> LoaderConfig:
        return cls(
            seed=config.seed,
            batch_size=batch_size,
            threads=threads,
            max_boxes=max(split.most_boxes, 1),
            augment=config.augment,
            hue_degrees=config.hue_degrees,
            background=num_background(len(split.trainable), config.background)
            if len(split.background)
            else 0,
        )._replace(**others)

    def positions(self, start_step: int, end_step: int) -> range:
        """Return the position in the stream at which each micro-batch of this rank begins.

        Steps count from `first_sample`; each has `accumulate` micro-batches.
        """
        stride = self.batch_size * self.world_size
        first = self.first_sample + self.rank * self.batch_size
        start, end = (first + step * self.accumulate * stride for step in (start_step, end_step))
        return range(start, end, stride)
