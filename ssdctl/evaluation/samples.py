"""Choose images that show what a detector gets wrong, and random ones. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssdctl.evaluation.coco_ap import Detections
from ssdctl.evaluation.ground_truth import GroundTruth
from ssdctl.runs.evaluation import (
    SAMPLE_SCORE,
    SHOWN_SCORE,
    Box,
    DetectedBox,
    GroundTruthBox,
    SampleImage,
)

NUM_SAMPLES = 12  # of the worst images, and of random ones
SEED = 0  # of the random ones
MAX_SAMPLE_BOXES = 100  # of one image
IOU_FOUND = 0.5


def choose_samples(
    truth: GroundTruth, image_ids: NDArray[np.int64], detections: Detections
) -> list[SampleImage]:
    """Return the images with the worst F1, then random ones among the others.

    Args:
        truth: The annotations.
        image_ids: The images to choose from, ascending.
        detections: The detections on them.
    """
    f1, errors = _image_errors(truth, image_ids, detections)
    order = np.lexsort((-errors, f1))[:NUM_SAMPLES]
    worst = order[errors[order] > 0]
    others = np.setdiff1d(np.arange(len(image_ids)), worst)
    count = min(NUM_SAMPLES, len(others))
    random = np.sort(np.random.default_rng(SEED).choice(others, count, replace=False))
    return [
        _sample(truth, detections, int(image_ids[place]), is_worst)
        for is_worst, places in ((True, worst), (False, random))
        for place in places
    ]


def _image_errors(
    truth: GroundTruth, image_ids: NDArray[np.int64], detections: Detections
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the F1 and the number of errors of N images, at IoU 0.5 and the score shown.

    As COCO does, the detections with the highest scores choose first among the objects of their
    class. Crowds, and the detections in them, do not count.
    """
    boxes = truth.boxes
    shown = np.flatnonzero(
        (detections.scores >= SHOWN_SCORE) & np.isin(detections.image_ids, image_ids)
    )
    shown = shown[np.argsort(-detections.scores[shown], kind="stable")]
    objects = np.flatnonzero(np.isin(boxes.image_ids, image_ids))
    image_of_object = np.searchsorted(image_ids, boxes.image_ids[objects])
    image_of_detection = np.searchsorted(image_ids, detections.image_ids[shown])

    # Number the pairs of an image and a class, so that those of a detection are one range.
    classes = np.unique(
        np.concatenate([boxes.category_ids[objects], detections.category_ids[shown]])
    )
    group = image_of_object * len(classes) + np.searchsorted(classes, boxes.category_ids[objects])
    order = np.argsort(group, kind="stable")
    objects, image_of_object, group = objects[order], image_of_object[order], group[order]
    wanted = image_of_detection * len(classes) + np.searchsorted(
        classes, detections.category_ids[shown]
    )
    first = np.searchsorted(group, wanted, side="left")
    counts = np.searchsorted(group, wanted, side="right") - first
    pair_detection = np.repeat(np.arange(len(shown)), counts)
    ends = np.cumsum(counts)
    pair_object = np.arange(counts.sum()) - np.repeat(ends - counts - first, counts)

    is_crowd = boxes.is_crowd[objects]
    iou = _iou(
        detections.boxes[shown[pair_detection]],
        boxes.bbox[objects[pair_object]],
        is_crowd[pair_object],
    )
    close = np.flatnonzero(iou >= IOU_FOUND)
    close = close[np.lexsort((-iou[close], is_crowd[pair_object[close]], pair_detection[close]))]
    is_found = np.zeros(len(objects), np.bool_)
    is_right, is_ignored = np.zeros((2, len(shown)), np.bool_)
    for d, o in zip(pair_detection[close].tolist(), pair_object[close].tolist(), strict=True):
        if is_right[d]:
            continue
        if is_crowd[o]:
            is_ignored[d] = True
        elif not is_found[o]:
            is_found[o] = is_right[d] = True
    is_wrong = ~is_right & ~is_ignored

    def per_image(images: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(images, minlength=len(image_ids))

    errors = per_image(image_of_detection[is_wrong])
    errors = errors + per_image(image_of_object[~is_found & ~is_crowd])
    hits = per_image(image_of_detection[is_right])
    f1 = np.where(errors > 0, 2 * hits / np.maximum(2 * hits + errors, 1), 1)
    return f1, errors


def _iou(
    detected: NDArray[np.float64], objects: NDArray[np.float64], is_crowd: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the IoU of P pairs of boxes; with a crowd, the share of the detection in it."""
    low = np.maximum(detected[:, :2], objects[:, :2])
    high = np.minimum(detected[:, :2] + detected[:, 2:], objects[:, :2] + objects[:, 2:])
    common = np.maximum(high - low, 0).prod(axis=1)
    area = detected[:, 2:].prod(axis=1)
    union = area + np.where(is_crowd, 0, objects[:, 2:].prod(axis=1) - common)
    return common / np.maximum(union, 1e-12)


def _sample(
    truth: GroundTruth, detections: Detections, image_id: int, is_worst: bool
) -> SampleImage:
    is_shown = (detections.image_ids == image_id) & (detections.scores >= SAMPLE_SCORE)
    detected = [
        DetectedBox(c, _box(b), round(s, 4))
        for c, b, s in zip(
            detections.category_ids[is_shown].tolist(),
            detections.boxes[is_shown].tolist(),
            detections.scores[is_shown].tolist(),
            strict=True,
        )
    ]
    row = int(np.flatnonzero(truth.image_ids == image_id)[0])
    boxes = truth.boxes
    objects = [
        GroundTruthBox(int(boxes.category_ids[m]), _box(boxes.bbox[m]), bool(boxes.is_crowd[m]))
        for m in np.flatnonzero(boxes.image_ids == image_id)
    ]
    detected.sort(key=lambda d: -d.score)
    found = detected[:MAX_SAMPLE_BOXES]
    return SampleImage(image_id, truth.file_names[row], objects, found, is_worst)


def _box(values: Sequence[float] | NDArray[np.float64]) -> Box:
    left, top, width, height = (round(float(v), 2) for v in values)
    return left, top, width, height
