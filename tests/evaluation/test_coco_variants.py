"""COCO files as labeling tools write them are scored as pycocotools scores a clean file.

The references are CVAT's (datumaro), Roboflow's, Label Studio's, FiftyOne's and MMDetection's
exports: what they put into the header, into optional fields, and how they write numbers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from evaluation import judge

from ssdctl.evaluation.coco_ap import Detections, run_scoring

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
    scores = rng.choice([0.2, 0.5, 0.8, 0.9], len(truth))
    images = [image_id(a["image_id"]) for a in truth]
    classes = [category_id(int(c)) for c in chosen]
    return judge.detections([*zip(images, classes, boxes.tolist(), scores.tolist(), strict=True)])


class Variant(NamedTuple):
    """How a file differs from the base, and what the clean file is if not the base itself."""

    change: Change
    clean: Change | None = None
    image_id: Callable[[int], int] = lambda n: n
    category_id: Callable[[int], int] = lambda n: n


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


def ignored(value: Any) -> Variant:
    """A variant with this value in the fields that scoring does not use."""

    def change(content: Document) -> None:
        content |= dict.fromkeys(("info", "licenses", "type", "videos"), value)
        for table, keys in IGNORED_FIELDS.items():
            for entry in content[table]:
                entry |= dict.fromkeys(keys, value)

    return Variant(change)


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


# What tools write into fields that scoring does not use.
IGNORED_VALUES = (
    *(None, 0, "", "2026", 1.2, [], {}, [[]], [[{}]], [1, 2, 3, 4, 5, 6], [[1, 2]]),
    *({"counts": "abc", "size": [400, 400]}, {"name": ["a", "b"], "1": [1, None]}),
)
IGNORED_FIELDS = {
    "images": ("license", "date_captured", "coco_url", "extra"),
    "annotations": ("segmentation", "attributes", "score", "ignore", "keypoints"),
    "categories": ("keypoints", "color"),
}

VARIANTS: dict[str, Variant] = {
    "plain": Variant(lambda content: None),
    **{f"ignored: {value}": ignored(value) for value in IGNORED_VALUES},
    "ignored: several": field("annotations", "segmentation", *IGNORED_VALUES),
    # Images
    "width a float": field("images", "width", 400.0),
    "height a float": field("images", "height", 400.0),
    "image id a float": field("images", "id", lambda e: float(e["id"])),
    "text with escapes": field("images", "file_name", lambda e: f"{e['id']}-\u00e9\u4e2d \"x\".jpg"),
    # Annotations
    "iscrowd false and true": field("annotations", "iscrowd", lambda e: bool(e["iscrowd"])),
    "iscrowd a float": field("annotations", "iscrowd", lambda e: float(e["iscrowd"])),
    "iscrowd null": field("annotations", "iscrowd", None, clean=lambda _: 0),
    "iscrowd missing": field("annotations", "iscrowd", ..., clean=lambda _: 0),
    "area missing": field("annotations", "area", ...),
    "area null": field("annotations", "area", None),
    "area text": field("annotations", "area", "large"),
    "area beyond floats": field("annotations", "area", 10**400),
    "area missing from some": field("annotations", "area", ..., lambda e: e["area"]),
    "area of the mask": field(
        "annotations", "area", lambda e: e["area"] / 3, clean=lambda e: e["area"] / 3
    ),
    "area 0": field("annotations", "area", 0, clean=lambda _: 0.0),
    "area an integer": field("annotations", "area", lambda e: int(e["area"])),
    "bbox of integers": field("annotations", "bbox", lambda e: [int(v) for v in e["bbox"]]),
    "annotation id a float": field("annotations", "id", lambda e: float(e["id"])),
    "image_id a float": field("annotations", "image_id", lambda e: float(e["image_id"])),
    "category_id a float": field("annotations", "category_id", lambda e: float(e["category_id"])),
    "annotations without a bbox": Variant(without_bbox, those_removed),
    "bbox null or missing": Variant(null_bbox, those_removed),
    # Categories
    "supercategory null": field("categories", "supercategory", None),
    "supercategory empty": field("categories", "supercategory", ""),
    "supercategory a number": field("categories", "supercategory", 0),
    "category id a float": field("categories", "id", lambda e: float(e["id"])),
    "a supercategory as class 0": Variant(with_supercategory),
    "categories backwards": Variant(lambda content: content["categories"].reverse()),
    # Ids
    "annotation ids from 0": renumbered(lambda n: n, lambda n: n, first=0),
    "all ids from 0": renumbered(
        lambda n: n - 1, lambda n: CATEGORY_IDS.index(n), first=0
    ),
    "negative ids": renumbered(lambda n: n - 5, lambda n: n - 6, first=-10),
    "ids of 63 bits": renumbered(lambda n: 2**62 + n, lambda n: 2**61 + n, first=2**60),
    "images backwards": Variant(lambda content: content["images"].reverse()),
}  # fmt: skip


@functools.cache
def reference(clean: str) -> list[float]:
    """pycocotools' metrics on a clean file."""
    found = detections(lambda n: n, lambda n: n)
    return judge.pycocotools_figures(json.loads(clean), found)


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
    scores = run_scoring(judge.read_truth(path), renamed, verify=True)
    expected = reference(json.dumps(clean))
    assert list(scores.metrics.values()) == pytest.approx(expected, abs=1e-12)
    assert 0.1 < scores.metrics["AP"] < 0.95  # a comparison of zeros would show nothing
    by_name = {c.name: c.category_id for c in scores.per_class}
    assert by_name == {f"class {i}": variant.category_id(i) for i in CATEGORY_IDS}
