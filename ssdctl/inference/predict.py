"""Detect objects on pictures: the result of `ssdctl.load`, and the work of `ssdctl predict`.

predictor = ssdctl.load("ckpt.pt")
for found in predictor.predict("street.jpg"):
    found.name, found.score, found.box
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.checkpoint.reader import load_network, read_checkpoint
from ssdctl.data.coco_classes import UNUSED
from ssdctl.data.formats.coco import ClassName
from ssdctl.data.image_decode import Picture, read_rgb
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.errors import DataError
from ssdctl.inference.detector import Detector
from ssdctl.inference.drawing import BoxLabel, one_line
from ssdctl.inference.model_source import locate_checkpoint
from ssdctl.model import postprocess
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.map_ahead import map_ahead


class Detection(NamedTuple):
    """One detection on a picture."""

    name: str
    label: int  # 1 and up
    category_id: int | None  # None for third-party checkpoints
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels, clipped

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "box": list(self.box)}

    def as_box_label(self) -> BoxLabel:
        """Return it as `ssdctl.inference.drawing.draw` takes it."""
        return BoxLabel(self.box, f"{one_line(self.name)} {self.score:.2f}", self.label)


class Predictor:
    """Detect objects on pictures with a network. Created by `ssdctl.load`.

    Args:
        model: On the device.
        classes: The dataset's; empty if a third-party file does not name them.
        device: Where the network is.
        score: Detections score more than this.
        nms_iou: A box that overlaps one of its class with a higher score by more is dropped.
        precision: `fp32` or another that the device computes in.
    """

    def __init__(
        self,
        model: SSD300,
        classes: Sequence[ClassName],
        device: Device,
        *,
        score: float = 0.3,
        nms_iou: float | None = None,
        precision: str = "fp32",
    ) -> None:
        self._classes = list(classes) or [
            ClassName(None, f"class {label}") for label in range(1, model.num_classes)
        ]
        self._detector = Detector(
            model.eval(), device, precision=precision, score_threshold=score, nms_iou=nms_iou
        )

    @property
    def class_names(self) -> list[str]:
        """The names of the classes."""
        return [c.name for c in self._classes]

    def predict(self, picture: Picture) -> list[Detection]:
        """Return the objects on a picture, the highest score first.

        Args:
            picture: A path, encoded bytes, a binary file object, a Pillow image, or RGB pixels as
                an array or tensor; see `ssdctl.data.image_decode.read_rgb`.

        Raises:
            DataError: It is not a readable picture.
            NonFiniteError: The network's output is NaN or infinite.
        """
        return self.predict_many([picture])[0]

    def predict_many(self, pictures: Sequence[Picture]) -> list[list[Detection]]:
        """Return the objects on several pictures, from one pass through the network."""
        opened = [open_picture(picture) for picture in pictures]
        if not opened:
            return []
        pixels = torch.from_numpy(np.stack([resized(image) for image in opened]))
        return [
            self._found(image, result)
            for image, result in zip(opened, self._detector(pixels), strict=True)
        ]

    def _found(self, image: Image.Image, result: postprocess.ImageDetections) -> list[Detection]:
        scale = np.array([image.width, image.height] * 2)
        boxes: NDArray[np.float64] = result.boxes.cpu().numpy().clip(0, 1) * scale
        found = []
        for box, score, label in zip(
            boxes, result.scores.tolist(), result.labels.tolist(), strict=True
        ):
            entry = self._classes[label - 1]
            if entry.name == UNUSED:
                continue
            left, top, right, bottom = (round(float(v), 2) for v in box)
            found.append(
                Detection(entry.name, label, entry.id, round(score, 5), (left, top, right, bottom))
            )
        return found


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str = "auto",
    score: float = 0.3,
    nms_iou: float | None = None,
    precision: str = "fp32",
) -> Predictor:
    """See `ssdctl.load`."""
    opened = open_device(device)
    read = read_checkpoint(locate_checkpoint(checkpoint))
    return Predictor(
        opened.place(load_network(read)),
        read.classes,
        opened,
        score=score,
        nms_iou=nms_iou,
        precision=precision,
    )


class Prediction(NamedTuple):
    """The result of one file."""

    path: Path
    image: Image.Image | None  # upright, RGB; None if it is not a readable picture
    found: list[Detection]
    error: DataError | None


def predict_files(
    predictor: Predictor, files: Iterable[Path], *, batch_size: int, threads: int
) -> Iterator[Prediction]:
    """Detect on many files, in their order; an unreadable one gives a result with an error.

    Threads open the pictures of the next batches.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="open") as pool:
        opened = _ahead(pool, files, 2 * batch_size)
        while batch := list(itertools.islice(opened, batch_size)):
            good = [image for _, image in batch if isinstance(image, Image.Image)]
            detections = iter(predictor.predict_many(good))
            for path, image in batch:
                if isinstance(image, DataError):
                    yield Prediction(path, None, [], image)
                else:
                    yield Prediction(path, image, next(detections), None)


def _ahead(
    pool: ThreadPoolExecutor, files: Iterable[Path], count: int
) -> Iterator[tuple[Path, Image.Image | DataError]]:
    return map_ahead(pool, lambda path: (path, _open_or_error(path)), files, count)


def _open_or_error(path: Path) -> Image.Image | DataError:
    try:
        return open_picture(path)
    except DataError as error:
        return error


def open_picture(picture: Picture) -> Image.Image:
    """Open a user's picture of any kind, upright, in RGB.

    Raises:
        DataError: It cannot be read as a picture, or is too large.
        UsageError: It is not a picture, or pixels of an unsupported shape or type.
    """
    return Image.fromarray(read_rgb(picture))


def resized(image: Image.Image) -> NDArray[np.uint8]:
    """Resize as evaluation does: Pillow's antialiased bilinear filter, in uint8."""
    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
