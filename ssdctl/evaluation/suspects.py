"""Rank the objects whose labels look wrong, by the detections of one checkpoint or several.

Three kinds: a confident detection where no box is, an object that no checkpoint detects, and an
object that every checkpoint detects as another class.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations
from ssdctl.data.formats.coco import positions
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.evaluation.matches import Floats, Ints, box_pairs
from ssdctl.files import write_text
from ssdctl.runs.evaluation import Suspect

SAME_PLACE = 0.5  # IoU of a detection and the object that it finds
NEAR_OBJECT = 0.3  # IoU; a detection that is nearer to an object is not of a missing one
MIN_SCORE = 0.3  # of a detection where no box is
MIN_SUSPICION = 0.1
COLUMNS = ("rank", "suspicion", "kind", "file", "image_id", "left", "top", "width", "height",
           "label", "detected", "score")  # fmt: skip


def find_suspects(
    truth: Annotations, image_ids: NDArray[np.int64], found: Sequence[Detections]
) -> list[Suspect]:
    """Return the most suspicious labels of some images, the worst first.

    The suspicion is a difference of scores, 0 to 1: the mean score of a detection where no box is;
    how much higher another class scores than the label; how much lower an object scores than others
    of its class.

    Args:
        found: The detections of each checkpoint.
    """
    scored = np.unique(image_ids)
    rows = np.isin(truth.object_image_ids, scored) & ~np.isnan(truth.boxes).any(axis=1)
    truth = truth.with_objects(rows)
    class_ids = np.array([c.id for c in truth.classes], np.int64)
    parts = []
    for number, detections in enumerate(found):
        kept = np.isin(detections.image_ids, scored) & np.isin(detections.category_ids, class_ids)
        own = Detections._make(column[kept] for column in detections)
        parts.append((np.full(len(own.scores), number), own))
    source = np.concatenate([number for number, _ in parts])
    every = Detections.joined([own for _, own in parts])
    objects = truth.object_image_ids, truth.boxes, truth.is_crowd.astype(np.bool_)
    pairs = box_pairs(every.image_ids, every.boxes, *objects, NEAR_OBJECT)
    suspects = [
        *_wrong_objects(truth, every, source, len(found), pairs),
        *_missing_boxes(truth, every, source, len(found), pairs[0]),
    ]
    suspects.sort(key=lambda s: -s.suspicion)
    return suspects


def _wrong_objects(
    truth: Annotations,
    every: Detections,
    source: Ints,
    num_sources: int,
    pairs: tuple[Ints, Ints, Floats],
) -> list[Suspect]:
    """Return the objects that are detected as another class, or not at all."""
    detection, item = pairs[0][pairs[2] >= SAME_PLACE], pairs[1][pairs[2] >= SAME_PLACE]
    num_classes, count = len(truth.classes), len(truth.boxes)
    labels = positions(np.array([c.id for c in truth.classes], np.int64), every.category_ids)
    # The best score of each object as each class by each checkpoint, then the mean of them.
    key = (item * num_classes + labels[detection]) * num_sources + source[detection]
    keys, place = np.unique(key, return_inverse=True)
    best = np.zeros(len(keys))
    np.maximum.at(best, place, every.scores[detection])
    pairs_of, place = np.unique(keys // num_sources, return_inverse=True)
    mean = np.bincount(place, best, len(pairs_of)) / num_sources
    owner, label = pairs_of // num_classes, pairs_of % num_classes
    is_own = label == truth.labels[owner] - 1
    own, other, other_label = np.zeros(count), np.zeros(count), np.full(count, -1)
    own[owner[is_own]] = mean[is_own]
    order = np.argsort(np.where(is_own, -1, mean), kind="stable")  # the best is assigned last
    order = order[~is_own[order]]
    other[owner[order]], other_label[owner[order]] = mean[order], label[order]
    highest = np.zeros(count)  # of any checkpoint and class
    np.maximum.at(highest, item, every.scores[detection])
    single = np.flatnonzero(~truth.is_crowd)
    totals = np.bincount(truth.labels[single] - 1, highest[single], num_classes)
    usual = totals / np.maximum(np.bincount(truth.labels[single] - 1, minlength=num_classes), 1)
    contradicted, lost = other - own, usual[truth.labels - 1] - highest
    files, images, suspects = _files(truth), truth.object_image_ids, []
    for row in np.flatnonzero(~truth.is_crowd & (np.maximum(contradicted, lost) > MIN_SUSPICION)):
        is_class = contradicted[row] >= lost[row]
        suspects.append(
            _suspect(
                files,
                "class" if is_class else "not found",
                max(contradicted[row], lost[row]),
                int(images[row]),
                truth.boxes[row],
                truth.classes[truth.labels[row] - 1].name,
                truth.classes[other_label[row]].name if is_class else "",
                other[row] if is_class else highest[row],
            )
        )
    return suspects


def _missing_boxes(
    truth: Annotations, every: Detections, source: Ints, num_sources: int, near: Ints
) -> list[Suspect]:
    """Return the places without a box where detections are confident."""
    names = {c.id: c.name for c in truth.classes}
    is_far = np.ones(len(every.scores), np.bool_)
    is_far[near] = False
    rows = np.flatnonzero(is_far & (every.scores >= MIN_SCORE))
    rows = rows[np.argsort(-every.scores[rows], kind="stable")]
    none = np.zeros(len(rows), np.bool_)
    one, other, _ = box_pairs(
        every.image_ids[rows], every.boxes[rows], every.image_ids[rows], every.boxes[rows], none,
        SAME_PLACE,
    )  # fmt: skip
    files, is_taken, suspects = _files(truth), none, []
    order = np.argsort(one, kind="stable")
    ends = np.searchsorted(one[order], np.arange(len(rows) + 1))
    for n, row in enumerate(rows):
        if is_taken[n]:
            continue
        group = other[order[ends[n] : ends[n + 1]]]
        group = group[~is_taken[group]]
        is_taken[group] = True
        same = rows[group][every.category_ids[rows[group]] == every.category_ids[row]]
        best = np.zeros(num_sources)
        np.maximum.at(best, source[same], every.scores[same])
        name = names[int(every.category_ids[row])]
        image, box = int(every.image_ids[row]), every.boxes[row]
        if best.mean() > MIN_SUSPICION:
            suspects.append(
                _suspect(files, "no box", best.mean(), image, box, "", name, best.mean())
            )
    return suspects


def _files(truth: Annotations) -> dict[int, str]:
    return dict(zip(truth.image_ids.tolist(), truth.file_names, strict=True))


def _suspect(
    files: Mapping[int, str],
    kind: str,
    suspicion: float,
    image_id: int,
    box: Floats,
    label: str,
    detected: str,
    score: float,
) -> Suspect:
    left, top, width, height = (round(float(v), 1) for v in box)
    return Suspect(
        kind=kind,
        suspicion=round(float(suspicion), 4),
        image_id=image_id,
        file_name=files[image_id],
        box=(left, top, width, height),
        label=label,
        detected=detected,
        score=round(float(score), 4),
    )


def write_suspects(path: Path, suspects: Sequence[Suspect]) -> None:
    """Write suspects as CSV; boxes are in pixels."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rank, s in enumerate(suspects, 1):
        row = [rank, s.suspicion, s.kind, s.file_name, s.image_id, *s.box]
        writer.writerow([*row, s.label, s.detected, s.score])
    write_text(path, text.getvalue())
