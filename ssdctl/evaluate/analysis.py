"""Why the AP is what it is, and what to mend next: hotcoco's answers, kept as one JSON. Torch-free.

    evaluation = analyse(run_scoring(annotations, detections), detections, about)
    write_evaluation(folder / "evaluation.json", evaluation)

The report page is drawn from this file, so a network need not run again for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdctl.evaluate.coco_ap import IOU_THRESHOLDS, Detections, Scoring
from ssdctl.runs.evaluation import (
    SHOWN_SCORE,
    Box,
    CalibrationBin,
    ClassAnalysis,
    Confusion,
    DetectedBox,
    ErrorKind,
    Evaluation,
    EvaluationInfo,
    GroundTruthBox,
    SampleImage,
)

CURVE_IOUS = (0.5, 0.75, 0.9)
NUM_SAMPLES = 12
NUM_CONFUSIONS = 12
ERRORS = {  # TIDE's kinds (Bolya et al. 2020), in their order
    "Cls": "right place, wrong class",
    "Loc": "right class, badly placed",
    "Both": "wrong class, badly placed",
    "Dupe": "found a second time",
    "Bkg": "nothing is there",
    "Miss": "not found at all",
}
IOU_FOUND, IOU_BACKGROUND = 0.5, 0.1  # TIDE's thresholds


def analyse(scoring: Scoring, detections: Detections, about: EvaluationInfo) -> Evaluation:
    """Ask the engine for all it knows.

    Args:
        scoring: Of these detections.
        detections: What was scored.
        about: Where it comes from.
    """
    engine = scoring.engine
    precision, cut = engine.eval["precision"], engine.eval["scores"]
    confusion = engine.confusion_matrix(iou_thr=IOU_FOUND)["matrix"]
    calibration = engine.calibration()
    return Evaluation(
        about=about,
        figures=scoring.scores.figures,
        per_class=[
            ClassAnalysis(
                *entry[:2],
                int(confusion[k].sum()),
                *entry[2:],
                *_best_f1(precision[0, :, k, 0, 2], cut[0, :, k, 0, 2]),
                _curve(precision[0, :, [k], 0, 2]),
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
        confusions=_confusions(engine),
        samples=_samples(engine, detections),
    )


def error_kinds(scoring: Scoring) -> list[ErrorKind]:
    """TIDE's errors at IoU 0.5, the one that costs most first."""
    tide = scoring.engine.tide_errors(pos_thr=IOU_FOUND, bg_thr=IOU_BACKGROUND)
    kinds = [
        ErrorKind(kind, meaning, tide["counts"][kind], tide["delta_ap"][kind])
        for kind, meaning in ERRORS.items()
    ]
    return sorted(kinds, key=lambda e: -e.delta_ap)


def _curve(precision: NDArray[np.float64]) -> list[float]:
    """(K, 101) precisions of classes -> their mean; classes without objects (-1) left out."""
    measured = precision[(precision > -1).all(axis=1)]
    return measured.mean(axis=0).round(4).tolist() if len(measured) else []


def _best_f1(precision: NDArray[np.float64], cut: NDArray[np.float64]) -> tuple[float, float]:
    """The best F1 over a curve's recalls, and the score threshold that gives it."""
    if not (precision > -1).all():
        return -1.0, -1.0
    recall = np.linspace(0, 1, len(precision))
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    return round(float(f1[best]), 4), round(float(cut[best]), 4)


def _confusions(engine: Any) -> list[Confusion]:
    table = engine.confusion_matrix(iou_thr=IOU_FOUND, min_score=SHOWN_SCORE)
    names, counts = table["cat_names"], table["matrix"][:-1, :-1].astype(np.int64)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:NUM_CONFUSIONS]
    pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
    return [Confusion(names[t], names[f], int(counts[t, f])) for t, f in pairs if counts[t, f]]


def _samples(engine: Any, detections: Detections) -> list[SampleImage]:
    """Images spread evenly over those that were scored, such with objects first."""
    truth = engine.coco_gt
    scored = np.sort(np.array(engine.params.img_ids, np.int64))
    if not len(scored):
        return []
    told = np.array([a["image_id"] for a in truth.load_anns(truth.get_ann_ids())], np.int64)
    with_objects = scored[np.isin(scored, told)]
    pool = with_objects if len(with_objects) >= NUM_SAMPLES else scored
    chosen = np.unique(np.linspace(0, len(pool) - 1, NUM_SAMPLES).astype(int))
    return [_sample(truth, detections, int(image_id)) for image_id in pool[chosen]]


def _sample(truth: Any, detections: Detections, image_id: int) -> SampleImage:
    is_shown = (detections.image_ids == image_id) & (detections.scores >= SHOWN_SCORE)
    found = [
        DetectedBox(c, _box(b), round(s, 4))
        for c, b, s in zip(
            detections.category_ids[is_shown].tolist(),
            detections.boxes[is_shown].tolist(),
            detections.scores[is_shown].tolist(),
            strict=True,
        )
    ]
    there = [
        GroundTruthBox(a["category_id"], _box(a["bbox"]))
        for a in truth.load_anns(truth.get_ann_ids(img_ids=[image_id]))
    ]
    file_name = truth.load_imgs([image_id])[0]["file_name"]
    return SampleImage(image_id, file_name, there, sorted(found, key=lambda f: -f.score))


def _box(values: Sequence[float]) -> Box:
    left, top, width, height = (round(float(v), 2) for v in values)
    return left, top, width, height
