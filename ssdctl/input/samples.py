"""Draw the samples of a micro-batch before any pixel is read: images, crops, flips, colours.

All of it is a function of (seed, position in the stream). Shapes: B batch, G boxes (padded).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.config import Config
from ssdctl.data.store import Split
from ssdctl.input.counter_rng import uniform
from ssdctl.input.crop import Crops, Floats, flip_boxes, sample_crops, whole_images
from ssdctl.input.sample_stream import Sample, SampleStream

FLIP_STREAM = 3
COLOUR_STREAM = 4
ZOOM_STREAM = 5
MAX_ZOOM = 4.0  # sides of the canvas, in sides of the picture


class LoaderConfig(NamedTuple):
    """Which part of the stream a rank loads, and how."""

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
    zoom_out: bool = False  # place half of the pictures on a larger canvas before the crop

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size * self.accumulate

    def positions(self, start_step: int, end_step: int) -> range:
        """Return the position in the stream at which each micro-batch of this rank begins.

        Steps count from `first_sample`; each has `accumulate` micro-batches.
        """
        stride = self.batch_size * self.world_size
        first = self.first_sample + self.rank * self.batch_size
        start, end = (first + step * self.accumulate * stride for step in (start_step, end_step))
        return range(start, end, stride)


def single_process_config(
    split: Split, config: Config, *, batch_size: int, threads: int
) -> LoaderConfig:
    """Return the loader config of a process that trains without other ranks."""
    return LoaderConfig(
        seed=config.train.seed,
        first_sample=0,
        batch_size=batch_size,
        rank=0,
        world_size=1,
        accumulate=1,
        augment=config.train.augment != "none",
        zoom_out=config.train.augment == "ssd-zoom",
        hue_degrees=config.train.hue_degrees,
        threads=threads,
        max_boxes=max(split.most_boxes, 1),
    )


class Samples(NamedTuple):
    """A micro-batch without its pixels."""

    positions: NDArray[np.int64]  # B, in the stream
    rows: NDArray[np.int64]  # B, which images
    crops: Crops
    flip: NDArray[np.bool_]  # B
    jitter: NDArray[np.float32] | None  # B x 4: see ssdctl.model.augment.normalise
    is_whole: bool  # without crops: the pictures are resized exactly as by Pillow


def draw_samples(
    split: Split, stream: SampleStream, config: LoaderConfig, start: int, count: int
) -> Samples:
    """Draw the stream's samples start to start + count: all but their pixels."""
    sample = stream.samples(start, count)
    positions = np.arange(start, start + count)
    # Only as wide as these images need, because the crops cost as much for padding as for boxes.
    most = max(int((split.starts[sample.row + 1] - split.starts[sample.row]).max()), 1)
    boxes, labels = padded_boxes(split, sample.row, min(most, config.max_boxes))
    if not config.augment:
        return _whole(positions, sample.row, _pad_to_max_boxes(whole_images(boxes, labels), config))
    sizes = split.pixel_sizes[sample.row]
    if config.zoom_out:
        crops = _zoomed_out_crops(config.seed, sample, boxes, labels, sizes)
    else:
        crops = sample_crops(config.seed, sample.epoch, sample.row, boxes, labels, sizes)
    flip = uniform(FLIP_STREAM, config.seed, sample.epoch, sample.row) < 0.5
    mirrored = flip_boxes(crops.boxes, crops.labels)
    crops = crops._replace(boxes=np.where(flip[:, None, None], mirrored, crops.boxes))
    crops = _pad_to_max_boxes(crops, config)
    keys = (COLOUR_STREAM, config.seed, sample.epoch[:, None], sample.row[:, None], np.arange(4))
    jitter = colour_jitter(uniform(*keys), config.hue_degrees)
    return Samples(positions, sample.row, crops, flip, jitter, is_whole=False)


def _pad_to_max_boxes(crops: Crops, config: LoaderConfig) -> Crops:
    """Return the crops with the boxes padded to `max_boxes`."""
    padding = ((0, 0), (0, config.max_boxes - crops.labels.shape[1]))
    boxes, labels = np.pad(crops.boxes, (*padding, (0, 0))), np.pad(crops.labels, padding)
    return crops._replace(boxes=boxes, labels=labels)


def _zoomed_out_crops(
    seed: int,
    sample: Sample,
    boxes: Floats,
    labels: NDArray[np.int64],
    sizes: NDArray[np.int32],
) -> Crops:
    """Draw crops of pictures that are placed on a larger canvas, half of them (SSD paper, 3.6).

    The rectangles are in fractions of the picture and may leave it; the rest is filled.
    """
    draw = uniform(ZOOM_STREAM, seed, sample.epoch[:, None], sample.row[:, None], np.arange(4))
    scale = np.where(draw[:, 0] < 0.5, 1 + (MAX_ZOOM - 1) * draw[:, 1], 1.0)[:, None]
    canvas = np.rint(sizes * scale)
    scale = canvas / sizes  # of whole pixels, both sides
    offset = np.floor(draw[:, 2:] * (canvas - sizes)) / sizes
    shift, factor = np.tile(offset, 2)[:, None], np.tile(scale, 2)[:, None]
    placed = np.where(labels[..., None] > 0, (boxes + shift) / factor, 0.0)
    crops = sample_crops(seed, sample.epoch, sample.row, placed, labels, canvas.astype(np.int32))
    rect = crops.rect * np.tile(scale, 2) - np.tile(offset, 2)
    return crops._replace(rect=rect)


def whole_samples(split: Split, rows: NDArray[np.int64], max_boxes: int = 1) -> Samples:
    """Return whole pictures, for evaluation, with at most `max_boxes` boxes each."""
    boxes, labels = padded_boxes(split, rows, max_boxes)
    return _whole(rows, rows, whole_images(boxes, labels))


def colour_jitter(draw: Floats, hue_degrees: float) -> NDArray[np.float32]:
    """(B, 4) uniform numbers -> brightness .875 to 1.125, contrast and saturation .5 to 1.5, hue
    in radians."""
    spread = np.array([0.125, 0.5, 0.5, math.radians(hue_degrees)])
    return (np.array([1.0, 1.0, 1.0, 0.0]) + spread * (2 * draw - 1)).astype(np.float32)


def padded_boxes(
    split: Split, rows: NDArray[np.int64], max_boxes: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the boxes (B, G, 4) and labels (B, G) of images, zero-padded or cut to `max_boxes`."""
    boxes = np.zeros((len(rows), max_boxes, 4))
    labels = np.zeros((len(rows), max_boxes), np.int64)
    for i, row in enumerate(rows):
        start = split.starts[row]
        end = min(split.starts[row + 1], start + max_boxes)
        boxes[i, : end - start] = split.boxes[start:end]
        labels[i, : end - start] = split.labels[start:end]
    return boxes, labels


def _whole(positions: NDArray[np.int64], rows: NDArray[np.int64], crops: Crops) -> Samples:
    return Samples(positions, rows, crops, np.zeros(len(rows), np.bool_), None, is_whole=True)
