"""Why the AP is what it is, and what to mend next: hotcoco's answers, kept as one JSON. Torch-free.

    evaluation = analyse(run_scoring(truth, detections), detections, about)
    write_evaluation(folder / "evaluation.json", evaluation)

The report page is drawn from this file, so a network need not run again for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import DataError
from ssdctl.evaluate.coco_ap import IOU_THRESHOLDS, Detections, Scoring
from ssdctl.evaluate.ground_truth import GroundTruth
from ssdctl.files import write_bytes

FILE = "evaluation.json"
CURVE_IOUS = (0.5, 0.75, 0.9)
SHOWN_SCORE = 0.3  # of detections that are drawn or said to confuse classes
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

Box = tuple[float, float, float, float]  # left, top, width, height in pixels


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What was evaluated, and on what."""

    source: str  # the checkpoint or the file of detections
    step: int | None = None
    epoch: float | None = None
    data: str  # the dataset folder
    store: str
    split: str
    images: int
    detections: int


class ErrorKind(msgspec.Struct, frozen=True):
    """One of TIDE's kinds of error."""

    kind: str
    meaning: str
    count: int
    delta_ap: float  # what AP50 would gain without these errors


class ClassAnalysis(msgspec.Struct, frozen=True):
    """One class. A figure that does not exist is -1."""

    category_id: int
    name: str
    objects: int
    AP: float
    AP50: float
    APs: float
    APm: float
    APl: float
    best_f1: float  # at IoU 0.5, over all score thresholds
    best_score: float  # the threshold that gives it
    precision: list[float]  # at IoU 0.5, for the recalls 0, 0.01 ... 1; empty without objects


class CalibrationBin(msgspec.Struct, frozen=True):
    """Detections whose scores are alike: a calibrated network's are right as often as they say."""

    low: float
    high: float
    count: int
    mean_score: float
    fraction_right: float


class Confusion(msgspec.Struct, frozen=True):
    """Objects of one class that were taken for another."""

    truth: str
    found: str
    count: int


class Found(msgspec.Struct, frozen=True):
    category_id: int
    box: Box
    score: float


class Truth(msgspec.Struct, frozen=True):
    category_id: int
    box: Box


class Sample(msgspec.Struct, frozen=True):
    """One image: what is there, and what was found with a score of 0.3 or more."""

    image_id: int
    file_name: str
    truth: list[Truth]
    found: list[Found]


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation: the figures and what lies behind them."""

    about: About
    figures: dict[str, float]
    per_class: list[ClassAnalysis]
    curves: dict[str, list[float]]  # IoU -> mean precision for the recalls 0, 0.01 ... 1
    errors: list[ErrorKind]
    calibration: list[CalibrationBin]
    calibration_error: float  # expected calibration error: the mean gap, by count
    confusions: list[Confusion]  # the most frequent ones
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        """What `evaluate --json` prints: the contract's keys, then what lies behind them."""
        place = {"step": self.about.step, "epoch": self.about.epoch}
        classes = msgspec.to_builtins(self.per_class)
        return {
            **{k: v for k, v in place.items() if v is not None},
            **self.figures,
            "images": self.about.images,
            "detections": self.about.detections,
            "per_class": [{k: v for k, v in c.items() if k != "precision"} for c in classes],
            "errors": msgspec.to_builtins(self.errors),
            "calibration_error": self.calibration_error,
        }


def analyse(scoring: Scoring, detections: Detections, about: About) -> Evaluation:
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
        samples=_samples(scoring, detections),
    )


def error_kinds(scoring: Scoring) -> list[ErrorKind]:
    """TIDE's errors at IoU 0.5, the one that costs most first."""
    tide = scoring.engine.tide_errors(pos_thr=IOU_FOUND, bg_thr=IOU_BACKGROUND)
    kinds = [
        ErrorKind(kind, meaning, tide["counts"][kind], tide["delta_ap"][kind])
        for kind, meaning in ERRORS.items()
    ]
    return sorted(kinds, key=lambda e: -e.delta_ap)


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Publish an evaluation as JSON.

    Raises:
        DiskError: It cannot be written.
    """
    write_bytes(path, msgspec.json.encode(evaluation) + b"\n")


def read_evaluation(path: Path) -> Evaluation | None:
    """The evaluation in a file; None where there is no such file.

    Raises:
        DataError: It holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path}: no evaluation that this version reads: {error}".replace("`", ""),
            hint="make it anew: ssdctl evaluate CKPT --report DIR",
        ) from None


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


def _samples(scoring: Scoring, detections: Detections) -> list[Sample]:
    """Choose images spread evenly over those that were scored, preferably with objects."""
    truth, scored = scoring.truth, scoring.image_ids
    if not len(scored):
        return []
    with_objects = scored[np.isin(scored, truth.annotated_image_ids)]
    pool = with_objects if len(with_objects) >= NUM_SAMPLES else scored
    chosen = np.unique(np.linspace(0, len(pool) - 1, NUM_SAMPLES).astype(int))
    return [_sample(truth, detections, int(image_id)) for image_id in pool[chosen]]


def _sample(truth: GroundTruth, detections: Detections, image_id: int) -> Sample:
    is_shown = (detections.image_ids == image_id) & (detections.scores >= SHOWN_SCORE)
    found = [
        Found(c, _box(b), round(s, 4))
        for c, b, s in zip(
            detections.category_ids[is_shown].tolist(),
            detections.boxes[is_shown].tolist(),
            detections.scores[is_shown].tolist(),
            strict=True,
        )
    ]
    row = int(np.flatnonzero(truth.image_ids == image_id)[0])
    of_image = np.flatnonzero(truth.boxes.image_ids == image_id)
    objects = [Truth(int(truth.boxes.category_ids[m]), _box(truth.boxes.bbox[m])) for m in of_image]
    found.sort(key=lambda f: -f.score)
    return Sample(image_id, truth.file_names[row], objects, found)


def _box(values: Sequence[float] | NDArray[np.float64]) -> Box:
    left, top, width, height = (round(float(v), 2) for v in values)
    return left, top, width, height
