"""Annotations are untrusted: what is refused, dropped or repaired."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.formats.exports import image_file
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.data.annotations import Annotations
from ssdctl.data.check import DROPPED_BOXES, Checked
from ssdctl.data.check import check as check_annotations
from ssdctl.data.formats import coco, yolo
from ssdctl.errors import DataError

BEYOND_64_BITS = (10**30, 2**63, -(2**63) - 1)


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
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a property, not the one around those of other tests."""
    folder = factory.getbasetemp() / "coco"
    folder.mkdir(exist_ok=True)
    return folder


def read(path: Path) -> Annotations:
    return coco.read(path)["train"]


def thing(number: int, image: int = 3, **changes: Any) -> dict[str, Any]:
    """An annotation."""
    return {"id": number, "image_id": image, "category_id": 12, "bbox": [0, 0, 5, 5], **changes}


def check(path: Path) -> Checked:
    return check_annotations(read(path))


def trained(checked: Checked) -> list[list[float]]:
    """The left, top, right and bottom of the boxes that are trained on, in images of 100 x 50."""
    fractions = checked.objects.fractions[checked.objects.is_trained]
    boxes: list[list[float]] = np.round(fractions * [100.0, 50, 100, 50], 3).tolist()
    return boxes


def test_labels_are_ranks_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, document())
    checked = check(path)
    assert [c.name for c in read(path).classes] == ["brush", "sign"]
    assert checked.objects.labels.tolist() == [1, 2]
    assert checked.objects.starts.tolist() == [0, 0, 2]
    assert trained(checked) == [[10, 10, 30, 30], [0, 0, 5, 5]]
    assert checked.objects.is_crowd.tolist() == [False, True]
    assert checked.findings == []


@pytest.mark.parametrize("name", ["images", "annotations", "categories"])
def test_a_table_that_occurs_twice_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    text = json.dumps(document())[:-1] + f',\n\n"{name}" : []}}'
    with pytest.raises(DataError, match=f"annotations.json:3: .*{name}.* line 1"):
        read(written(tmp_path, text))


def test_the_name_of_a_table_may_occur_elsewhere(tmp_path: Path) -> None:
    info = {
        "images": 2,
        "annotations": {"annotations": 2},
        "text": 'a {"images": \\" {',
        "x": "images",
    }
    path = written(tmp_path, {"info": info, **document(), "more": [info]})
    assert len(read(path).file_names) == 2


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_numbers_that_json_lacks_are_refused(tmp_path: Path, number: str) -> None:
    text = json.dumps(document()).replace("[10, 10, 20, 20]", f"[10, {number}, 1, 1]")
    with pytest.raises(DataError, match=r"annotations\.json"):
        read(written(tmp_path, text))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("id", 1.5), ("category_id", 1e300), ("image_id", "x"), ("bbox", [1, "x"])),
        *((k, n) for k in ("id", "image_id", "category_id", "iscrowd") for n in BEYOND_64_BITS),
    ],
)
def test_what_is_not_a_number_of_its_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    content = document()
    content["annotations"][1][key] = value
    with pytest.raises(DataError, match=rf"annotations\[1\]\.{key}"):
        read(written(tmp_path, content))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": [{"id": 7, "file_name": "a.jpg", "width": 9, "height": 9}] * 2}, "duplicate image ids: 7"),
        ({"annotations": [thing(5, image=4)]}, "images that the file does not list: 5 .image 4."),
        ({"categories": [{"id": 12, "name": "a"}, {"id": 12, "name": "b"}]}, "duplicate category ids: 12"),
        ({"categories": [], "annotations": []}, "no categories"),
        ({"images": [{"id": 3, "file_name": "../x.jpg", "width": 9, "height": 9}]}, "not a plain path"),
        ({"images": [{"id": 3, "file_name": "/etc/passwd", "width": 9, "height": 9}]}, "not a plain path"),
        ({"images": [{"id": 3, "file_name": "x.jpg", "width": 0, "height": 9}]}, "size 0 x 9"),
        ({"images": [{"id": 3, "file_name": "x.jpg", "width": 9, "height": 65536}]}, "size 9 x 65536"),
        *(({"images": [{"id": 3, "file_name": "x.jpg", "width": n}]}, "width") for n in BEYOND_64_BITS),
    ],
)  # fmt: skip
def test_broken_references_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = written(tmp_path, document(**changes))
    with pytest.raises(DataError, match=words):
        check(path)


def test_annotation_ids_that_occur_twice_are_renumbered(tmp_path: Path) -> None:
    """Merging tools write them; a published set of 1,500 images has two."""
    entries = [thing(n, image) for n, image in ((5, 3), (5, 7), (1, 3), (5, 3))]
    checked = check(written(tmp_path, document(annotations=entries)))
    assert len(trained(checked)) == 4
    found = [(f.kind, f.image_id, f.annotation_id) for f in checked.findings]
    assert found == [(coco.RENUMBERED, 7, 5), (coco.RENUMBERED, 3, 5)]
    assert len(set(read(tmp_path / "annotations.json").ids.tolist())) == 4


