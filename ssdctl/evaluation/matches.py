"""Match detections with objects as pycocotools does, for each IoU threshold and size.

The engine matches faster, but it gives its matches as one dictionary for each image and class.
Shapes: K detections, T IoU thresholds.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.formats.coco import positions
from ssdctl.evaluation.coco_ap import IOU_THRESHOLDS, Scoring

AREAS = ((0, 1e10), (0, 32**2), (32**2, 96**2), (96**2, 1e10))  # COCO's: all, small, medium, large
MAX_DETECTIONS = 100  # per image and class
PAIRS_PER_BLOCK = 100_000
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Matches(NamedTuple):
    """The detections of one class and range of areas, by descending score."""

    images: Ints  # K: the number of each detection's image
    scores: Floats  # K
    hits: list[Ints]  # for each IoU threshold: the detections that match an object
    ignored: list[Ints]  # for each IoU threshold: the detections that do not count
    objects: Ints  # the number of each object's image


class _Boxes(NamedTuple):
    key: Ints  # class * number of images + image
    boxes: Floats  # left, top, width, height
    areas: Floats
    scores: Floats  # of objects: unused
    is_crowd: Bools  # of detections: False


class _Pairs(NamedTuple):
    """The pairs of a detection and an object of its image and class with an IoU of 0.5 or more.

    Those of a round have different images or classes, so they can be matched at once.
    """

    round: Ints
    detection: Ints
    object: Ints
    iou: Floats


def match_objects(scoring: Scoring) -> list[list[Matches]]:
    """Match the detections of scored images with their objects.

    Returns:
        For each class, for each of AREAS.
    """
    count, num_classes = len(scoring.image_ids), len(scoring.per_class)
    found, objects = _detections(scoring), _objects(scoring)
    pairs = _close_pairs(found, objects)
    by_score = np.lexsort((found.key % count, -found.scores, found.key // count))
    limits = np.arange(num_classes + 1) * count
    result: list[list[Matches]] = [[] for _ in range(num_classes)]
    for low, high in AREAS:
        is_ignored = objects.is_crowd | (objects.areas < low) | (objects.areas > high)
        match_TK = _match(pairs, len(found.key), is_ignored, objects.is_crowd)
        is_out = (found.areas < low) | (found.areas > high)
        ignored_TK = np.where(match_TK < 0, is_out, np.append(is_ignored, False)[match_TK])
        hits_TK = (match_TK >= 0) & ~ignored_TK
        counted = by_score[~ignored_TK[:, by_score].all(axis=0)]
        ends = np.searchsorted(found.key[counted] // count * count, limits)
        object_key = objects.key[~is_ignored]
        object_ends = np.searchsorted(object_key, limits)
        for k, areas in enumerate(result):
            rows = counted[ends[k] : ends[k + 1]]
            areas.append(
                Matches(
                    found.key[rows] % count,
                    found.scores[rows],
                    [np.flatnonzero(row) for row in hits_TK[:, rows]],
                    [np.flatnonzero(row) for row in ignored_TK[:, rows]],
                    object_key[object_ends[k] : object_ends[k + 1]] % count,
                )
            )
    return result


def _detections(scoring: Scoring) -> _Boxes:
    """Return the best detections of each image and class; equal scores keep their order."""
    count, table = len(scoring.image_ids), scoring.table
    numbers = positions(np.sort(scoring.truth.image_ids), scoring.image_ids)
    image, label = positions(numbers, table[:, 0].astype(np.int64)), table[:, 6].astype(np.int64)
    order = np.lexsort((-table[:, 5], image, label))
    order = order[image[order] >= 0]
    key = (label[order] - 1) * count + image[order]
    is_kept = np.arange(len(key)) - np.searchsorted(key, key) < MAX_DETECTIONS
    rows = table[order[is_kept]]
    areas, is_crowd = rows[:, 3] * rows[:, 4], np.zeros(len(rows), np.bool_)
    return _Boxes(key[is_kept], rows[:, 1:5], areas, rows[:, 5], is_crowd)


def _objects(scoring: Scoring) -> _Boxes:
    truth = scoring.truth
    image = positions(scoring.image_ids, truth.object_image_ids)
    class_ids = np.array([entry.category_id for entry in scoring.per_class], np.int64)
    label = positions(class_ids, truth.object_category_ids)
    order = np.lexsort((image, label))
    order = order[image[order] >= 0]
    key, areas = label[order] * len(scoring.image_ids) + image[order], truth.areas[order]
    return _Boxes(key, truth.boxes[order], areas, areas, truth.is_crowd[order].astype(np.bool_))


def box_pairs(
    key: Ints,
    boxes: Floats,
    object_key: Ints,
    object_boxes: Floats,
    is_crowd: Bools,
    min_iou: float,
) -> tuple[Ints, Ints, Floats]:
    """Return the pairs of a box and an object with the same key: their rows, and their IoU.

    The pairs are compared in blocks: an image in tiles has thousands of detections.
    """
    order = np.argsort(object_key, kind="stable")
    first = np.searchsorted(object_key[order], key)
    counts = np.searchsorted(object_key[order], key, side="right") - first
    block = counts.cumsum() // PAIRS_PER_BLOCK
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    for rows in np.split(np.arange(len(key)), np.flatnonzero(np.diff(block)) + 1):
        box = np.repeat(rows, counts[rows])
        ends = counts[rows].cumsum()
        within = np.arange(len(box)) - np.repeat(ends - counts[rows], counts[rows])
        item = order[first[box] + within]
        iou = _iou(boxes[box], object_boxes[item], is_crowd[item])
        close = iou >= min_iou
        parts.append((box[close], item[close], iou[close]))
    box, item, iou = (np.concatenate(column) for column in zip(*parts, strict=True))
    return box, item, iou


def _close_pairs(found: _Boxes, objects: _Boxes) -> _Pairs:
    columns = objects.key, objects.boxes, objects.is_crowd
    detection, item, iou = box_pairs(found.key, found.boxes, *columns, IOU_THRESHOLDS[0])
    used, row = np.unique(detection, return_inverse=True)
    rounds = np.arange(len(used)) - np.searchsorted(found.key[used], found.key[used])
    return _Pairs(rounds[row], detection, item, iou)


def _iou(found: Floats, objects: Floats, is_crowd: Bools) -> Floats:
    """Return the IoU of pairs of boxes; with a crowd, the share of the detection in it.

    The order of the operations is pycocotools', so that the last digits are the same.
    """
    (left, top, width, height), (x, y, w, h) = found.T, objects.T
    overlap_w = np.maximum(np.minimum(left + width, x + w) - np.maximum(left, x), 0)
    overlap_h = np.maximum(np.minimum(top + height, y + h) - np.maximum(top, y), 0)
    overlap, area = overlap_w * overlap_h, width * height
    with np.errstate(invalid="ignore", divide="ignore"):
        iou: Floats = overlap / np.where(is_crowd, area, area + w * h - overlap)
    return iou


def _match(pairs: _Pairs, count: int, is_ignored: Bools, is_crowd: Bools) -> Ints:
    """Return the object of each detection for each IoU threshold, -1 without one, T x K.

    A detection takes the object with the highest IoU that no better detection has taken. An
    ignored object is the second choice.
    """
    keys = (pairs.object, pairs.iou, ~is_ignored[pairs.object], pairs.detection, pairs.round)
    order = np.lexsort(keys)
    rounds, detection, item, iou = (column[order] for column in pairs)
    match = np.full((len(IOU_THRESHOLDS), count), -1, np.int64)
    is_taken = np.zeros((len(IOU_THRESHOLDS), len(is_ignored)), np.bool_)
    thresholds = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]
    starts = np.flatnonzero(np.diff(rounds, prepend=-1))
    for low, high in itertools.pairwise([*starts, len(rounds)]):
        place = np.arange(low, high)
        is_free = ~is_taken[:, item[place]] | is_crowd[item[place]]
        fits = (iou[place] >= thresholds) & is_free
        segments = np.flatnonzero(np.diff(detection[place], prepend=-1))
        best = np.maximum.reduceat(np.where(fits, place, -1), segments, axis=1)
        row, column = np.nonzero(best >= 0)
        chosen = best[row, column]
        match[row, detection[chosen]] = item[chosen]
        is_taken[row, item[chosen]] = True
    return match
