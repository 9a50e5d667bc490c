"""COCO AP of detections: pycocotools' definition, computed by hotcoco. Torch-free.

scores = run_scoring(read_ground_truth(annotations_json), detections).scores
scores.figures["AP"], scores.per_class
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.formats._coco_json import Content, Int64, Number, decode
from ssdctl.data.formats.coco import read_content
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.ground_truth import (
    DenseIds,
    GroundTruth,
    coco_document,
    dense_ids,
    engine_columns,
)
from ssdctl.files import DECODE_ERRORS

# name: (from precision or recall, IoU threshold, area range, maxDets index) as pycocotools has them
FIGURES: dict[str, tuple[str, float | None, int, int]] = {
    "AP": ("precision", None, 0, 2),
    "AP50": ("precision", 0.5, 0, 2),
    "AP75": ("precision", 0.75, 0, 2),
    "APs": ("precision", None, 1, 2),
    "APm": ("precision", None, 2, 2),
    "APl": ("precision", None, 3, 2),
    "AR1": ("recall", None, 0, 0),
    "AR10": ("recall", None, 0, 1),
    "AR100": ("recall", None, 0, 2),
    "ARs": ("recall", None, 1, 2),
    "ARm": ("recall", None, 2, 2),
    "ARl": ("recall", None, 3, 2),
}
IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
VERIFY_TOLERANCE = 1e-12
NO_OBJECTS = "the images have no annotated objects: there is no AP (-1)"


class Detections(NamedTuple):
    """Detections of a split in COCO's format: K rows."""

    image_ids: NDArray[np.int64]  # K
    boxes: NDArray[np.float64]  # K x 4: left, top, width, height in pixels
    scores: NDArray[np.float64]  # K
    category_ids: NDArray[np.int64]  # K

    def to_coco(self) -> list[dict[str, Any]]:
        """Return the detections in COCO's results format."""
        return [
            {"image_id": i, "category_id": c, "bbox": b, "score": s}
            for i, c, b, s in zip(
                self.image_ids.tolist(),
                self.category_ids.tolist(),
                self.boxes.tolist(),
                self.scores.tolist(),
                strict=True,
            )
        ]


class ClassScore(NamedTuple):
    """The AP of one class, for all objects and by their size."""

    category_id: int
    name: str
    AP: float
    AP50: float
    APs: float
    APm: float
    APl: float


class Scores(NamedTuple):
    """The 12 figures of COCO by name (-1 if there is nothing to measure), and AP per class."""

    figures: dict[str, float]
    per_class: list[ClassScore]
    images: int  # that were scored


class Scoring(NamedTuple):
    """The figures, and what `ssdctl.evaluation.analysis` computes the rest from."""

    scores: Scores
    engine: Any  # hotcoco.COCOeval, evaluated and accumulated; its ids are dense
    truth: GroundTruth
    image_ids: NDArray[np.int64]  # that were scored, ascending

    @property
    def has_no_objects(self) -> bool:
        """Return whether there is nothing to measure."""
        return self.scores.figures["AP"] < 0


class _Result(msgspec.Struct, gc=False):
    image_id: Int64
    category_id: Int64
    bbox: tuple[float, float, float, float]
    score: float


class _LooseResult(msgspec.Struct, gc=False):
    """The same with ids that are floats, as NumPy writes them: the fallback."""

    image_id: Number
    category_id: Number
    bbox: tuple[float, float, float, float]
    score: float


def read_detections(path: Path) -> Detections:
    """Read detections from a file in COCO's results format.

    Raises:
        DataError: It is not such a file; the message gives the place.
    """
    content = read_content(path)
    try:
        rows = _decode_results(content)
    except DECODE_ERRORS as error:
        raise DataError(
            f"{path}: not in COCO's results format: {error}".replace("`", ""),
            hint='expected [{"image_id", "category_id", "bbox", "score"}, ...]',
        ) from None
    return Detections(
        np.array([r.image_id for r in rows], np.int64),
        np.array([r.bbox for r in rows], np.float64).reshape(-1, 4),
        np.array([r.score for r in rows], np.float64),
        np.array([r.category_id for r in rows], np.int64),
    )


def _decode_results(content: Content) -> Sequence[_Result | _LooseResult]:
    """Decode results whose ids are whole numbers, as 139 or 139.0."""
    try:
        return decode(content, list[_Result])
    except msgspec.ValidationError:
        loose = decode(content, list[_LooseResult])
        ids = (number for row in loose for number in (row.image_id, row.category_id))
        if not all(abs(number) < 2**63 and number == int(number) for number in ids):
            raise
        return loose


