"""A grid of validation pictures: what is there (white), what was found (coloured)."""

from __future__ import annotations

import base64
import io
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ssdctl.data.dataset import find_splits
from ssdctl.data.store import Split, open_split
from ssdctl.device import open_device
from ssdctl.errors import SsdctlError
from ssdctl.evaluate.checkpoint import data_of
from ssdctl.model.weights import load_network, read_checkpoint
from ssdctl.report.predict import Predictor, draw
from ssdctl.report.rundata import RunData

NUM_SAMPLES = 12
SCORE = 0.3
WIDTH = 360  # pixels, as embedded


class Sample(NamedTuple):
    """One picture of the grid."""

    image_id: int
    data_url: str
    num_truth: int
    num_found: int


def sample_detections(run: RunData) -> tuple[list[Sample], str]:
    """The run's best checkpoint on some validation pictures, or why there are none."""
    if run.checkpoint is None:
        return [], "the run has no checkpoint yet"
    try:
        checkpoint = read_checkpoint(run.checkpoint)
        root, folder = data_of(checkpoint)
        splits = find_splits(root)
        if "val" not in splits:
            return [], f"{root} has no validation split"
        split = open_split(folder, "val", splits["val"])
        device = open_device("cpu")
        predictor = Predictor(
            device.place(load_network(checkpoint)),
            checkpoint.classes,
            device,
            score_threshold=SCORE,
            nms_iou=0.5,
        )
        rows = np.nonzero(split.usable)[0]
        if not len(rows):
            return [], f"{root} has no validation image that opens"
        chosen = np.unique(np.linspace(0, len(rows) - 1, NUM_SAMPLES).astype(int))
        return [_sample(split, int(row), predictor) for row in rows[chosen]], ""
    except (SsdctlError, OSError) as error:
        return [], str(error)


def _sample(split: Split, row: int, predictor: Predictor) -> Sample:
    with Image.open(io.BytesIO(split.read(row))) as opened:
        picture = opened.convert("RGB")
    found = predictor(picture)
    pen = ImageDraw.Draw(picture)
    truth = split.boxes[split.starts[row] : split.starts[row + 1]]
    for box in truth * np.array([picture.width, picture.height] * 2):
        pen.rectangle([float(v) for v in box], outline="white", width=3)
    drawn = draw(picture, found)
    drawn.thumbnail((WIDTH, WIDTH))
    buffer = io.BytesIO()
    drawn.save(buffer, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Sample(int(split.image_ids[row]), url, len(truth), len(found))
