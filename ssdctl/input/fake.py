"""Random batches of the right shapes, generated once: to measure a device without its input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.data.classes import ClassName
from ssdctl.data.dataset import COCO_NUM_CLASSES, COCO_NUM_IMAGES
from ssdctl.data.store import ImageFiles, Split
from ssdctl.input.loader import Batch
from ssdctl.input.samples import LoaderConfig, colour_jitter

COCO_MOST_BOXES = 93  # on one image
NUM_BATCHES = 2  # generated, and repeated
REAL_BOXES = 7  # on each image, as on COCO's on average


class FakeLoader:
    """Endless random batches of one rank, the same ones each time for the same seed and rank."""

    def __init__(self, split: Split, config: LoaderConfig) -> None:
        self._split = split
        self._config = config

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yield the micro-batches of steps start to end, `accumulate` for each step."""
        batches = [self._make(number) for number in range(NUM_BATCHES)]
        parts = range(start_step * self._config.accumulate, end_step * self._config.accumulate)
        return (batches[part % NUM_BATCHES] for part in parts)

    def _make(self, number: int) -> Batch:
        config = self._config
        size, num_boxes = config.batch_size, config.max_boxes
        random = torch.Generator().manual_seed((config.seed * 997 + config.rank) * 31 + number)
        shape = (size, IMAGE_SIZE, IMAGE_SIZE, 3)
        sides = 0.1 + 0.4 * torch.rand(size, num_boxes, 2, generator=random)
        low = torch.rand(size, num_boxes, 2, generator=random) * (1 - sides)
        classes = len(self._split.classes)
        labels = torch.randint(1, classes + 1, (size, num_boxes), generator=random)
        labels[:, REAL_BOXES:] = 0
        boxes = torch.cat([low, low + sides], dim=-1) * (labels > 0).unsqueeze(-1)
        draw = torch.rand(size, 4, generator=random)
        jitter = torch.from_numpy(colour_jitter(draw.numpy(), config.hue_degrees))
        return Batch(
            images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=random),
            boxes=boxes,
            labels=labels,
            jitter=jitter if config.augment else None,
            rows=self._split.trainable[np.arange(size) % len(self._split.trainable)],
        )


def fake_split() -> Split:
    """Return a training split of COCO's size without images, for runs without a dataset."""
    rows = np.arange(COCO_NUM_IMAGES)
    sizes = np.full((COCO_NUM_IMAGES, 2), IMAGE_SIZE, np.int32)
    return Split(
        classes=[ClassName(id=i, name=f"class {i}") for i in range(1, COCO_NUM_CLASSES + 1)],
        image_ids=rows,
        sizes=sizes,
        pixel_sizes=sizes,
        starts=np.zeros(COCO_NUM_IMAGES + 1, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        labels=np.zeros(0, np.int32),
        usable=np.ones(COCO_NUM_IMAGES, np.bool_),
        trainable=rows,
        most_boxes=COCO_MOST_BOXES,
        images=ImageFiles(Path(), []),
        annotations=Path(),
    )
