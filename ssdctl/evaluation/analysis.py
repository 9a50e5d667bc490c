"""Analyze an evaluation: errors by type, curves, calibration, confusions. Torch-free.

    evaluation = analyze(run_scoring(truth, detections), detections, about)
    write_evaluation(folder / "evaluation.json", evaluation)

The report page is drawn from this file, so a network need not run again for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations
from ssdctl.evaluation.coco_ap import IOU_THRESHOLDS, Detections, Scoring
from ssdctl.inference.drawing import one_line
from ssdctl.runs.evaluation import (
    SAMPLE_SCORE,
    SHOWN_SCORE,
    Box,
    CalibrationBin,
    ClassAnalysis,
    Confusion,
    ErrorKind,
    Evaluation,
    EvaluationInfo,
    SampleBox,
    SampleImage,
)

log = logging.getLogger(__name__)

CURVE_IOUS = (0.5, 0.75, 0.9)
NUM_SAMPLES = 12  # worst images, and as many random ones
SEED = 0  # random samples
MAX_SAMPLE_BOXES = 100  # per image
NUM_CONFUSIONS = 12
MAX_MATRIX = 100  # classes of a confusion matrix
ERROR_MEANINGS = {  # TIDE's kinds (Bolya et al. 2020), in their order
    "Cls": "right place, wrong class",
    "Loc": "right class, IoU with the object between 0.1 and 0.5",
    "Both": "wrong class and IoU between 0.1 and 0.5",
    "Dupe": "object already detected with a higher score",
    "Bkg": "IoU below 0.1 with every object",
    "Miss": "object with no detection nearby",
}
ERROR_NAMES = {
    "Cls": "Classification",
    "Loc": "Localization",
    "Both": "Both",
    "Dupe": "Duplicate",
    "Bkg": "Background",
    "Miss": "Missed",
}
ERROR_REMEDIES = {  # what diagnosis() says one would have to do
    "Cls": "Fixing wrong classes",
    "Loc": "Fitting boxes better",
    "Both": "Fixing wrong classes with inexact boxes",
    "Dupe": "Removing duplicate detections",
    "Bkg": "Removing detections of background",
    "Miss": "Finding missed objects",
}
IOU_FOUND, IOU_BACKGROUND = 0.5, 0.1  # TIDE's thresholds
NEGLIGIBLE_GAIN = 0.005  # AP50
BARELY_TRAINED = 0.02  # AP50 below which the types of errors say nothing


def analyze(scoring: Scoring, detections: Detections, about: EvaluationInfo) -> Evaluation:
    """Compute the evaluation record of scored detections."""
    engine = scoring.engine
    precision, cut = engine.eval["precision"], engine.eval["scores"]
    confusion = engine.confusion_matrix(iou_thr=IOU_FOUND)["matrix"]
    shown_confusion = engine.confusion_matrix(iou_thr=IOU_FOUND, min_score=SHOWN_SCORE)
    has_probabilities = bool(((detections.scores >= 0) & (detections.scores <= 1)).all())
    if not has_probabilities:
        log.warning("there are scores outside of 0 to 1: their calibration is not computed")
    calibration = engine.calibration() if has_probabilities else {"bins": [], "ece": None}
    return Evaluation(
        about=about,
        figures=scoring.figures,
        per_class=[
            ClassAnalysis(
                *entry[:2],
                int(confusion[k].sum()),
                *entry[2:],
                *_best_f1(precision[0, :, k, 0, 2], cut[0, :, k, 0, 2]),
                curve := _curve(precision[0, :, [k], 0, 2]),
                cut[0, :, k, 0, 2].round(4).tolist() if curve else [],
            )
            for k, entry in enumerate(scoring.per_class)
        ],
        curves={
            f"{iou:.2f}": _curve(precision[np.isclose(IOU_THRESHOLDS, iou)][0, :, :, 0, 2].T)
            for iou in CURVE_IOUS
        },
        errors=error_kinds(scoring),
        calibration=[
            CalibrationBin(
                b["bin_lower"], b["bin_upper"], b["count"], b["avg_confidence"], b["avg_accuracy"]
            )
            for b in calibration["bins"]
        ],
        calibration_error=calibration["ece"],
        confusions=_confusions(shown_confusion),
        samples=choose_samples(scoring.truth, scoring.image_ids, detections),
        sample_score=SAMPLE_SCORE,
        confusion=_matrix(shown_confusion),
    )


def error_kinds(scoring: Scoring) -> list[ErrorKind]:
    """Return TIDE's errors at IoU 0.5, sorted by their cost in AP50."""
    tide = scoring.engine.tide_errors(pos_thr=IOU_FOUND, bg_thr=IOU_BACKGROUND)
    kinds = [
        ErrorKind(kind, meaning, tide["counts"][kind], tide["delta_ap"][kind])
        for kind, meaning in ERROR_MEANINGS.items()
    ]
    return sorted(kinds, key=lambda e: -e.delta_ap)


def diagnosis(evaluation: Evaluation) -> str:
    """Return one sentence: which type of error costs most AP50, and for which classes."""
    if not any(entry.objects for entry in evaluation.per_class):
        return "There is nothing to score: the images have no objects."
    if not evaluation.about.detections:
        return "Nothing was detected: train longer, or lower the score threshold."
    if evaluation.figures.get("AP50", 0) < BARELY_TRAINED:
        return "Almost no detection is right yet: train longer."
    worst = max(evaluation.errors, key=lambda e: e.delta_ap, default=None)
    if worst is None or worst.delta_ap < NEGLIGIBLE_GAIN:
        return f"No type of error costs more than {NEGLIGIBLE_GAIN} AP50."
    remedy = ERROR_REMEDIES.get(worst.kind, worst.kind)
    sentence = f"{remedy} would gain most: +{worst.delta_ap:.3f} AP50"
    if worst.kind == "Cls" and evaluation.confusions:
        pair = evaluation.confusions[0]
        sentence += f" (most often {one_line(pair.truth)} detected as {one_line(pair.found)})"
    return sentence + "."


