"""Score detections: pycocotools' definition of AP, computed by hotcoco.

    truth = read_ground_truth(Path("prepared/index-val.arrow"))
    ap = run_scoring(truth, detections).metrics["AP"]

Detections are scored against the annotations as this package's reader parsed them. The user's file
itself never reaches a scoring engine: engines are stricter than the reader about fields that
scoring does not use, and pycocotools mishandles an annotation id of 0.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED, UNLISTED, Annotations, ClassName, class_texts
from ssdctl.data.coco_json import Int64, coco_document, column, decode, read_content
from ssdctl.data.formats.coco import positions
from ssdctl.errors import DataError, IntegrityError
from ssdctl.files import DECODE_ERRORS
from ssdctl.runtime.safe_text import counted, listed

# name: (from precision or recall, IoU threshold, area range, maxDets index) as pycocotools has them
COCO_METRICS: dict[str, tuple[str, float | None, int, int]] = {
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

    @property
    def are_probabilities(self) -> bool:
        """Whether all scores are in 0 to 1, which calibration and suspects require."""
        return bool(((self.scores >= 0) & (self.scores <= 1)).all())

    def to_coco(self, names: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
        """Return COCO's results format, with the images' names if they are given."""
        rows = zip(*(column.tolist() for column in self), strict=True)
        return [
            {"image_id": i, "category_id": c, "bbox": b, "score": s}
            | ({} if names is None else {"file_name": names[i]})
            for i, b, s, c in rows
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
    """The metrics, and the input of `analyze`."""

    metrics: dict[str, float]  # COCO's 12 by name; -1 if there is nothing to measure
    per_class: list[ClassScore]  # by ascending category id
    engine: Any  # hotcoco.COCOeval, evaluated and accumulated; its ids are dense
    table: NDArray[np.float64]  # detections as engines take them; the score is column 5
    truth: Annotations
    image_ids: NDArray[np.int64]  # that were scored, ascending


class _Result(msgspec.Struct, gc=False):
    image_id: Int64 | str
    category_id: Int64
    bbox: tuple[float, float, float, float]
    score: float
    file_name: Any = None


def read_detections(
    path: Path, truth: Annotations | None = None, *, has_ids: bool = True
) -> Detections:
    """Read detections from a file in COCO's results format. Ids may be 139 or 139.0.

    Args:
        truth: Its image ids replace those of the rows, by the `file_name` of all rows, where the
            dataset has no ids: they change when images are added. So do ids that are text.
        has_ids: Whether the files of the dataset have ids of the images.

    Raises:
        DataError: Not a COCO results file; or only some of the named images are in `truth`.
    """
    problem, content = "", read_content(path)
    try:
        rows = decode(content, list[_Result])
        is_named = all(isinstance(row.file_name, str) for row in rows)
        uses_names = not has_ids or any(isinstance(row.image_id, str) for row in rows)
        if rows and truth is not None and is_named:
            names = {row.file_name for row in rows}
            ids = _ids_by_name(path, names, truth, is_required=uses_names)
            others = [row for row in rows if ids.get(row.file_name, row.image_id) != row.image_id]
            if others and not uses_names:
                text = "%s: image ids of other images than file_name, such as %s with %s: ids count"
                log.warning(text, path, others[0].file_name, others[0].image_id)
            for row in others if uses_names else ():
                row.image_id = ids[row.file_name]
        elif rows and not has_ids:
            log.warning(
                "%s: its rows have no file_name, and %s has no image ids: N is taken for the Nth "
                "image, sorted by name, as long as no image is added or removed",
                path,
                truth.origin if truth else "the dataset",
            )
        if texts := [row.image_id for row in rows if isinstance(row.image_id, str)]:
            problem = f"the image id {texts[0][:60]!r} is not a number"
            rows = []
        boxes = np.array([r.bbox for r in rows], np.float64).reshape(-1, 4)
        scores = np.array([r.score for r in rows], np.float64)
        if not (np.isfinite(boxes).all() and np.isfinite(scores).all()):
            problem = "numbers that are not finite"
    except DECODE_ERRORS as error:
        problem = str(error).replace("`", "")
    if problem:
        hint = 'expected [{"image_id", "category_id", "bbox", "score"}, ...]'
        raise DataError(f"{path}: not in COCO's results format: {problem}", hint=hint)
    image_ids, category_ids = column(rows, "image_id"), column(rows, "category_id")
    return Detections(image_ids, boxes, scores, category_ids)


def _ids_by_name(
    path: Path, names: set[str], truth: Annotations, *, is_required: bool
) -> dict[str, int]:
    """Return the image id of each name, which may have more leading folders, or fewer.

    Args:
        is_required: Raise DataError if some names mean an image, and others none or the same one.
    """
    ids = dict(zip(truth.file_names, truth.image_ids.tolist(), strict=True))
    ends: dict[str, list[str]] = {}
    for name in ids:
        ends.setdefault(posixpath.basename(name), []).append(name)

    def meant(name: str) -> list[str]:
        if name in ids:
            return [name]
        near = ends.get(posixpath.basename(name), [])
        within = [own for own in near if name.endswith(f"/{own}")]
        longer = [own for own in near if own.endswith(f"/{name}")] or near
        return [max(within, key=len)] if within else longer

    found = {name: near[0] for name in names if len(near := meant(name)) == 1}
    counts = collections.Counter(found.values())
    others = sorted(name for name in names if counts[found.get(name, "")] != 1)
    if is_required and others and any(map(meant, names)):
        raise DataError(
            f"{path}: {counted(len(others), 'image')} with detections are not in {truth.origin}, "
            f"or several have the name: {listed(others, MAX_NAMED)}",
            hint="score them against the annotations they belong to: --data DIR, --split",
        )
    return {name: ids[near] for name, near in found.items()}


def read_ground_truth(path: Path) -> Annotations:
    """Read the annotations to score against from the index of a store.

    Raises:
        DataError: It cannot be read, or is damaged.
    """
    from ssdctl.data.index import read_annotations  # late: pyarrow

    return ground_truth(read_annotations(path))


def ground_truth(annotations: Annotations) -> Annotations:
    """Return annotations to score against: every object that has a box, with its area.

    Classes with equal names get distinct ones.

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
    names = zip(scored.classes, class_texts(scored.classes), strict=True)
    return scored._replace(
        areas=np.where(np.isnan(areas), width * height, areas),
        classes=[ClassName(entry.id, name) for entry, name in names],
    )


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

    # Engines get images numbered from 0 and classes from 1. Scoring breaks ties by the order of the
    # ids, so the numbering keeps it; any 64-bit id becomes one that every engine stores exactly.
    rows = np.argsort(truth.image_ids)
    all_ids = truth.image_ids[rows]
    classes = sorted(truth.classes, key=lambda c: c.id or 0)
    category_ids = np.array([c.id for c in classes], np.int64)
    scored = all_ids if image_ids is None else np.unique(image_ids)
    objects: dict[str, Any] = {
        "image_ids": positions(all_ids, truth.object_image_ids),
        "category_ids": 1 + positions(category_ids, truth.object_category_ids),
        "boxes": truth.boxes,
        "area": truth.areas,
        "iscrowd": truth.is_crowd,
    }
    images = [(n, truth.file_names[row], *truth.sizes[row].tolist()) for n, row in enumerate(rows)]
    categories = [(n, c.name) for n, c in enumerate(classes, 1)]
    tables = coco_document(images, categories, ())
    annotations = hotcoco.COCO.from_arrays(tables["images"], tables["categories"], **objects)
    table = _detection_table(detections, all_ids, category_ids, truth.origin)
    engine = evaluated(annotations, table, positions(all_ids, scored).tolist())
    engine.accumulate()
    metrics = {name: _metric(engine.eval, *spec) for name, spec in COCO_METRICS.items()}
    if verify:
        columns = (column.tolist() for column in objects.values())
        document = coco_document(images, categories, zip(*columns, strict=True))
        _verify(metrics, document, table, engine.params.img_ids)
    per_class = [_class_score(engine, k, entry) for k, entry in enumerate(classes)]
    return Scoring(metrics, per_class, engine, table, truth, scored)


