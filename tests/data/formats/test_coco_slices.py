"""Large files are decoded in slices, with the same result and the same errors as at once."""

from __future__ import annotations

import json
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.data.annotations import SplitFiles
from ssdctl.data.formats import _coco_json as coco_json
from ssdctl.data.formats import coco
from ssdctl.data.formats._coco_json import decode_tables, decode_whole
from ssdctl.errors import DataError

SLICE_BYTES = 300


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco_json, "SLICE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(coco_json, "SEARCH_BYTES", 4 * SLICE_BYTES)


@pytest.fixture
def only_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(content: Any) -> Any:
        raise AssertionError("decoded as a whole")

    monkeypatch.setattr(coco_json, "decode_whole", refuse)


def document(
    num_images: int = 40, num_annotations: int = 90, **extra: Callable[[int], Any]
) -> dict[str, Any]:
    """A file of some KB; `extra` fields of the annotations are made by their index."""
    dice = random.Random(num_annotations)
    return {
        "info": {"images": [{"id": 1}], "note": 'a "annotations": [{"id": 7}] in a string'},
        "images": [
            {"id": i, "file_name": f'{i} "}},{{" .jpg', "width": 64, "height": 48}
            for i in range(num_images)
        ],
        "annotations": [
            {"id": i, "image_id": dice.randrange(num_images), "category_id": 1 + i % 3}
            | {"bbox": [dice.uniform(0, 9), 1, 5.5, 7], "area": i / 3, "iscrowd": i % 2}
            | {key: value(i) for key, value in extra.items()}
            for i in range(num_annotations)
        ],
        "categories": [{"id": i, "name": f"c{i}"} for i in (1, 2, 3)],
    }


def encode(content: Any, **options: Any) -> bytes:
    return json.dumps(content, **options).encode()


def assert_same(content: bytes) -> None:
    ours, whole = decode_tables(content), decode_whole(content)
    assert (ours.images, ours.categories) == (whole.images, whole.categories)
    for name in ours.annotations._fields:
        a, b = getattr(ours.annotations, name), getattr(whole.annotations, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=name)


ORDERS = [
    ("info", "images", "annotations", "categories"),
    ("annotations", "images", "categories", "info"),
    ("categories", "annotations", "info", "images"),
]


@pytest.mark.usefixtures("only_slices")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_the_tables(order: tuple[str, ...], indent: int | None) -> None:
    content = {key: document()[key] for key in order}
    del content["info"]  # which repeats the tables' names: see below
    assert_same(encode(content, indent=indent))
    assert_same(b"\xef\xbb\xbf" + encode(content, separators=(",", ":")))


@pytest.mark.usefixtures("only_slices")
@pytest.mark.parametrize(
    "extra",
    [
        {"segmentation": lambda i: [[1.5] * 8, [2] * 6]},
        {"segmentation": lambda i: {"counts": [3, i], "size": [9, 9]}},
        {"attributes": lambda i: [{"id": i, "name": "}, {"}] * 3},
        {"attributes": lambda i: [{"name": "x"}, {"name": "]}"}]},
        {"id": float},
        {"id": str, "bbox": lambda i: ["1.5", 2, "3", 4], "area": lambda i: "n/a" if i else "7"},
        {"iscrowd": lambda i: bool(i % 2), "area": lambda i: None},
        {"bbox": lambda i: None if i % 5 else [1, 2, 3]},
        {"caption": lambda i: "\\" * i + '"' + '"}, {"id": 3'},
    ],
)
def test_what_tools_write_into_annotations(extra: dict[str, Callable[[int], Any]]) -> None:
    content = document(**extra)
    del content["info"]
    assert_same(encode(content))


@pytest.mark.parametrize(
    "change",
    [
        {"images": []},
        {"annotations": []},
        {"annotations": [{"id": 1, "image_id": 2, "category_id": 3}]},
        {"extra": {"annotations": [{"id": 5}] * 300}},
        {"info": {"annotations": [{"id": 5, "image_id": 1, "category_id": 2}] * 300}},
    ],
)
def test_unusual_documents(change: dict[str, Any]) -> None:
    assert_same(encode(document() | change))
    assert_same(encode(change | document()))


def test_the_last_of_equal_keys_counts() -> None:
    first, second = encode(document(num_annotations=50)), encode(document(num_annotations=70))
    content = first[:-1] + b"," + second[1:]
    assert_same(content)
    assert len(decode_tables(content).annotations.id) == 70


@pytest.mark.usefixtures("only_slices")
def test_the_last_of_equal_keys_of_an_annotation_counts() -> None:
    first = (
        '"id": 5, "image_id": 7, "bbox": [1, 1, 1, 1], "category_id": 3, "area": 2, "iscrowd": 1'
    )
    last = '"image_id": 9, "bbox": [%d, 8, 9, 10], "category_id": 2, "area": 5, "iscrowd": 0'
    rows = ", ".join(f'{{{first}, {last % i}, "id": {i}}}' for i in range(90))
    content = document() | {"annotations": "ROWS"}
    del content["info"]
    text = encode(content).replace(b'"ROWS"', f"[{rows}]".encode())
    assert_same(text)
    columns = decode_tables(text).annotations
    for key in ("id", "image_id", "category_id", "bbox", "area"):
        assert getattr(columns, key).tolist() == [r[key] for r in json.loads(text)["annotations"]]
    assert not columns.is_crowd.any()


def error_of(content: bytes, monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> str | None:
    monkeypatch.setattr(coco_json, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(coco, "open_content", lambda path: content)
    try:
        coco.read_files({"train": SplitFiles(Path(), Path("x.json"))})
    except DataError as error:
        return str(error)
    return None


BROKEN = [
    lambda d: d["annotations"][77].update(bbox=["x"]),
    lambda d: d["annotations"][77].update(id=1.5),
    lambda d: d["annotations"][77].pop("image_id"),
    lambda d: d["images"][30].update(width="x"),
    lambda d: d["categories"][1].pop("name"),
    lambda d: d.pop("categories"),
    lambda d: d.update(annotations={"id": 1}),
]


@pytest.mark.parametrize("change", BROKEN)
def test_errors_name_the_place_in_the_file(
    change: Callable[[dict[str, Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = document()
    change(content)
    message = error_of(encode(content), monkeypatch, SLICE_BYTES)
    assert message is not None
    assert message == error_of(encode(content), monkeypatch, 1 << 30)


@given(st.integers(0, 12_000), st.binary(max_size=4), st.integers(0, 5))
def test_any_damage_has_the_same_result(place: int, inserted: bytes, removed: int) -> None:
    content = document()
    del content["info"]
    text = encode(content)
    damaged = text[:place] + inserted + text[place + removed :]
    with pytest.MonkeyPatch.context() as patch:
        sliced = error_of(damaged, patch, SLICE_BYTES)
        whole = error_of(damaged, patch, 1 << 30)
    assert sliced == whole
    if whole is None:
        assert_same(damaged)


def test_a_large_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(encode(document()))
    in_memory = coco.read(path)["train"]
    monkeypatch.setattr(coco_json, "MAPPED_BYTES", 1)
    content = coco_json.open_content(path)
    assert isinstance(content, mmap.mmap)
    mapped = coco.read(path)["train"]
    assert mapped.file_names == in_memory.file_names
    assert mapped.boxes.tolist() == in_memory.boxes.tolist()