def f1_curve(entry: ClassAnalysis) -> list[float]:
    """Return a class's F1 at IoU 0.5 for the score thresholds 0, 0.01 ... 1; empty if unknown."""
    if not entry.scores or len(entry.scores) != len(entry.precision):
        return []
    precision, cut = np.array(entry.precision), np.array(entry.scores)
    recall = np.linspace(0, 1, len(precision))
    f1 = np.where(cut > 0, 2 * precision * recall / np.maximum(precision + recall, 1e-12), 0)
    # Scores fall with recall: a threshold reaches the recalls whose scores are not below it.
    reached = np.searchsorted(-cut, -np.linspace(0, 1, 101), side="right")
    reached = np.minimum(reached, (cut > 0).sum())
    curve: list[float] = np.where(reached > 0, f1[reached - 1], 0).round(4).tolist()
    return curve


def best_threshold(evaluation: Evaluation) -> tuple[float, float] | None:
    """Return the score threshold with the best F1, as the mean of the classes, and that F1."""
    curves = [curve for entry in evaluation.per_class if (curve := f1_curve(entry))]
    if not curves:
        return None
    mean = np.mean(curves, axis=0)
    best = np.flatnonzero(mean == mean.max())  # the middle one: it tolerates other images best
    return float(best[len(best) // 2]) / 100, round(float(mean.max()), 4)


def _curve(precision: NDArray[np.float64]) -> list[float]:
    """Return the mean of (K, 101) precisions, without classes that have no objects (-1)."""
    measured = precision[(precision > -1).all(axis=1)]
    return measured.mean(axis=0).round(4).tolist() if len(measured) else []


def _best_f1(precision: NDArray[np.float64], cut: NDArray[np.float64]) -> tuple[float, float]:
    """Return the best F1 over a curve's recalls, and the score threshold that gives it."""
    if not (precision > -1).all():
        return -1.0, -1.0
    recall = np.linspace(0, 1, len(precision))
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    return round(float(f1[best]), 4), round(float(cut[best]), 4)


def _matrix(table: dict[str, Any]) -> list[list[int]]:
    """Return how often each class was detected as each class; the last index is the background."""
    is_small = len(table["cat_names"]) <= MAX_MATRIX
    counts: list[list[int]] = table["matrix"].astype(np.int64).tolist()
    return counts if is_small else []


def _confusions(table: dict[str, Any]) -> list[Confusion]:
    names, counts = table["cat_names"], table["matrix"][:-1, :-1].astype(np.int64)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:NUM_CONFUSIONS]
    pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
    return [Confusion(names[t], names[f], int(counts[t, f])) for t, f in pairs if counts[t, f]]


def choose_samples(
    truth: Annotations, image_ids: NDArray[np.int64], detections: Detections
) -> list[SampleImage]:
    """Return the images with the worst F1, then random ones among the others; ids are ascending."""
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
    truth: Annotations, image_ids: NDArray[np.int64], detections: Detections
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the F1 and the number of errors of N images, at IoU 0.5 and the score shown.

    As COCO does, the detections with the highest scores choose first among the objects of their
    class. Crowds, and the detections in them, do not count.
    """
    object_image_ids, object_category_ids = truth.object_image_ids, truth.object_category_ids
    shown = np.flatnonzero(
        (detections.scores >= SHOWN_SCORE) & np.isin(detections.image_ids, image_ids)
    )
    shown = shown[np.argsort(-detections.scores[shown], kind="stable")]
    objects = np.flatnonzero(np.isin(object_image_ids, image_ids))
    image_of_object = np.searchsorted(image_ids, object_image_ids[objects])
    image_of_detection = np.searchsorted(image_ids, detections.image_ids[shown])

    # Number the pairs of an image and a class, so that those of a detection are one range.
    classes = np.unique(
        np.concatenate([object_category_ids[objects], detections.category_ids[shown]])
    )
    group = image_of_object * len(classes) + np.searchsorted(classes, object_category_ids[objects])
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

    is_crowd = truth.is_crowd[objects]
    iou = _iou(
        detections.boxes[shown[pair_detection]],
        truth.boxes[objects[pair_object]],
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
    truth: Annotations, detections: Detections, image_id: int, is_worst: bool
) -> SampleImage:
    is_shown = (detections.image_ids == image_id) & (detections.scores >= SAMPLE_SCORE)
    detected = [
        SampleBox(c, _box(b), round(s, 4))
        for c, b, s in zip(
            detections.category_ids[is_shown].tolist(),
            detections.boxes[is_shown].tolist(),
            detections.scores[is_shown].tolist(),
            strict=True,
        )
    ]
    row = int(np.flatnonzero(truth.image_ids == image_id)[0])
    objects = [
        SampleBox(category_id, _box(truth.boxes[m]), is_crowd=bool(truth.is_crowd[m]))
        for m in np.flatnonzero(truth.rows == row)
        for category_id in [truth.classes[truth.labels[m] - 1].id or 0]
    ]
    detected.sort(key=lambda d: -(d.score or 0))
    found = detected[:MAX_SAMPLE_BOXES]
    return SampleImage(image_id, truth.file_names[row], objects, found, is_worst)


def _box(values: Sequence[float] | NDArray[np.float64]) -> Box:
    left, top, width, height = (round(float(v), 2) for v in values)
    return left, top, width, height
