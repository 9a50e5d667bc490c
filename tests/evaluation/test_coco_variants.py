"""COCO files as labeling tools write them are scored as pycocotools scores a clean file.

The references are CVAT's (datumaro), Roboflow's, Label Studio's, FiftyOne's and MMDetection's
exports: what they put into the header, into optional fields, and how they write numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import TINY_RUN, Result
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ssdctl.data.shapes import generate
from ssdctl.evaluation.coco_ap import FIGURES, Detections, read_ground_truth, run_scoring

Document = dict[str, Any]
Change = Callable[[Document], None]
NUM_IMAGES, NUM_BOXES = 8, 30
CATEGORY_IDS = (2, 5, 11)
ABSENT = object()


def base() -> Document:
    """A clean file: three classes, crowds, objects of all sizes, two images without objects."""
    rng = np.random.default_rng(3)
    annotations = []
    for number in range(NUM_BOXES):
        size = rng.choice([12.0, 50.0, 150.0], 2)
        left, top = (rng.integers(0, 400 - side) for side in size)
        annotations.append(
            {
                "id": number + 1,
                "image_id": int(rng.integers(1, NUM_IMAGES - 1)),
                "category_id": int(rng.choice(CATEGORY_IDS)),
                "bbox": [float(left), float(top), float(size[0]), float(size[1])],
                "area": float(size.prod()),
                "iscrowd": int(number % 9 == 0),
            }
        )
    return {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "width": 400, "height": 400}
            for i in range(1, NUM_IMAGES + 1)
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": f"class {i}"} for i in CATEGORY_IDS],
    }


def detections(image_id: Callable[[int], int], category_id: Callable[[int], int]) -> Detections:
    """Detections near the objects of `base`, with ties of scores, some of the wrong class."""
    rng = np.random.default_rng(4)
    truth = base()["annotations"] * 3
    boxes = np.array([a["bbox"] for a in truth])
    boxes += rng.normal(0, 0.1, boxes.shape) * boxes[:, [2, 3, 2, 3]]
    categories = [a["category_id"] for a in truth]
    is_wrong = rng.random(len(truth)) < 0.2
    chosen = np.where(is_wrong, rng.choice(CATEGORY_IDS, len(truth)), categories)
    return Detections(
        np.array([image_id(a["image_id"]) for a in truth], np.int64),
        boxes,
        rng.choice([0.2, 0.5, 0.8, 0.9], len(truth)),
        np.array([category_id(int(c)) for c in chosen], np.int64),
    )


class Variant(NamedTuple):
    """How a file differs from the base, and what the clean file is if not the base itself."""

    change: Change
    clean: Change | None = None
    image_id: Callable[[int], int] = lambda n: n
    category_id: Callable[[int], int] = lambda n: n


def header(**fields: Any) -> Variant:
    return Variant(lambda content: content.update(copy.deepcopy(fields)))


def field(table: str, key: str, *values: Any, clean: Any = ABSENT) -> Variant:
    """A variant with a field of each entry set to the values in turn; `...` removes it.

    Args:
        clean: A function from an entry to the field's value in the clean file.
    """

    def change(content: Document) -> None:
        for number, entry in enumerate(content[table]):
            value = values[number % len(values)]
            if value is ...:
                entry.pop(key, None)
            else:
                entry[key] = value(entry) if callable(value) else value

    def cleaned(content: Document) -> None:
        for entry in content[table]:
            entry[key] = clean(entry)

    return Variant(change, None if clean is ABSENT else cleaned)


def renumbered(
    image_id: Callable[[int], int], category_id: Callable[[int], int], first: int = 1
) -> Variant:
    """A variant with other ids, in an order of its own; annotation ids count from `first`."""

    def change(content: Document) -> None:
        for image in content["images"]:
            image["id"] = image_id(image["id"])
        for category in content["categories"]:
            category["id"] = category_id(category["id"])
        for number, entry in enumerate(content["annotations"]):
            entry["id"] = first + number
            entry["image_id"] = image_id(entry["image_id"])
            entry["category_id"] = category_id(entry["category_id"])

    return Variant(change, image_id=image_id, category_id=category_id)


def whole_file(function: Change, clean: Change | None = None) -> Variant:
    return Variant(function, clean)


def without_bbox(content: Document) -> None:
    for number in (3, 10):
        content["annotations"][number] |= {"bbox": [], "area": 0, "iscrowd": 0}


def those_removed(content: Document) -> None:
    del content["annotations"][10], content["annotations"][3]


def null_bbox(content: Document) -> None:
    content["annotations"][3] |= {"bbox": None, "segmentation": [[1, 2, 3, 4, 5, 6]]}
    del content["annotations"][10]["bbox"]


def with_supercategory(content: Document) -> None:
    """As Roboflow does: the project is category 0, and no object is of it."""
    for category in content["categories"]:
        category["supercategory"] = "project"
    content["categories"].insert(0, {"id": 0, "name": "project", "supercategory": "none"})


POLYGON = [1.0, 1.0, 5.0, 1.0, 5.0, 5.0]
RLE = {"counts": "abc", "size": [400, 400]}

VARIANTS: dict[str, Variant] = {
    "plain": header(),
    # Headers
    "info of CVAT": header(
        info={"contributor": "", "date_created": "", "description": "", "url": "", "version": "",
              "year": ""},
        licenses=[{"name": "", "id": 0, "url": ""}],
    ),
    "info of Roboflow": header(
        info={"year": "2026", "version": "3", "contributor": "", "date_created": "2026-01-01"},
        licenses=[{"id": 1, "url": "https://example.org", "name": "CC BY 4.0"}],
    ),
    "info of Label Studio": header(
        info={"year": 2026, "version": "1.0", "contributor": "Label Studio"}, licenses=[]
    ),
    "info null": header(info=None),
    "info empty": header(info={}),
    "info a list": header(info=[]),
    "info text": header(info="exported"),
    "info year a float": header(info={"year": 2026.0}),
    "info version a number": header(info={"version": 1.2}),
    "info nested": header(info={"contributor": {"name": ["a", "b"]}}),
    "licenses null": header(licenses=None),
    "licenses text": header(licenses="CC0"),
    "licenses with text ids": header(licenses=[{"id": "1", "name": None, "url": None}]),
    "licenses nested": header(licenses=[[{}]]),
    "type": header(type="instances"),
    "unknown tables": header(videos=[], tracks=None, tag_categories=[{"id": 1}]),
    "segment_info": header(segment_info=[]),
    # Images
    "date_captured 0": field("images", "date_captured", 0),
    "date_captured null": field("images", "date_captured", None),
    "date_captured a list": field("images", "date_captured", []),
    "license text": field("images", "license", "1"),
    "license null": field("images", "license", None),
    "license 0": field("images", "license", 0),
    "coco_url 0": field("images", "coco_url", 0),
    "flickr_url null": field("images", "flickr_url", None),
    "image extra": field("images", "extra", {"name": "a.jpg", "user_tags": ["x"]}),
    "image attributes": field("images", "attributes", {}, None),
    "width a float": field("images", "width", 400.0),
    "height a float": field("images", "height", 400.0),
    "image id a float": field("images", "id", lambda e: float(e["id"])),
    "text with escapes": field("images", "file_name", lambda e: f"{e['id']}-\u00e9\u4e2d \"x\".jpg"),
    # Annotations
    "segmentation flat": field("annotations", "segmentation", POLYGON),
    "segmentation empty": field("annotations", "segmentation", []),
    "segmentation nested empty": field("annotations", "segmentation", [[]]),
    "segmentation null": field("annotations", "segmentation", None),
    "segmentation text": field("annotations", "segmentation", ""),
    "segmentation of two numbers": field("annotations", "segmentation", [[1, 2]]),
    "segmentation polygons and RLE": field("annotations", "segmentation", [POLYGON], RLE),
    "segmentation RLE without counts": field("annotations", "segmentation", {"size": [4, 4]}),
    "iscrowd false and true": field("annotations", "iscrowd", lambda e: bool(e["iscrowd"])),
    "iscrowd a float": field("annotations", "iscrowd", lambda e: float(e["iscrowd"])),
    "iscrowd null": field("annotations", "iscrowd", None, clean=lambda _: 0),
    "iscrowd missing": field("annotations", "iscrowd", ..., clean=lambda _: 0),
    "area missing": field("annotations", "area", ...),
    "area null": field("annotations", "area", None),
    "area text": field("annotations", "area", "large"),
    "area missing from some": field("annotations", "area", ..., lambda e: e["area"]),
    "area of the mask": field(
        "annotations", "area", lambda e: e["area"] / 3, clean=lambda e: e["area"] / 3
    ),
    "area 0": field("annotations", "area", 0, clean=lambda _: 0.0),
    "area an integer": field("annotations", "area", lambda e: int(e["area"])),
    "attributes of CVAT": field("annotations", "attributes", {"occluded": False, "rotation": 0.0}),
    "attributes null": field("annotations", "attributes", None),
    "attributes with numbers as names": field("annotations", "attributes", {"1": [1, None]}),
    "score, ignore, keypoints": whole_file(
        lambda content: [a.update(score=None, ignore=0, keypoints=[], num_keypoints=0)
                         for a in content["annotations"]] and None
    ),
    "bbox of integers": field("annotations", "bbox", lambda e: [int(v) for v in e["bbox"]]),
    "annotation id a float": field("annotations", "id", lambda e: float(e["id"])),
    "image_id a float": field("annotations", "image_id", lambda e: float(e["image_id"])),
    "category_id a float": field("annotations", "category_id", lambda e: float(e["category_id"])),
    "annotations without a bbox": whole_file(without_bbox, those_removed),
    "bbox null or missing": whole_file(null_bbox, those_removed),
    # Categories
    "supercategory null": field("categories", "supercategory", None),
    "supercategory empty": field("categories", "supercategory", ""),
    "supercategory a number": field("categories", "supercategory", 0),
    "category keypoints": field("categories", "keypoints", None, []),
    "category attributes": field("categories", "attributes", {"color": "#ff0000"}),
    "category id a float": field("categories", "id", lambda e: float(e["id"])),
    "a supercategory as class 0": whole_file(with_supercategory),
    "categories backwards": whole_file(lambda content: content["categories"].reverse()),
    # Ids
    "annotation ids from 0": renumbered(lambda n: n, lambda n: n, first=0),
    "all ids from 0": renumbered(
        lambda n: n - 1, lambda n: CATEGORY_IDS.index(n), first=0
    ),
    "negative ids": renumbered(lambda n: n - 5, lambda n: n - 6, first=-10),
    "ids of 63 bits": renumbered(lambda n: 2**62 + n, lambda n: 2**61 + n, first=2**60),
    "images backwards": whole_file(lambda content: content["images"].reverse()),
}  # fmt: skip


@functools.cache
def reference(clean: str) -> tuple[float, ...]:
    """pycocotools' figures on a clean file."""
    result = detections(lambda n: n, lambda n: n)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = json.loads(clean)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(result.to_coco()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return tuple(evaluation.stats.tolist())


@pytest.mark.parametrize("name", VARIANTS)
def test_figures_are_those_of_a_clean_file(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    content, clean = base(), base()
    variant.change(content)
    if variant.clean is not None:
        variant.clean(clean)
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(content))
    renamed = detections(variant.image_id, variant.category_id)
    scores = run_scoring(read_ground_truth(path), renamed, verify=True)
    expected = reference(json.dumps(clean))
    assert list(scores.figures.values()) == pytest.approx(list(expected), abs=1e-12)
    assert 0.1 < scores.figures["AP"] < 0.95  # a comparison of zeros would show nothing
    by_name = {c.name: c.category_id for c in scores.per_class}
    assert by_name == {f"class {i}": variant.category_id(i) for i in CATEGORY_IDS}


# Several of the changes above at once, as one exporter writes them.
EXPORTERS = {
    "CVAT": ("info of CVAT", "date_captured 0", "license 0", "coco_url 0", "segmentation empty",
             "attributes of CVAT", "annotation id a float", "supercategory empty"),
    "Roboflow": ("info of Roboflow", "extra header", "segmentation flat", "area missing",
                 "a supercategory as class 0"),
    "Label Studio": ("info of Label Studio", "licenses null", "segmentation null",
                     "iscrowd missing", "ignored fields", "annotation ids backwards"),
}  # fmt: skip
MORE = {
    "extra header": header(type=None, tracks=[]),
    "ignored fields": field("annotations", "ignore", 0),
    "annotation ids backwards": field("annotations", "id", lambda e: 10_000 - e["id"]),
}


@pytest.mark.slow(in_ci=True)
def test_exports_train_and_are_scored(cli: Callable[..., Result], tmp_path: Path) -> None:
    """One training on CVAT's file, evaluated on each of the others: all give the same figures."""
    roots = {}
    for exporter, names in EXPORTERS.items():
        root = tmp_path / exporter
        generate(root, num_train=3, num_val=3, seed=0)
        for path in (root / "annotations").glob("*.json"):
            content = json.loads(path.read_text())
            for entry in content["annotations"]:
                entry["iscrowd"] = 0
                entry["area"] = entry["bbox"][2] * entry["bbox"][3]
            for name in names:
                (VARIANTS | MORE)[name].change(content)
            path.write_text(json.dumps(content))
        roots[exporter] = root
    run = tmp_path / "run"
    options = ("--out", run, "--steps", 1, *TINY_RUN.split())
    result = cli("train", "--data", roots["CVAT"], *options)
    assert result.code == 0, result.err
    figures = []
    for root in roots.values():
        options = ("--device", "cpu", "--verify", "--score-threshold", "0.01", "--json")
        result = cli("evaluate", run, "--data", root, *options)
        assert result.code == 0, result.err
        scored = json.loads(result.out)
        assert scored["detections"] > 0
        figures.append([scored[name] for name in FIGURES])
    assert figures[0] == figures[1] == figures[2]
