"""Annotations are untrusted: what is refused, dropped or mended (FAULTS 17 to 21)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssdctl.data.coco import check, class_names, read
from ssdctl.errors import DataError


def document(**changes: Any) -> dict[str, Any]:
    return {
        "images": [
            {"id": 7, "file_name": "a.jpg", "width": 100, "height": 50},
            {"id": 3, "file_name": "b.jpg", "width": 100, "height": 50},
        ],
        "annotations": [
            {"id": 1, "image_id": 3, "category_id": 90, "bbox": [10, 10, 20, 20], "iscrowd": 0},
            {"id": 2, "image_id": 3, "category_id": 12, "bbox": [0, 0, 5, 5], "iscrowd": 1},
        ],
        "categories": [{"id": 90, "name": "brush"}, {"id": 12, "name": "sign"}],
        **changes,
    }


def written(folder: Path, content: Any) -> Path:
    path = folder / "annotations.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_labels_are_ranks_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, document())
    annotations = read(path)
    boxes, findings = check(annotations, path)
    assert [c.name for c in class_names(annotations)] == ["brush", "sign"]
    assert boxes.labels.tolist() == [1, 2]
    assert boxes.starts.tolist() == [0, 0, 2]
    assert boxes.ltrb.tolist() == [[10, 10, 30, 30], [0, 0, 5, 5]]
    assert boxes.is_crowd.tolist() == [False, True]
    assert findings == []


@pytest.mark.parametrize("cut", [1, 20, 200, 400])
def test_truncated_json_is_refused_with_its_place(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, json.dumps(document())[:-cut])
    with pytest.raises(DataError, match=str(path)):
        read(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_numbers_that_json_lacks_are_refused(tmp_path: Path, number: str) -> None:
    path = written(
        tmp_path, json.dumps(document()).replace("[10, 10, 20, 20]", f"[10, {number}, 1, 1]")
    )
    with pytest.raises(DataError):
        check(read(path), path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": [{"id": 7, "file_name": "a.jpg", "width": 9, "height": 9}] * 2}, "duplicate image ids: 7"),
        ({"annotations": [{"id": 5, "image_id": 3, "category_id": 12, "bbox": [0, 0, 5, 5]}] * 2}, "duplicate annotation ids: 5"),
        ({"annotations": [{"id": 5, "image_id": 4, "category_id": 12, "bbox": [0, 0, 5, 5]}]}, "images that the file does not list: 5"),
        ({"annotations": [{"id": 5, "image_id": 3, "category_id": 1, "bbox": [0, 0, 5, 5]}]}, "categories that the file does not list: 5"),
        ({"categories": [], "annotations": []}, "no categories"),
        ({"images": [{"id": 3, "file_name": "../x.jpg", "width": 9, "height": 9}]}, "no plain path"),
        ({"images": [{"id": 3, "file_name": "/etc/passwd", "width": 9, "height": 9}]}, "no plain path"),
        ({"images": [{"id": 3, "file_name": "x.jpg", "width": 0, "height": 9}]}, "size 0 x 9"),
    ],
)  # fmt: skip
def test_broken_references_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = written(tmp_path, document(**changes))
    with pytest.raises(DataError, match=words):
        check(read(path), path)


def test_wrong_type_names_the_place(tmp_path: Path) -> None:
    path = written(tmp_path, document(categories=[{"id": "x", "name": "y"}]))
    with pytest.raises(DataError, match=r"\$\.categories\[0\]\.id"):
        read(path)


@pytest.mark.parametrize(
    ("bbox", "kept", "kind"),
    [
        ([296.65, 8.33, 1.03, 0], None, "box of no size, dropped"),
        ([5, 5, -1, 5], None, "box of no size, dropped"),
        ([200, 5, 5, 5], None, "box outside its image, dropped"),
        ([-5, 5, 5, 5], None, "box outside its image, dropped"),
        ([90, 40, 20, 20], [90, 40, 100, 50], "box clipped to its image"),
        ([-10, -10, 20, 20], [0, 0, 10, 10], "box clipped to its image"),
        ([90, 40, 10.001, 10], [90, 40, 100, 50], None),
        ([50, 5, 1e-30, 5], None, "box of no size, dropped"),
    ],
)
def test_boxes_are_dropped_or_clipped_and_listed(
    tmp_path: Path, bbox: list[float], kept: list[float] | None, kind: str | None
) -> None:
    entry = {"id": 918, "image_id": 7, "category_id": 12, "bbox": bbox}
    path = written(tmp_path, document(annotations=[entry]))
    boxes, findings = check(read(path), path)
    assert boxes.ltrb.tolist() == ([] if kept is None else [kept])
    assert [f.kind for f in findings] == ([] if kind is None else [kind])
    assert all(f.annotation_id == 918 and f.image_id == 7 for f in findings)
