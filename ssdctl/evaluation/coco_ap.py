"""COCO AP of detections: pycocotools' definition, computed by hotcoco. Torch-free.

    truth = read_ground_truth(Path("prepared/index-val.arrow"))     # or instances_val2017.json
    ap = run_scoring(truth, detections).figures["AP"]

Detections are scored against the annotations as this package's reader parsed them. The user's file
itself never reaches a scoring engine: engines are stricter than the reader about fields that
scoring does not use, and pycocotools mishandles an annotation id of 0.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED, UNLISTED, Annotations, SplitFiles, coco_document
from ssdctl.data.classes import ClassName
from ssdctl.errors import DataError, IntegrityError
from ssdctl.runtime.safe_text import listed

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
MAX_DROPPED = 0.05  # share of objects; as `prepare` accepts
log = logging.getLogger(__name__)


class Detections(NamedTuple):
    """Detections of a split in COCO's format: K rows."""

    image_ids: NDArray[np.int64]  # K
    boxes: NDArray[np.float64]  # K x 4: left, top, width, height in pixels
    scores: NDArray[np.float64]  # K
    category_ids: NDArray[np.int64]  # K

    @classmethod
    def joined(cls, parts: Sequence[Detections]) -> Detections:
        if not parts:
            empty = np.zeros(0, np.int64)
            return cls(empty, np.zeros((0, 4)), np.zeros(0), empty)
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def to_coco(self) -> list[dict[str, Any]]:
        """Return COCO's results format."""
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


class Scoring(NamedTuple):
    """The metrics, and what `ssdctl.evaluation.analysis` computes the rest from."""

    figures: dict[str, float]  # COCO's 12 by name; -1 if there is nothing to measure
    per_class: list[ClassScore]  # by ascending category id
    engine: Any  # hotcoco.COCOeval, evaluated and accumulated; its ids are dense
    truth: Annotations
    image_ids: NDArray[np.int64]  # that were scored, ascending


def read_ground_truth(path: Path) -> Annotations:
    """Read the annotations to score against: an index of a store, or a file in COCO's format.

    Raises:
        DataError: It cannot be read, or its ids are not unique or refer to nothing.
    """
    if path.suffix == ".arrow":
        from ssdctl.data.index import read_annotations  # late: pyarrow

        return ground_truth(read_annotations(path))
    from ssdctl.data.formats import coco

    return ground_truth(coco.read_files({"val": SplitFiles(path.parent, path)})["val"])


def ground_truth(annotations: Annotations) -> Annotations:
    """Return annotations to score against: every object that has a box, with its area.

    Raises:
        DataError: Over 5% of the objects are of categories that the files do not list.
    """
    unlisted = [f for f in annotations.findings if f.kind == UNLISTED]  # an index has none
    if unlisted:
        ids = listed([f"{f.annotation_id} ({f.detail})" for f in unlisted], MAX_NAMED)
        problem = f"{annotations.origin}: annotations of categories that it does not list: {ids}"
        if len(unlisted) > MAX_DROPPED * (len(annotations.ids) + len(unlisted)):
            raise DataError(problem, hint="list their categories, or remove them")
        log.warning("%s; they are left out", problem)
    has_box = np.asarray(~np.isnan(annotations.boxes).any(axis=1), np.bool_)
    scored = annotations.with_objects(has_box)
    areas, (width, height) = scored.areas, scored.boxes[:, 2:].T
    return scored._replace(areas=np.where(np.isnan(areas), width * height, areas))


