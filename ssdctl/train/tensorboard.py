"""TensorBoard: the figures of metrics.jsonl, and validation pictures with their boxes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssdctl.data.store import Split
from ssdctl.errors import UsageError
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.runs.evaluation import SHOWN_SCORE

NUM_PICTURES = 4
SCALARS = ("loss", "loss_box", "loss_class", "lr", "images_per_second", "grad_norm", "data_wait")


class TensorBoard:
    """Writes RUN/tensorboard.

    Args:
        folder: Where to.
        start_step: What a killed run wrote beyond this step is hidden: it will come again.

    Raises:
        UsageError: The package is not installed.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "--tensorboard needs a package that is not installed",
                hint="pip install 'ssdctl[tensorboard]'",
            ) from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """One record of metrics.jsonl."""
        step = record["step"]
        if record["kind"] == "train":
            for name in SCALARS:
                self._writer.add_scalar(f"train/{name}", record[name], step)
        elif record["kind"] == "eval":
            for name, value in record.items():
                if name not in ("kind", "step", "epoch"):
                    self._writer.add_scalar(f"eval/{name}", value, step)
            self._writer.flush()

    def pictures(self, split: Split, found: Detections, step: int) -> None:
        """The first pictures with what was found on them."""
        names = {c.id: c.name for c in split.classes}
        for row in np.nonzero(split.usable)[0][:NUM_PICTURES]:
            with Image.open(io.BytesIO(split.read(int(row)))) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            is_shown = (found.image_ids == split.image_ids[row]) & (found.scores >= SHOWN_SCORE)
            boxes = found.boxes[is_shown]
            labels = [
                f"{names[c]} {s:.2f}"
                for c, s in zip(
                    found.category_ids[is_shown].tolist(),
                    found.scores[is_shown].tolist(),
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
