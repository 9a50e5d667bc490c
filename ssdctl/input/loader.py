"""Turn steps into batches: decode threads that fill a reused uint8 buffer, some steps ahead.

    loader = TrainLoader(split, order, plan)
    for batch in loader.batches(start_step, end_step): ...

JPEG decoding and resizing release the GIL, so threads suffice: no worker processes, no pickling,
no shared memory. Pixels are resized as Pillow does (antialiased bilinear) and stay uint8; colour
and normalisation happen on the device.
Shapes: B batch, G boxes (padded).
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.data.store import Split
from ssdctl.errors import DataError
from ssdctl.input.crop import Crops, Floats, flip_boxes, sample_crops, whole_images
from ssdctl.input.order import Order
from ssdctl.input.randomness import uniform

FLIP_STREAM = 3
COLOUR_STREAM = 4
BATCHES_AHEAD = 2


class Batch(NamedTuple):
    """One rank's share of one micro-batch.

    The pixels lie in a buffer that is used again: they are good until the next step's batches are
    asked for.
    """

    images: Tensor  # B x 300 x 300 x 3, uint8 RGB
    boxes: Tensor  # B x G x 4, float32 ltrb in fractions of the picture
    labels: Tensor  # B x G, int64; 0 marks padding
    jitter: Tensor | None  # B x 4, float32: see ssdctl.model.augment.normalise
    rows: NDArray[np.int64]  # B, which images


class TrainPlan(NamedTuple):
    """What a rank takes of the stream."""

    seed: int
    first_sample: int  # of the stream, at step 0 of `TrainLoader.batches`
    batch_size: int  # per rank and micro-batch
    rank: int
    world_size: int
    accumulate: int
    augment: bool
    hue_degrees: float
    threads: int
    max_boxes: int  # G: the same for every batch, so that shapes are static

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size * self.accumulate


class TrainLoader:
    """Training batches of one rank."""

    def __init__(self, split: Split, order: Order, plan: TrainPlan) -> None:
        self._split = split
        self._order = order
        self._plan = plan

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """The micro-batches of steps start to end, `accumulate` for each step.

        Steps count from `first_sample`.
        """
        plan = self._plan
        parts = (
            plan.first_sample
            + step * plan.global_batch
            + (part * plan.world_size + plan.rank) * plan.batch_size
            for step in range(start_step, end_step)
            for part in range(plan.accumulate)
        )
        work = (self._draw(start) for start in parts)
        return _decoded(self._split, work, plan.batch_size, plan.threads, plan.accumulate)

    def _draw(self, start: int) -> _Work:
        """Decide everything about a micro-batch but its pixels."""
        plan = self._plan
        sample = self._order.samples(start, plan.batch_size)
        boxes, labels = padded_boxes(self._split, sample.row, plan.max_boxes)
        if not plan.augment:
            crops = whole_images(boxes, labels)
            return _Work(sample.row, crops, np.zeros(len(sample.row), np.bool_), None)
        crops = sample_crops(plan.seed, sample.epoch, sample.row, boxes, labels)
        flip = uniform(FLIP_STREAM, plan.seed, sample.epoch, sample.row) < 0.5
        mirrored = flip_boxes(crops.boxes, crops.labels)
        crops = crops._replace(boxes=np.where(flip[:, None, None], mirrored, crops.boxes))
        keys = (COLOUR_STREAM, plan.seed, sample.epoch[:, None], sample.row[:, None], np.arange(4))
        jitter = colour_jitter(uniform(*keys), plan.hue_degrees)
        return _Work(sample.row, crops, flip, jitter)


def colour_jitter(draw: Floats, hue_degrees: float) -> NDArray[np.float32]:
    """(B, 4) uniform numbers -> brightness .875 to 1.125, contrast and saturation .5 to 1.5, hue
    in radians (FACTS 5)."""
    spread = np.array([0.125, 0.5, 0.5, math.radians(hue_degrees)])
    return (np.array([1.0, 1.0, 1.0, 0.0]) + spread * (2 * draw - 1)).astype(np.float32)


def evaluation_batches(
    split: Split, rows: NDArray[np.int64], batch_size: int, threads: int
) -> Iterator[Batch]:
    """Whole pictures in the order of `rows`; the last batch may be smaller."""

    def draw(chosen: NDArray[np.int64]) -> _Work:
        boxes, labels = padded_boxes(split, chosen, 1)
        crops = whole_images(boxes, labels)
        return _Work(chosen, crops, np.zeros(len(chosen), np.bool_), None)

    work = (draw(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size))
    return _decoded(split, work, batch_size, threads, held=1)


def padded_boxes(
    split: Split, rows: NDArray[np.int64], max_boxes: int
) -> tuple[Floats, NDArray[np.int64]]:
    """The boxes (B, G, 4) and labels (B, G) of images, padded with zeros, cut at `max_boxes`."""
    boxes = np.zeros((len(rows), max_boxes, 4))
    labels = np.zeros((len(rows), max_boxes), np.int64)
    for i, row in enumerate(rows):
        start = split.starts[row]
        end = min(split.starts[row + 1], start + max_boxes)
        boxes[i, : end - start] = split.boxes[start:end]
        labels[i, : end - start] = split.labels[start:end]
    return boxes, labels


class _Work(NamedTuple):
    rows: NDArray[np.int64]
    crops: Crops
    flip: NDArray[np.bool_]
    jitter: NDArray[np.float32] | None


class _Pending(NamedTuple):
    work: _Work
    pixels: NDArray[np.uint8]
    futures: list[Future[None]]


def _decoded(
    split: Split, work: Iterator[_Work], batch_size: int, threads: int, held: int
) -> Iterator[Batch]:
    """Decode batches ahead of their use, into a ring of buffers.

    Args:
        held: How many batches the caller uses at a time.
    """
    shape = (batch_size, IMAGE_SIZE, IMAGE_SIZE, 3)
    num_buffers = held + BATCHES_AHEAD + 1
    free = deque(torch.empty(shape, dtype=torch.uint8).numpy() for _ in range(num_buffers))
    pending: deque[_Pending] = deque()

    def start(pool: ThreadPoolExecutor, item: _Work) -> None:
        pixels = free[0]
        free.rotate(-1)
        futures = [
            pool.submit(_decode, split, int(row), item.crops.rect[i], bool(item.flip[i]), pixels[i])
            for i, row in enumerate(item.rows)
        ]
        pending.append(_Pending(item, pixels, futures))

    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            for item in work:
                start(pool, item)
                if len(pending) > BATCHES_AHEAD:
                    yield _finished(pending.popleft())
            while pending:
                yield _finished(pending.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _finished(done: _Pending) -> Batch:
    for future in done.futures:
        future.result()
    work = done.work
    return Batch(
        images=torch.from_numpy(done.pixels[: len(work.rows)]),
        boxes=torch.from_numpy(work.crops.boxes),
        labels=torch.from_numpy(work.crops.labels),
        jitter=None if work.jitter is None else torch.from_numpy(work.jitter),
        rows=work.rows,
    )


def _decode(split: Split, row: int, rect: Floats, flip: bool, out: NDArray[np.uint8]) -> None:
    """Read one image, cut `rect` (fractions) out of it, resize it to 300 x 300 into `out`."""
    try:
        with Image.open(io.BytesIO(split.read(row))) as picture:
            width, height = picture.size
            box = (rect[0] * width, rect[1] * height, rect[2] * width, rect[3] * height)
            size = (IMAGE_SIZE, IMAGE_SIZE)
            pixels = np.asarray(
                picture.convert("RGB").resize(size, Image.Resampling.BILINEAR, box=box)
            )
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"image {split.image_ids[row]} cannot be decoded: {error}",
            hint="replace the file, or take the image out of the annotations; then run it again",
        ) from None
    out[...] = pixels[:, ::-1] if flip else pixels
