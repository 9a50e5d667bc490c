"""Draw what training will see: some images with their boxes, original and augmented.

    preview(split, config, Path("preview.png"))

Each row is an image of the run's first batch: as annotated, then as the network gets it in the
first epochs, with the crops, flips and colors of the run's own random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ssdctl.boxes import IMAGE_SIZE
from ssdctl.config import Config
from ssdctl.data.dataset import WHAT_IS_DROPPED
from ssdctl.data.drawing import draw, label_font, require_drawn, save_image
from ssdctl.data.store import Split
from ssdctl.errors import DataError, UsageError
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import TrainLoader
from ssdctl.input.normalize import Normalize
from ssdctl.input.sampler import SampleStream

ROWS = 4
EPOCHS = 3
GAP = 12  # pixels between the tiles
WIDTH = GAP + (1 + EPOCHS) * (IMAGE_SIZE + GAP)  # of the drawing, in pixels
LINE = 20  # height of a line of text
SUFFIXES = (".png", ".jpg", ".jpeg")

Boxes = NDArray[Any]  # N x 4: left, top, right, bottom in fractions


def check_target(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--preview {path}: give a name that ends in {', '.join(SUFFIXES)}")
    require_drawn(path, "--preview")  # it may be an image of the dataset


def preview(split: Split, config: Config, path: Path) -> int:
    """Draw the image; return the number of images in it.

    Raises:
        DataError: There is no image to train on, or one cannot be decoded.
    """
    if not len(split.trainable):
        raise DataError("no training image has a box to draw", hint=WHAT_IS_DROPPED)
    seed = config.train.seed
    count = min(ROWS, len(split.trainable))
    rows = SampleStream(split.trainable, seed).samples(0, count)[0]
    tiles = {int(row): [_annotated(split, int(row))] for row in rows}
    for row, tile in _augmented(split, rows, config):
        tiles[row].append(tile)

    step = IMAGE_SIZE + GAP
    size = (WIDTH, LINE + GAP + count * (step + LINE))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    font = label_font(14)
    headings = ["as annotated", *(f"augmented, epoch {n + 1}" for n in range(EPOCHS))]
    for column, text in enumerate(headings):
        pen.text((GAP + column * step, GAP // 2), text, fill="black", font=font)
    for line, (row, images) in enumerate(tiles.items()):
        top = LINE + GAP + line * (step + LINE)
        width, height = split.sizes[row]
        about = f"image {split.image_ids[row]}, {width} x {height}"
        pen.text((GAP, top), about, fill="black", font=font)
        for column, image in enumerate(images):
            sheet.paste(image, (GAP + column * step, top + LINE))
    save_image(sheet, path)
    return count


def _annotated(split: Split, row: int) -> Image.Image:
    image = Image.fromarray(split.decode(row))
    image.thumbnail((IMAGE_SIZE, IMAGE_SIZE))
    bounds = slice(split.starts[row], split.starts[row + 1])
    return _draw(image, split, split.boxes[bounds], split.labels[bounds])


def _augmented(
    split: Split, rows: NDArray[np.int64], config: Config
) -> Iterator[tuple[int, Image.Image]]:
    split = split._replace(trainable=rows, background=rows[:0])
    loader = TrainLoader(
        split, LoaderConfig.of(config.train, split, batch_size=len(rows), threads=1)
    )
    color = Normalize(mean=(0, 0, 0), std=(1, 1, 1))
    for batch in loader.batches(0, EPOCHS):
        pixels = color(batch.images, batch.jitter).permute(0, 2, 3, 1)
        images = (255 * pixels).round().clamp(0, 255).to(torch.uint8).numpy()
        for slot, row in enumerate(batch.rows):
            image = Image.fromarray(images[slot])
            is_real = batch.labels[slot] > 0
            boxes, labels = batch.boxes[slot][is_real], batch.labels[slot][is_real]
            yield int(row), _draw(image, split, boxes.numpy(), labels.numpy())


def _draw(image: Image.Image, split: Split, boxes: Boxes, labels: NDArray[Any]) -> Image.Image:
    scaled = boxes * np.array([image.width - 1, image.height - 1] * 2)
    scaled[:, 2:] = np.maximum(scaled[:, :2], scaled[:, 2:])
    return draw(image, scaled, labels, [split.classes[label - 1].name for label in labels])
