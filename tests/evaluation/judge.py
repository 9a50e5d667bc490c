"""Detections for tests, and pycocotools' metrics of them."""

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ssdctl.data.annotations import Annotations, SplitFiles
from ssdctl.data.formats import coco
from ssdctl.evaluation.coco_ap import Detections, ground_truth


def read_truth(path: Path) -> Annotations:
    """Read the annotations to score against from a file in COCO's format."""
    return ground_truth(coco.read_files({"val": SplitFiles([path.parent], path)})["val"])


Row = tuple[int, int, list[float], float]  # image, category, box, score


def write_annotations(
    folder: Path, objects: Sequence[dict[str, Any]], classes: dict[int, str]
) -> Path:
    """Write objects on the images 0 to 3 of 300 x 300 pixels as a file in COCO's format."""
    entries = [
        {"id": n, "area": o["bbox"][2] * o["bbox"][3], "iscrowd": 0, **o}
        for n, o in enumerate(objects, 1)
    ]
    images = [{"id": i, "width": 300, "height": 300, "file_name": f"{i}.jpg"} for i in range(4)]
    categories = [{"id": number, "name": name} for number, name in classes.items()]
    path = folder / "annotations.json"
    path.write_text(
        json.dumps({"images": images, "annotations": entries, "categories": categories})
    )
    return path


def detections(rows: Sequence[Row]) -> Detections:
    image_ids, category_ids, boxes, scores = zip(*rows, strict=True) if rows else ((),) * 4
    return Detections(
        np.array(image_ids, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        np.array(scores, np.float64),
        np.array(category_ids, np.int64),
    )


def pycocotools_figures(
    document: dict[str, Any], found: Detections, image_ids: NDArray[np.int64] | None = None
) -> list[float]:
    scoring = matched(document, found, image_ids)
    with contextlib.redirect_stdout(io.StringIO()):
        scoring.accumulate()
        scoring.summarize()
    return scoring.stats.tolist()


def matched(
    document: dict[str, Any], found: Detections, image_ids: NDArray[np.int64] | None = None
) -> Any:
    """Return pycocotools' COCOeval after it matched the detections."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth, results = COCO(), COCO()
        truth.dataset, results.dataset = document, {**document, "annotations": []}
        truth.createIndex()
        results.createIndex()
        if rows := found.to_coco():
            results = truth.loadRes(rows)
        scoring = COCOeval(truth, results, "bbox")
        if image_ids is not None:
            scoring.params.imgIds = image_ids.tolist()
        scoring.evaluate()
    return scoring


def f1_of(scoring: Any, category_id: int) -> Callable[[float], float | None]:
    """Return a class's F1 at IoU 0.5 of detections above a score; None without objects."""
    found = [
        entry for entry in scoring.evalImgs
        if entry and (entry["category_id"], entry["aRng"]) == (category_id, [0, 1e10])
    ]  # fmt: skip
    count = sum(int((~np.array(entry["gtIgnore"], bool)).sum()) for entry in found)
    columns = [(e["dtScores"], e["dtMatches"][0] > 0, e["dtIgnore"][0] > 0) for e in found]

    def f1(limit: float) -> float | None:
        right = seen = 0
        for scores, is_match, is_ignored in columns:
            is_counted = (np.array(scores) > limit) & ~is_ignored
            right, seen = right + int((is_match & is_counted).sum()), seen + int(is_counted.sum())
        return 2 * right / (seen + count) if count else None

    return f1


def image_counts(document: dict[str, Any], found: Detections) -> dict[int, tuple[int, int]]:
    """Return how many objects of each image are found at IoU 0.5, and how many errors it has."""
    counts = {image["id"]: (0, 0) for image in document["images"]}
    for entry in matched(document, found).evalImgs:
        if entry is not None and entry["aRng"] == [0, 1e10]:
            is_hit = (entry["dtMatches"][0] > 0) & ~entry["dtIgnore"][0].astype(bool)
            is_wrong = (entry["dtMatches"][0] == 0) & ~entry["dtIgnore"][0].astype(bool)
            is_missed = (entry["gtMatches"][0] == 0) & ~np.array(entry["gtIgnore"], bool)
            hits, errors = counts[entry["image_id"]]
            wrong = int(is_wrong.sum() + is_missed.sum())
            counts[entry["image_id"]] = (hits + int(is_hit.sum()), errors + wrong)
    return counts