def run_scoring(
    truth: GroundTruth,
    detections: Detections,
    *,
    image_ids: NDArray[np.int64] | None = None,
    verify: bool = False,
) -> Scoring:
    """Score detections against the annotations of a split.

    Args:
        truth: The annotations.
        detections: May be empty. Those of categories that the annotations do not list are ignored.
        image_ids: Score only these images; None scores all of the split.
        verify: Score with pycocotools too.

    Raises:
        DataError: A detection on an image that the annotations do not list.
        IntegrityError: With `verify`, the two differ by more than 1e-12.
    """
    import hotcoco

    _refuse_unlisted_images(truth, detections)
    ids = dense_ids(truth)
    scored = ids.image_ids if image_ids is None else np.unique(image_ids)
    columns = engine_columns(truth, ids)
    table = _table(detections, ids)
    annotations = hotcoco.COCO.from_arrays(**columns)
    evaluation = hotcoco.COCOeval(annotations, annotations.load_res(table), "bbox")
    evaluation.params.img_ids = ids.images(scored).tolist()
    evaluation.evaluate()
    evaluation.accumulate()
    scores = _scores(evaluation, truth, len(scored))
    if verify:
        _verify(scores, coco_document(columns), table, evaluation.params.img_ids)
    return Scoring(scores, evaluation, truth, scored)


def _table(detections: Detections, ids: DenseIds) -> NDArray[np.float64]:
    """Return the detections of listed categories with dense ids, K x 7, as COCO's tools take."""
    labels = ids.classes(detections.category_ids)
    table = np.empty((len(labels), 7))
    first, counts = _runs(detections.image_ids)
    table[:, 0] = np.repeat(ids.images(detections.image_ids[first]), counts)
    table[:, 1:5] = detections.boxes
    table[:, 5], table[:, 6] = detections.scores, labels
    return table if labels.all() else table[labels > 0]


def _scores(evaluation: Any, truth: GroundTruth, images: int) -> Scores:
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
    per_class = [
        ClassScore(
            int(entry.id or 0),
            entry.name,
            *(
                _figure(precision[:, :, [k]], recall, *FIGURES[name])
                for name in ClassScore._fields[2:]
            ),
        )
        for k, entry in enumerate(truth.classes_by_id)
    ]
    figures = {name: _figure(precision, recall, *spec) for name, spec in FIGURES.items()}
    return Scores(figures, per_class, images)


def _figure(
    precision: Any, recall: Any, source: str, iou: float | None, area: int, max_dets: int
) -> float:
    values = precision if source == "precision" else recall
    if iou is not None:
        values = values[np.isclose(IOU_THRESHOLDS, iou)]
    return _mean(values[..., area, max_dets])


def _mean(values: NDArray[np.float64]) -> float:
    measured = values[values > -1]
    return float(np.mean(measured)) if measured.size else -1.0


def _runs(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each run of equal ids starts, and its length: detections come by image."""
    edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    first = np.concatenate([np.zeros(min(len(ids), 1), np.int64), edges])
    return first, np.diff(first, append=len(ids))


def _refuse_unlisted_images(truth: GroundTruth, detections: Detections) -> None:
    first, _ = _runs(detections.image_ids)
    unlisted = np.setdiff1d(detections.image_ids[first], truth.image_ids)
    if len(unlisted):
        raise DataError(
            f"{len(unlisted)} images with detections are not in {truth.path}, "
            f"among them {', '.join(map(str, unlisted[:5]))}",
            hint="score them against the annotations they belong to: --data DIR, --split",
        )


def _verify(
    scores: Scores,
    document: dict[str, Any],
    table: NDArray[np.float64],
    image_numbers: list[int],
) -> None:
    """Compare with pycocotools, the reference."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth = COCO()
        truth.dataset = document
        truth.createIndex()
        if len(table):
            detections = truth.loadRes(table)
        else:
            detections = COCO()
            detections.dataset = {**document, "annotations": []}
            detections.createIndex()
        reference = COCOeval(truth, detections, "bbox")
        reference.params.imgIds = image_numbers
        reference.evaluate()
        reference.accumulate()
        reference.summarize()
    for (name, figure), expected in zip(
        scores.figures.items(), reference.stats.tolist(), strict=True
    ):
        if abs(figure - expected) > VERIFY_TOLERANCE:
            raise IntegrityError(
                f"{name} is {figure!r} by hotcoco and {expected!r} by pycocotools",
                hint="please report it with the two files; pycocotools' figure is the reference",
            )
