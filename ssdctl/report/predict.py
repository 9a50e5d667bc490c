"""Detect on a user's own pictures, and draw what was found."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ssdctl.boxes.default_boxes import IMAGE_SIZE, default_boxes_cxcywh
from ssdctl.data.coco import ClassName
from ssdctl.data.images import MOST_PIXELS
from ssdctl.device.base import Device
from ssdctl.errors import DataError, NonFiniteError
from ssdctl.model.augment import normalise
from ssdctl.model.postprocess import detect
from ssdctl.model.ssd300 import SSD300

# Okabe and Ito's palette: told apart by colour-blind eyes too.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")


class Found(NamedTuple):
    """One detection on a picture."""

    name: str
    label: int  # 1 and up
    category_id: int | None  # None where the checkpoint is a peer's
    score: float
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels, clipped

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "box": list(self.box)}


class Predictor:
    """A network with its classes, ready for pictures.

    Args:
        model: On the device.
        classes: The dataset's.
        device: Where the network is.
        score_threshold: Detections score at least this.
        nms_iou: See `ssdctl.model.postprocess.detect`.
    """

    def __init__(
        self,
        model: SSD300,
        classes: Sequence[ClassName],
        device: Device,
        *,
        score_threshold: float,
        nms_iou: float,
    ) -> None:
        self._model = model.eval()
        self._classes = classes
        self._device = device
        self._threshold = score_threshold
        self._nms_iou = nms_iou
        self._defaults = default_boxes_cxcywh().to(device.torch_device)

    def __call__(self, picture: Image.Image) -> list[Found]:
        """What is on a picture, the best first.

        Raises:
            NonFiniteError: The network's output is NaN or infinite.
        """
        size = (IMAGE_SIZE, IMAGE_SIZE)
        pixels = np.array(picture.convert("RGB").resize(size, Image.Resampling.BILINEAR))
        with torch.inference_mode():
            batch = torch.from_numpy(pixels).unsqueeze(0).to(self._device.torch_device)
            offsets, logits = self._model(normalise(batch))
            if not bool(torch.isfinite(logits).all() & torch.isfinite(offsets).all()):
                raise NonFiniteError("the network's output is NaN or infinite")
            (result,) = detect(
                offsets,
                logits,
                self._defaults,
                score_threshold=self._threshold,
                nms_iou=self._nms_iou,
            )
        scale = np.array([picture.width, picture.height] * 2)
        boxes: NDArray[np.float64] = result.boxes.cpu().numpy().clip(0, 1) * scale
        found = []
        for box, score, label in zip(
            boxes, result.scores.tolist(), result.labels.tolist(), strict=True
        ):
            entry = ClassName(None, f"class {label}")  # a peer's file may lack the names
            if self._classes:
                entry = self._classes[label - 1]
            left, top, right, bottom = (round(float(v), 2) for v in box)
            found.append(
                Found(entry.name, label, entry.id, round(score, 5), (left, top, right, bottom))
            )
        return found


def open_picture(path: Path) -> Image.Image:
    """A user's picture, upright, in RGB.

    Raises:
        DataError: It cannot be read as a picture, or is absurdly large.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Pillow warns of is refused below
            with Image.open(path) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    raise DataError(
                        f"{path}: {picture.width} x {picture.height} pixels are too many"
                    )
                upright = ImageOps.exif_transpose(picture)
                return upright.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: no readable picture ({error})") from None


def draw(picture: Image.Image, found: Sequence[Found]) -> Image.Image:
    """A copy of the picture with its boxes, names and scores."""
    result = picture.copy()
    pen = ImageDraw.Draw(result)
    size = max(12, min(picture.size) // 30)
    font = ImageFont.load_default(size)
    for item in reversed(found):  # the best on top
        colour = PALETTE[item.label % len(PALETTE)]
        pen.rectangle(item.box, outline=colour, width=max(2, size // 6))
        text = f"{item.name} {item.score:.2f}"
        left, top = item.box[0], max(item.box[1] - size - 4, 0)
        width = pen.textlength(text, font=font)
        pen.rectangle((left, top, left + width + 6, top + size + 4), fill=colour)
        pen.text((left + 3, top + 1), text, fill="black", font=font)
    return result
