"""Draw the detections on the first validation images, for trackers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data.store import Split
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.inference.drawing import BoxLabel, draw
from ssdctl.runs.evaluation import SHOWN_SCORE

NUM_IMAGES = 4


def draw_first_images(split: Split, detections: Detections) -> dict[str, NDArray[np.uint8]]:
    """Return the first images with their detections, (H, W, 3), by image id."""
    names = {c.id: c.name for c in split.classes}
    numbers = {c.id: number for number, c in enumerate(split.classes, 1)}
    pictures = {}
    for row in np.nonzero(split.usable)[0][:NUM_IMAGES].tolist():
        picture = Image.fromarray(split.decode(row))
        scale = picture.width / split.sizes[row][0]  # below 1 in a store of smaller images
        is_shown = (detections.image_ids == split.image_ids[row]) & (
            detections.scores >= SHOWN_SCORE
        )
        labels = [
            BoxLabel((left, top, left + width, top + height), names[c], numbers[c], s)
            for (left, top, width, height), c, s in zip(
                (scale * detections.boxes[is_shown]).tolist(),
                detections.category_ids[is_shown].tolist(),
                detections.scores[is_shown].tolist(),
                strict=True,
            )
        ]
        pictures[str(split.image_ids[row])] = np.asarray(draw(picture, labels))
    return pictures