def test_annotations_of_unlisted_categories_are_dropped_and_counted(tmp_path: Path) -> None:
    entries = [thing(n, category_id=c) for n, c in ((1, 12), (2, 999), (3, 90))]
    checked = check(written(tmp_path, document(annotations=entries)))
    assert checked.objects.labels.tolist() == [2, 1]
    (finding,) = checked.findings
    assert finding.kind in DROPPED_BOXES
    assert (finding.image_id, finding.annotation_id) == (3, 2)
    assert "999" in finding.detail


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
    path = written(tmp_path, document(annotations=[thing(918, 7, bbox=bbox)]))
    checked = check(path)
    assert trained(checked) == ([] if kept is None else [kept])
    assert [f.kind for f in checked.findings] == ([] if kind is None else [kind])
    assert all(f.annotation_id == 918 and f.image_id == 7 for f in checked.findings)


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-200, 200),
    st.integers(-150, 150),
    st.sampled_from([0, -0.0, 1e308, -1e308, 5e-324, 100, 50]),
)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=20))
def test_whatever_the_boxes_what_is_kept_can_be_trained_on(
    tmp_path_factory: pytest.TempPathFactory, bboxes: list[tuple[float, ...]]
) -> None:
    """Kept boxes have a size and are inside; all others are listed; as by the plain rule."""
    entries = [thing(i, (3, 7)[i % 2], bbox=bbox) for i, bbox in enumerate(bboxes)]
    path = written(shared_folder(tmp_path_factory), document(annotations=entries))
    objects, findings, _ = check(path)
    fractions = objects.fractions[objects.is_trained]
    assert (fractions[:, 2:] > fractions[:, :2]).all()
    assert (fractions >= 0).all()
    assert (fractions <= 1).all()
    assert objects.starts[-1] == len(objects.boxes)
    dropped = {f.annotation_id for f in findings if "dropped" in f.kind}
    assert len(fractions) + len(dropped) == len(bboxes)
    for i, (x, y, w, h) in enumerate(bboxes):
        inside = max(x, 0) < min(x + w, 100) and max(y, 0) < min(y + h, 50)
        if not (inside and w > 0 and h > 0):
            assert i in dropped


@given(st.data())
def test_any_damage_is_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes changed anywhere: read as something, or refused with the file's name; never a bug."""
    content = bytearray(json.dumps(document()).encode())
    places = st.integers(0, len(content) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        content[place] = value
    path = shared_folder(tmp_path_factory) / "damaged.json"
    path.write_bytes(content[: data.draw(places) + 1] if data.draw(st.booleans()) else content)
    try:
        check(path)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_boxes_come_image_by_image_in_the_files_order(tmp_path: Path) -> None:
    entries = [thing(100 - i, (3, 7)[i % 2], bbox=[i, 0, 5, 5]) for i in range(40)]
    path = written(tmp_path, document(annotations=entries))
    objects = check(path).objects
    assert objects.starts.tolist() == [0, 20, 40]
    assert objects.boxes[:, 0].tolist() == [*range(1, 40, 2), *range(0, 40, 2)]


def test_ids_count_from_0(tmp_path: Path) -> None:
    """As Label Studio's do; and its files may begin with a byte order mark."""
    content = document(categories=[{"id": 0, "name": "brush"}, {"id": 1, "name": "sign"}])
    for number, entry in enumerate(content["annotations"]):
        entry |= {"id": number, "category_id": number, "image_id": 0}
    content["images"] = [{"id": 0, "file_name": "a.jpg", "width": 100, "height": 50}]
    path = written(tmp_path, "\ufeff" + json.dumps(content))
    assert check(path).objects.labels.tolist() == [1, 2]


@pytest.mark.parametrize("bbox", [None, [], ...])
def test_annotations_without_bbox_are_dropped(tmp_path: Path, bbox: Any) -> None:
    content = document()
    content["annotations"][0]["bbox"] = bbox
    if bbox is ...:
        del content["annotations"][0]["bbox"]
    checked = check(written(tmp_path, content))
    assert trained(checked) == [[0, 0, 5, 5]]
    assert [(f.annotation_id, "dropped" in f.kind) for f in checked.findings] == [(1, True)]
    assert len(checked.objects.boxes) == 1


def test_a_supercategory_without_boxes_is_not_a_class(tmp_path: Path) -> None:
    """Roboflow lists the project's name as category 0."""
    categories = [
        {"id": 0, "name": "parts", "supercategory": "none"},
        {"id": 90, "name": "brush", "supercategory": "parts"},
        {"id": 12, "name": "sign", "supercategory": "parts"},
    ]
    annotations = read(written(tmp_path, document(categories=categories)))
    assert [c.name for c in annotations.classes] == ["brush", "sign"]
    assert "parts" in annotations.notes[0]
    used = document(categories=categories)
    used["annotations"][0]["category_id"] = 0
    annotations = read(written(tmp_path, used))
    assert [c.name for c in annotations.classes] == ["parts", "brush", "sign"]


def test_entries_of_one_file_are_merged(tmp_path: Path) -> None:
    """As in merged datasets: each would have the other's objects as background."""
    images = [
        {"id": n, "file_name": name, "width": 100, "height": 50}
        for n, name in ((7, "a.jpg"), (9, "b.jpg"), (3, "a.jpg"))
    ]
    annotations = read(written(tmp_path, document(images=images)))
    assert annotations.image_ids.tolist() == [7, 9]
    assert [f.image_id for f in annotations.findings] == [3]
    assert annotations.rows.tolist() == [0, 0]
    images[2]["width"] = 101
    with pytest.raises(DataError, match=r"a\.jpg"):
        read(written(tmp_path, document(images=images)))


def test_many_classes_take_linear_time(tmp_path: Path) -> None:
    """It was a minute, quadratic."""
    names = [
        {"id": n, "name": f"class {n}", "supercategory": f"class {n + 1}"} for n in range(30_000)
    ]
    path = written(tmp_path, document(categories=names, annotations=[]))
    start = time.process_time()
    assert len(read(path).classes) == 30_000
    (tmp_path / "data.yaml").write_text(f"names: {json.dumps([c['name'] for c in names])}\n")
    image_file(tmp_path / "images/a.jpg")
    assert len(yolo.read(tmp_path)["train"].classes) == 30_000
    assert time.process_time() - start < 5
