"""Analyse an evaluation: errors by type, curves, calibration, confusions. Torch-free.

    evaluation = analyse(run_scoring(truth, detections), detections, about)
    write_evaluation(folder / "evaluation.json", evaluation)

The report page is drawn from this file, so a network need not run again for it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdctl.evaluation.coco_ap import IOU_THRESHOLDS, Detections, Scoring
from ssdctl.evaluation.samples import choose_samples
from ssdctl.inference.drawing import one_line
from ssdctl.runs.evaluation import (
    SAMPLE_SCORE,
    SHOWN_SCORE,
    CalibrationBin,
    ClassAnalysis,
    Confusion,
    ErrorKind,
    Evaluation,
    EvaluationInfo,
)

log = logging.getLogger(__name__)

CURVE_IOUS = (0.5, 0.75, 0.9)
NUM_SAMPLES = 12
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
NEGLIGIBLE_GAIN = 0.005  # of AP50
BARELY_TRAINED = 0.02  # AP50 below which the types of errors say nothing


def analyse(scoring: Scoring, detections: Detections, about: EvaluationInfo) -> Evaluation:
    """Compute the evaluation record of scored detections.

    Args:
        scoring: The scores of the detections.
        detections: The scored detections.
        about: What was evaluated.
    """
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
        figures=scoring.scores.figures,
        per_class=[
            ClassAnalysis(
                *entry[:2],
                int(confusion[k].sum()),
                *entry[2:],
                *_best_f1(precision[0, :, k, 0, 2], cut[0, :, k, 0, 2]),
                curve := _curve(precision[0, :, [k], 0, 2]),
                cut[0, :, k, 0, 2].round(4).tolist() if curve else [],
            )
            for k, entry in enumerate(scoring.scores.per_class)
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
