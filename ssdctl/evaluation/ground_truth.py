"""The annotations that detections are scored against, as this package's reader parsed them.

    truth = read_ground_truth(Path("prepared/index-val.arrow"))     # or instances_val2017.json

The user's file itself never reaches a scoring engine: engines are stricter than the reader about
fields that scoring does not use, and pycocotools mishandles an annotation id of 0. Torch-free.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED, UNLISTED, Annotations
from ssdctl.data.classes import ClassName
from ssdctl.data.split_files import SplitFiles
from ssdctl.errors import DataError
from ssdctl.runtime.printable import listed

MAX_DROPPED = 0.05  # of the objects; as `prepare` accepts
logger = logging.getLogger(__name__)


class BoxColumns(NamedTuple):
    """M annotated boxes, unclipped."""

    image_ids: NDArray[np.int64]  # M
    category_ids: NDArray[np.int64]  # M
    bbox: NDArray[np.float64]  # M x 4: left, top, width, height in pixels
    area: NDArray[np.float64]  # M, square pixels; width * height if the file gives none
    is_crowd: NDArray[np.bool_]  # M


class GroundTruth(NamedTuple):
    """N images, C classes and M annotated boxes of a split, in the order of the file."""

    path: Path
    image_ids: NDArray[np.int64]  # N
    file_names: list[str]  # N
    sizes: NDArray[np.int64]  # N x 2: width, height in pixels
    classes: list[ClassName]  # C
    boxes: BoxColumns  # M

    @property
    def classes_by_id(self) -> list[ClassName]:
        """The classes by ascending category id, as the figures of scoring are ordered."""
        return sorted(self.classes, key=lambda c: c.id or 0)

    @property
    def annotated_image_ids(self) -> NDArray[np.int64]:
        """The ids of the images that have annotations, in the order of the file."""
        return self.image_ids[np.isin(self.image_ids, self.boxes.image_ids)]


def read_ground_truth(path: Path) -> GroundTruth:
    """Read the annotations of a split.

    Args:
        path: An index of a store, or an annotation file in COCO's format.

    Raises:
        DataError: The file cannot be read, is not in COCO's format, or its ids are not unique or
            refer to entries that it does not list.
    """
    if path.suffix == ".arrow":
        from ssdctl.data.index import read_annotations  # late: pyarrow

        return ground_truth(read_annotations(path))
    from ssdctl.data.formats import coco

    files = SplitFiles(path.parent, path)
    return ground_truth(coco.read_files({"val": files})["val"])


def ground_truth(annotations: Annotations) -> GroundTruth:
    """Return what detections are scored against: every object that has a box.

    Raises:
        DataError: Over 5% of the objects are of categories that the files do not list.
    """
    _report_unlisted(annotations)
    has_box = ~np.isnan(annotations.boxes).any(axis=1)
    bbox, areas = annotations.boxes[has_box], annotations.areas[has_box]
    category_ids = np.array([c.id for c in annotations.classes], np.int64)
    return GroundTruth(
        path=annotations.origin,
        image_ids=annotations.image_ids,
        file_names=annotations.file_names,
        sizes=annotations.sizes,
        classes=annotations.classes,
        boxes=BoxColumns(
            annotations.image_ids[annotations.rows[has_box]],
            category_ids[annotations.labels[has_box] - 1],
            bbox,
            np.where(np.isnan(areas), bbox[:, 2] * bbox[:, 3], areas),
            annotations.is_crowd[has_box],
        ),
    )


def _report_unlisted(annotations: Annotations) -> None:
    """Refuse or warn of objects that the reader dropped; of an index, `prepare` did so."""
    unlisted = [f for f in annotations.findings if f.kind == UNLISTED]
    if not unlisted:
        return
    ids = listed([f"{f.annotation_id} ({f.detail})" for f in unlisted], MAX_NAMED)
    problem = f"{annotations.origin}: annotations of categories that it does not list: {ids}"
    if len(unlisted) > MAX_DROPPED * (len(annotations.ids) + len(unlisted)):
        raise DataError(problem, hint="list their categories, or remove them")
    logger.warning("%s; they are left out", problem)


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


def dense_ids(truth: GroundTruth) -> DenseIds:
    """Number the images and classes of a split."""
    category_ids = np.array([c.id for c in truth.classes], np.int64)
    return DenseIds(np.sort(truth.image_ids), np.sort(category_ids))


def engine_columns(truth: GroundTruth, ids: DenseIds) -> dict[str, Any]:
    """Return the arguments of `hotcoco.COCO.from_arrays`, with dense ids."""
    order = np.argsort(truth.image_ids)
    return {
        "images": [
            {
                "id": number,
                "file_name": truth.file_names[row],
                "width": int(truth.sizes[row, 0]),
                "height": int(truth.sizes[row, 1]),
            }
            for number, row in enumerate(order)
        ],
        "categories": [
            {"id": n, "name": c.name} for n, c in enumerate(truth.classes_by_id, start=1)
        ],
        "image_ids": ids.images(truth.boxes.image_ids),
        "category_ids": ids.classes(truth.boxes.category_ids),
        "boxes": truth.boxes.bbox,
        "area": truth.boxes.area,
        "iscrowd": truth.boxes.is_crowd,
    }


def coco_document(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns as a COCO document for pycocotools; annotation ids start at 1."""
    rows = zip(
        *(columns[k].tolist() for k in ("image_ids", "category_ids", "boxes", "area", "iscrowd")),
        strict=True,
    )
    annotations = [
        {
            "id": number,
            "image_id": image,
            "category_id": category,
            "bbox": box,
            "area": area,
            "iscrowd": int(crowd),
        }
        for number, (image, category, box, area, crowd) in enumerate(rows, start=1)
    ]
    return {
        "images": columns["images"],
        "categories": columns["categories"],
        "annotations": annotations,
    }