def _class_score(engine: Any, k: int, entry: ClassName) -> ClassScore:
    own = {"precision": engine.eval["precision"][:, :, [k]]}
    values = (_metric(own, *COCO_METRICS[name]) for name in ClassScore._fields[2:])
    return ClassScore(int(entry.id or 0), entry.name, *values)


def evaluated(annotations: Any, table: NDArray[np.float64], image_numbers: list[int]) -> Any:
    """Return hotcoco's engine after it matched detections with the objects of some images."""
    import hotcoco

    engine: Any = hotcoco.COCOeval(annotations, annotations.load_res(table), "bbox")
    engine.params.img_ids = image_numbers
    engine.evaluate()
    return engine


def _detection_table(
    detections: Detections,
    image_ids: NDArray[np.int64],
    category_ids: NDArray[np.int64],
    origin: Path,
) -> NDArray[np.float64]:
    """Return a K x 7 table of the detections of listed categories, with numbers for ids."""
    images = positions(image_ids, detections.image_ids)
    if len(unlisted := np.unique(detections.image_ids[images < 0])):
        raise DataError(
            f"{len(unlisted)} images with detections are not in {origin}, "
            f"among them {', '.join(map(str, unlisted[:5]))}",
            hint="score them against the annotations they belong to: --data DIR, --split",
        )
    labels = 1 + positions(category_ids, detections.category_ids)
    if num_unlisted := int((labels < 1).sum()):
        log.warning(
            "%d detections are of categories that %s does not list and are ignored; "
            "it lists the ids %s, ...",
            num_unlisted,
            origin,
            ", ".join(map(str, category_ids[:5].tolist())),
        )
    table = np.column_stack([images, detections.boxes, detections.scores, labels])
    return table[labels > 0] if num_unlisted else table


def _metric(
    curves: Mapping[str, Any], source: str, iou: float | None, area: int, max_dets: int
) -> float:
    values = curves[source]
    if iou is not None:
        values = values[np.isclose(IOU_THRESHOLDS, iou)]
    values = values[..., area, max_dets]
    measured = values[values > -1]
    return float(np.mean(measured)) if measured.size else -1.0


def _verify(
    metrics: dict[str, float],
    document: dict[str, Any],
    table: NDArray[np.float64],
    image_numbers: list[int],
) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth, detections = COCO(), COCO()
        truth.dataset, detections.dataset = document, {**document, "annotations": []}
        truth.createIndex()
        detections.createIndex()
        if len(table):
            detections = truth.loadRes(table)
        reference = COCOeval(truth, detections, "bbox")
        reference.params.imgIds = image_numbers
        reference.evaluate()
        reference.accumulate()
        reference.summarize()
    for (name, metric), expected in zip(metrics.items(), reference.stats.tolist(), strict=True):
        if abs(metric - expected) > VERIFY_TOLERANCE:
            raise IntegrityError(
                f"{name} is {metric!r} by hotcoco and {expected!r} by pycocotools",
                hint="please report it with the two files; pycocotools' metric is the reference",
            )
