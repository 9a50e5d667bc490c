"""Generate annotations and detections of COCO's size, to measure scoring. Torch-free."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ssdctl.evaluation.coco_ap import Detections

WIDTH, HEIGHT = 640, 480
# val2017: 5,000 images, 36,781 boxes of 80 classes; an SSD300 gives about 111 detections per image.
NUM_IMAGES, NUM_BOXES, NUM_CLASSES, NUM_DETECTIONS = 5000, 36_781, 80, 554_000


def make_split(
    path: Path,
    *,
    num_images: int = NUM_IMAGES,
    num_boxes: int = NUM_BOXES,
    num_detections: int = NUM_DETECTIONS,
    seed: int = 0,
) -> Detections:
    """Write annotations to `path` and return detections of them.

    A third of the detections are near an object, at different distances, most of them of its class;
    the others are anywhere, with low scores, like a detector's.
    """
    rng = np.random.default_rng(seed)

    def boxes(count: int) -> np.ndarray:
        size = np.exp(rng.uniform(np.log(8), np.log(400), (count, 2)))
        size = np.minimum(size, [WIDTH, HEIGHT])
        place = rng.uniform(0, 1, (count, 2)) * ([WIDTH, HEIGHT] - size)
        return np.concatenate([place, size], axis=1).round(2)

    image_ids = rng.integers(0, num_images, num_boxes)
    category_ids = rng.integers(1, NUM_CLASSES + 1, num_boxes)
    truth = boxes(num_boxes)
    rows = zip(image_ids.tolist(), category_ids.tolist(), truth.tolist(), strict=True)
    content = {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT}
            for i in range(num_images)
        ],
        "annotations": [
            {"id": n, "image_id": i, "category_id": c, "bbox": b, "area": b[2] * b[3],
             "iscrowd": int(n % 100 == 0)}
            for n, (i, c, b) in enumerate(rows, 1)
        ],
        "categories": [{"id": c, "name": f"class {c}"} for c in range(1, NUM_CLASSES + 1)],
    }  # fmt: skip
    path.write_bytes(msgspec.json.encode(content))

    num_near = num_detections // 3
    source = rng.integers(0, num_boxes, num_near)
    spread = rng.choice([0.05, 0.15, 0.4], num_near)
    near = truth[source] + rng.normal(0, 1, (num_near, 4)) * (
        truth[source][:, [2, 3, 2, 3]] * spread[:, None]
    )
    near[:, 2:] = np.maximum(near[:, 2:], 1)
    is_right = rng.random(num_near) < 0.7
    wrong = rng.integers(1, NUM_CLASSES + 1, num_near)
    num_far = num_detections - num_near
    ids = np.concatenate([image_ids[source], rng.integers(0, num_images, num_far)])
    order = np.argsort(ids, kind="stable")
    return Detections(
        ids[order].astype(np.int64),
        np.concatenate([near.round(2), boxes(num_far)])[order],
        np.concatenate([rng.beta(1, 2, num_near), rng.beta(0.5, 8, num_far)])[order] * 0.95 + 0.05,
        np.concatenate([np.where(is_right, category_ids[source], wrong),
                        rng.integers(1, NUM_CLASSES + 1, num_far)])[order].astype(np.int64),
    )  # fmt: skip
