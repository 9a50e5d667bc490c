"""TensorBoard: the metrics of metrics.jsonl, and validation images with detections."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssdctl.data.store import Split
from ssdctl.errors import missing_package
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.runs.evaluation import SHOWN_SCORE

NUM_IMAGES = 4
SCALARS = ("loss", "loss_box", "loss_class", "lr", "images_per_second", "grad_norm", "data_wait")


class TensorBoard:
    """Writes RUN/tensorboard.

    Args:
        folder: Where to write.
        start_step: Later steps of a killed run are hidden: they are trained again.

    Raises:
        UsageError: The package is not installed.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record of metrics.jsonl."""
        step = record["step"]
        if record["kind"] == "train":
            for name in SCALARS:
                self._writer.add_scalar(f"train/{name}", record[name], step)
        elif record["kind"] == "eval":
            for name, value in record.items():
                if name not in ("kind", "step", "epoch"):
                    self._writer.add_scalar(f"eval/{name}", value, step)
            self._writer.flush()

    def images(self, split: Split, detections: Detections, step: int) -> None:
        """Add the first images with their detections."""
        names = {c.id: c.name for c in split.classes}
        for row in np.nonzero(split.usable)[0][:NUM_IMAGES]:
            with Image.open(io.BytesIO(split.read(int(row)))) as image:
                pixels = np.asarray(image.convert("RGB"))
            is_shown = (detections.image_ids == split.image_ids[row]) & (
                detections.scores >= SHOWN_SCORE
            )
            boxes = detections.boxes[is_shown]
            labels = [
                f"{names[c]} {s:.2f}"
                for c, s in zip(
                    detections.category_ids[is_shown].tolist(),
                    detections.scores[is_shown].tolist(),
                    strict=True,
                )
            ]
            self._writer.add_image_with_boxes(
                f"pictures/{split.image_ids[row]}",
                pixels,
                np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1),
                step,
                dataformats="HWC",
                labels=labels,
            )

    def close(self) -> None:
        self._writer.close()
