"""COCO AP of detections: pycocotools' definition, computed by hotcoco. Torch-free.

scores = run_scoring(annotations_json, detections).scores
scores.figures["AP"], scores.per_class
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.formats import coco
from ssdctl.errors import DataError, IntegrityError

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


class Detections(NamedTuple):
    """Detections of a split in COCO's terms: K rows."""

    image_ids: NDArray[np.int64]  # K
    boxes: NDArray[np.float64]  # K x 4: left, top, width, height in pixels
    scores: NDArray[np.float64]  # K
    category_ids: NDArray[np.int64]  # K

    def table(self) -> NDArray[np.float64]:
        """K x 7, as COCO's tools take them."""
        result = np.empty((len(self.scores), 7))
        result[:, 0], result[:, 1:5] = self.image_ids, self.boxes
        result[:, 5], result[:, 6] = self.scores, self.category_ids
        return result

    def to_coco(self) -> list[dict[str, Any]]:
        """COCO's results format."""
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
    """The AP of one class, as a whole and by the size of the objects."""

    category_id: int
    name: str
    AP: float
    AP50: float
    APs: float
    APm: float
    APl: float


class Scores(NamedTuple):
    """The 12 figures of COCO by name (-1 where there is nothing to measure), and AP per class."""

    figures: dict[str, float]
    per_class: list[ClassScore]
    images: int  # that were scored


class Scoring(NamedTuple):
    """The figures, and the engine that knows more (`ssdctl.evaluate.analysis` asks it)."""

    scores: Scores
    engine: Any  # hotcoco.COCOeval, evaluated and accumulated


class _Result(msgspec.Struct, gc=False):
    image_id: coco.Int64
    category_id: coco.Int64
    bbox: tuple[float, float, float, float]
    score: float


def read_detections(path: Path) -> Detections:
    """Detections from a file in COCO's results format.

    Raises:
        DataError: It is not such a file; the message names the place.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[_Result])
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: no COCO results: {error}".replace("`", ""),
            hint='expected [{"image_id", "category_id", "bbox", "score"}, ...]',
        ) from None
    return Detections(
        np.array([r.image_id for r in rows], np.int64),
        np.array([r.bbox for r in rows], np.float64).reshape(-1, 4),
        np.array([r.score for r in rows], np.float64),
        np.array([r.category_id for r in rows], np.int64),
    )


def image_ids(annotations: Path, annotated_only: bool) -> NDArray[np.int64]:
    """The images of an annotation file, in its order."""
    read = coco.read(annotations)
    with_boxes = {a.image_id for a in read.annotations}
    chosen = [i.id for i in read.images if not annotated_only or i.id in with_boxes]
    return np.array(chosen, np.int64)


def run_scoring(
    annotations: Path,
    detections: Detections,
    *,
    image_ids: NDArray[np.int64] | None = None,
    verify: bool = False,
) -> Scoring:
    """Score detections against an annotation file.

    Args:
        annotations: COCO annotations.
        detections: What was found; may be nothing.
        image_ids: Score these images alone; None scores all of the file.
        verify: Score with pycocotools too.

    Raises:
        DataError: A detection of an image that the annotations do not list.
        IntegrityError: With `verify`, the two differ by more than 1e-12.
    """
    import hotcoco

    try:
        truth = hotcoco.COCO(str(annotations))
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise DataError(f"{annotations}: cannot be scored against: {error}") from None
    _refuse_strangers(truth, detections, annotations)
    evaluation = hotcoco.COCOeval(truth, truth.load_res(detections.table()), "bbox")
    if image_ids is not None:
        evaluation.params.img_ids = sorted(image_ids.tolist())
    evaluation.evaluate()
    evaluation.accumulate()
    scores = _scores(evaluation, truth)
    if verify:
        _verify(scores, annotations, detections, image_ids)
    return Scoring(scores, evaluation)


def _scores(evaluation: Any, truth: Any) -> Scores:
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
    category_ids = evaluation.params.cat_ids
    names = {c["id"]: c["name"] for c in truth.load_cats(category_ids)}
    per_class = [
        ClassScore(
            category_id,
            names[category_id],
            *(
                _figure(precision[:, :, [k]], recall, *FIGURES[name])
                for name in ClassScore._fields[2:]
            ),
        )
        for k, category_id in enumerate(category_ids)
    ]
    figures = {name: _figure(precision, recall, *spec) for name, spec in FIGURES.items()}
    return Scores(figures, per_class, len(evaluation.params.img_ids))


def _figure(
    precision: Any, recall: Any, source: str, iou: float | None, area: int, most: int
) -> float:
    values = precision if source == "precision" else recall
    if iou is not None:
        values = values[np.isclose(IOU_THRESHOLDS, iou)]
    return _mean(values[..., area, most])


def _mean(values: NDArray[np.float64]) -> float:
    measured = values[values > -1]
    return float(np.mean(measured)) if measured.size else -1.0


def _refuse_strangers(truth: Any, detections: Detections, annotations: Path) -> None:
    # An image's detections follow each other: the first of each run says it all.
    ids = detections.image_ids
    is_main = np.diff(ids, prepend=ids[:1] - 1) != 0
    listed = np.array(truth.get_img_ids(), np.int64)
    strangers = np.setdiff1d(ids[is_main], listed)
    if len(strangers):
        raise DataError(
            f"{len(strangers)} images with detections are not in {annotations}, "
            f"among them {', '.join(map(str, strangers[:5]))}",
            hint="score them against the annotations they belong to: --data DIR, --split",
        )


def _verify(
    scores: Scores,
    annotations: Path,
    detections: Detections,
    image_ids: NDArray[np.int64] | None,
) -> None:
    """Compare with pycocotools, the judge."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth = COCO()
        truth.dataset = json.loads(annotations.read_bytes())
        for entry in truth.dataset["annotations"]:
            entry.setdefault("iscrowd", 0)  # pycocotools needs it, COCO's format does not
        truth.createIndex()
        if len(detections.scores):
            found = truth.loadRes(detections.table())
        else:
            found = COCO()
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        judge = COCOeval(truth, found, "bbox")
        if image_ids is not None:
            judge.params.imgIds = sorted(image_ids.tolist())
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    for (name, ours), theirs in zip(scores.figures.items(), judge.stats.tolist(), strict=True):
        if abs(ours - theirs) > VERIFY_TOLERANCE:
            raise IntegrityError(
                f"{name} is {ours!r} by hotcoco and {theirs!r} by pycocotools",
                hint="please report it with the two files; pycocotools' figure is the reference",
            )
