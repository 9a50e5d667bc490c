"""The batches that a training step takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


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
    labels: Tensor  # B x G, int64; 0 marks padding
    jitter: Tensor | None  # B x 4, float32: see ssdctl.model.normalize
    rows: NDArray[np.int64]  # B, which images
    bad: tuple[BadImage, ...] = ()  # replaced in this batch


def trim_padding(batch: Batch) -> Batch:
    """Drop the boxes that are padding in every image: matching them costs as much as others.

    The shapes then change from batch to batch, which only eager steps on the host support.
    """
    used = (batch.labels > 0).any(dim=0).nonzero()
    num_used = int(used.max()) + 1 if len(used) else 1
    return batch._replace(boxes=batch.boxes[:, :num_used], labels=batch.labels[:, :num_used])
