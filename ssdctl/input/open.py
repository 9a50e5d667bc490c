"""Open the input of a rank, copy its batches to the device one step ahead, or make random ones."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ssdctl.boxes import IMAGE_SIZE
from ssdctl.data.annotations import ClassName
from ssdctl.data.coco_json import COCO_NUM_CLASSES, COCO_NUM_IMAGES
from ssdctl.data.store import ImageFiles, Split
from ssdctl.device import Decoder, Device, pageable_buffer
from ssdctl.errors import UsageError
from ssdctl.input import augmentations
from ssdctl.input.batch import Batch, LoaderConfig, trim_padding
from ssdctl.input.loader import Buffer, TrainLoader
from ssdctl.runtime.packages import dali_package

if TYPE_CHECKING:
    from ssdctl.input.dali import DaliLoader

COCO_MOST_BOXES = 93  # on one image
COCO_MEAN_BOXES = 7
NUM_BATCHES = 2  # generated, and repeated


def copy_ahead(batches: Iterable[Batch], device: Device) -> Generator[Batch, None, None]:
    """Copy batches to the device, each while the device works on the previous one."""
    if device.is_host:
        yield from map(trim_padding, batches) if device.execution == "eager" else batches
        return
    waiting: Batch | None = None
    for batch in batches:
        device.wait_for_copies()  # for the waiting batch
        is_on_device = batch.images.device.type != "cpu"  # decoded there
        copied = batch._replace(
            images=batch.images if is_on_device else device.copy(batch.images),
            boxes=device.copy(batch.boxes),
            labels=device.copy(batch.labels),
            jitter=None if batch.jitter is None else device.copy(batch.jitter),
        )
        if waiting is not None:
            yield waiting
        waiting = copied
        device.wait_for_reads()  # the next batch may be decoded into the same memory
    if waiting is not None:
        device.wait_for_copies()
        yield waiting


def check_pipeline(pipeline: str, augment: str) -> None:
    """Raise UsageError if a pipeline is not installed, or an augmentation does not work with it."""
    steps = augmentations.load(augment)
    if pipeline != "dali":
        return
    if any(step.pixels for step in steps):
        raise UsageError(
            f"--augment {augment}: a plugin that changes pixels needs --pipeline native"
        )
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--pipeline dali: nvidia-dali cannot be imported ({error})",
            hint=f"pip install {dali_package()}, or leave --pipeline at native",
        ) from None


def open_input(
    pipeline: str,
    split: Split,
    config: LoaderConfig,
    *,
    fake: bool = False,
    decoder: Decoder | None = None,
    buffer: Buffer = pageable_buffer,
) -> TrainLoader | FakeLoader | DaliLoader:
    """Return the input of one rank.

    Args:
        pipeline: `native` or `dali`.
        fake: Random batches instead; no image is read.
        decoder: The device on which DALI decodes; None: the host.
        buffer: Allocates the pixels of a batch: `Device.host_buffer`.
    """
    if fake:
        return FakeLoader(split, config)
    check_pipeline(pipeline, config.augment)
    if pipeline == "dali":
        from ssdctl.input.dali import DaliLoader

        return DaliLoader(split, config, decoder)
    return TrainLoader(split, config, buffer)


def random_batch(
    batch_size: int, num_classes: int, max_boxes: int = COCO_MOST_BOXES, *, seed: int = 0
) -> Batch:
    """Return noise with as many boxes as an image of COCO has: as expensive as a real batch.

    Labels are below `num_classes`; `max_boxes` includes padding.
    """
    generator = torch.Generator().manual_seed(seed)
    low = 0.6 * torch.rand(batch_size, max_boxes, 2, generator=generator)
    size = 0.05 + 0.35 * torch.rand(batch_size, max_boxes, 2, generator=generator)
    labels = torch.randint(1, num_classes, (batch_size, max_boxes), generator=generator)
    labels[:, COCO_MEAN_BOXES:] = 0
    shape = (batch_size, IMAGE_SIZE, IMAGE_SIZE, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    jitter = torch.tensor([1.0, 1.0, 1.0, 0.1]).repeat(batch_size, 1)
    rows = np.zeros(batch_size, np.int64)
    return Batch(pixels, torch.cat([low, low + size], dim=-1), labels, jitter, rows)


class FakeLoader:
    """Endless random batches of one rank, the same ones each time for the same seed and rank."""

    def __init__(self, split: Split, config: LoaderConfig) -> None:
        self._split = split
        self._config = config

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        config, rows = self._config, self._split.trainable
        batches = []
        for number in range(NUM_BATCHES):
            seed = (config.seed * 997 + config.rank) * 31 + number
            num_classes = len(self._split.classes) + 1
            batch = random_batch(config.batch_size, num_classes, config.max_boxes, seed=seed)
            batch = batch._replace(rows=rows[np.arange(config.batch_size) % len(rows)])
            batches.append(batch._replace(jitter=None) if config.augment == "none" else batch)
        numbers = range(start_step * config.accumulate, end_step * config.accumulate)
        return (batches[number % NUM_BATCHES] for number in numbers)


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
        background=rows[:0],
        most_boxes=COCO_MOST_BOXES,
        images=ImageFiles(Path(), []),
        index_file=Path(),
    )