class DenseIds(NamedTuple):
    """Images numbered from 0 and classes from 1, both by ascending id.

    Scoring breaks ties by the order of the ids, so the numbering keeps it. Any 64-bit id, negative
    ones too, becomes one that every engine stores exactly.
    """

    image_ids: NDArray[np.int64]  # N, ascending: the id of image i
    category_ids: NDArray[np.int64]  # C, ascending: the id of class c + 1

    def images(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of image ids, which all have to be listed."""
        return np.searchsorted(self.image_ids, ids)

    def classes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of category ids; 0 for an id that is not listed."""
        if not len(self.category_ids):
            return np.zeros(len(ids), np.int64)
        place = np.searchsorted(self.category_ids, ids).clip(max=len(self.category_ids) - 1)
        return np.where(self.category_ids[place] == ids, place + 1, 0)


def _classes_by_id(truth: Annotations) -> list[ClassName]:
    """Return the classes by ascending category id, as the engines order AP per class."""
    return sorted(truth.classes, key=lambda c: c.id or 0)


def run_scoring(
    truth: Annotations,
    detections: Detections,
    *,
    image_ids: NDArray[np.int64] | None = None,
    verify: bool = False,
) -> Scoring:
    """Score detections against the annotations of a split, or of some of its images.

    Detections of categories that the annotations do not list are ignored. `verify` scores with
    pycocotools, too.

    Raises:
        DataError: A detection on an image that the annotations do not list.
        IntegrityError: With `verify`, the two differ by more than 1e-12.
    """
    import hotcoco

    _refuse_unlisted_images(truth, detections)
    classes = _classes_by_id(truth)
    ids = DenseIds(np.sort(truth.image_ids), np.array([c.id for c in classes], np.int64))
    scored = ids.image_ids if image_ids is None else np.unique(image_ids)
    columns = _engine_columns(truth, ids)
    table = _table(detections, ids)
    if unlisted := len(detections.scores) - len(table):
        log.warning(
            "%d detections are of categories that %s does not list and are ignored; "
            "it lists the ids %s, ...",
            unlisted,
            truth.origin,
            ", ".join(map(str, ids.category_ids[:5].tolist())),
        )
    annotations = hotcoco.COCO.from_arrays(**columns)
    evaluation: Any = hotcoco.COCOeval(annotations, annotations.load_res(table), "bbox")
    evaluation.params.img_ids = ids.images(scored).tolist()
    evaluation.evaluate()
    evaluation.accumulate()
    precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
    figures = {name: _figure(precision, recall, *spec) for name, spec in FIGURES.items()}
    per_class = [
        ClassScore(
            int(entry.id or 0),
            entry.name,
            *(
                _figure(precision[:, :, [k]], recall, *FIGURES[name])
                for name in ClassScore._fields[2:]
            ),
        )
        for k, entry in enumerate(classes)
    ]
    if verify:
        _verify(figures, _document(columns), table, evaluation.params.img_ids)
    return Scoring(figures, per_class, evaluation, truth, scored)


def _engine_columns(truth: Annotations, ids: DenseIds) -> dict[str, Any]:
    """Return the arguments of `hotcoco.COCO.from_arrays`, with dense ids."""
    images = [
        (number, truth.file_names[row], *truth.sizes[row].tolist())
        for number, row in enumerate(np.argsort(truth.image_ids))
    ]
    categories = [(number, c.name) for number, c in enumerate(_classes_by_id(truth), 1)]
    document = coco_document(images, categories, ())
    return {
        "images": document["images"],
        "categories": document["categories"],
        "image_ids": ids.images(truth.object_image_ids),
        "category_ids": ids.classes(truth.object_category_ids),
        "boxes": truth.boxes,
        "area": truth.areas,
        "iscrowd": truth.is_crowd,
    }


def _document(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns as a document for pycocotools."""
    names = ("image_ids", "category_ids", "boxes", "area", "iscrowd")
    objects = zip(*(np.asarray(columns[name]).tolist() for name in names), strict=True)
    return {**coco_document((), (), objects), **{k: columns[k] for k in ("images", "categories")}}


def _table(detections: Detections, ids: DenseIds) -> NDArray[np.float64]:
    """Return the detections of listed categories with dense ids, K x 7, as COCO's tools take."""
    labels = ids.classes(detections.category_ids)
    table = np.empty((len(labels), 7))
    first, counts = _runs(detections.image_ids)
    table[:, 0] = np.repeat(ids.images(detections.image_ids[first]), counts)
    table[:, 1:5] = detections.boxes
    table[:, 5], table[:, 6] = detections.scores, labels
    return table if labels.all() else table[labels > 0]


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


def _refuse_unlisted_images(truth: Annotations, detections: Detections) -> None:
    first, _ = _runs(detections.image_ids)
    unlisted = np.setdiff1d(detections.image_ids[first], truth.image_ids)
    if len(unlisted):
        raise DataError(
            f"{len(unlisted)} images with detections are not in {truth.origin}, "
            f"among them {', '.join(map(str, unlisted[:5]))}",
            hint="score them against the annotations they belong to: --data DIR, --split",
        )


def _verify(
    figures: dict[str, float],
    document: dict[str, Any],
    table: NDArray[np.float64],
    image_numbers: list[int],
) -> None:
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
    for (name, figure), expected in zip(figures.items(), reference.stats.tolist(), strict=True):
        if abs(figure - expected) > VERIFY_TOLERANCE:
            raise IntegrityError(
                f"{name} is {figure!r} by hotcoco and {expected!r} by pycocotools",
                hint="please report it with the two files; pycocotools' figure is the reference",
            )
