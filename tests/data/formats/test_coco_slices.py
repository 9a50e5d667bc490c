"""Annotations of large files are decoded in slices, with the result and the errors as at once."""

import json
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.data import coco_json
from ssdctl.data.annotations import SplitFiles
from ssdctl.data.formats import coco
from ssdctl.errors import DataError

SLICE_BYTES = 300


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco_json, "SLICE_BYTES", SLICE_BYTES)


def document(*, count: int = 90, **extra: Callable[[int], Any]) -> dict[str, Any]:
    """A file of some KB; `extra` fields of the annotations are made by their index."""
    dice = random.Random(count)
    return {
        "info": {"images": [{"id": 1}], "note": 'a "annotations": [{"id": 7}] in a string'},
        "images": [
            {"id": i, "file_name": f'{i} "}},{{" .jpg', "width": 64, "height": 48}
            for i in range(40)
        ],
        "annotations": [
            {"id": i, "image_id": dice.randrange(40), "category_id": 1 + i % 3}
            | {"bbox": [dice.uniform(0, 9), 1, 5.5, 7], "area": i / 3, "iscrowd": i % 2}
            | {key: value(i) for key, value in extra.items()}
            for i in range(count)
        ],
        "categories": [{"id": i, "name": f"c{i}"} for i in (1, 2, 3)],
    }


def encode(content: Any, **options: Any) -> bytes:
    return json.dumps(content, **options).encode()


def assert_same(content: bytes, *, min_slices: int = 1) -> coco_json.AnnotationColumns:
    raw = memoryview(coco_json.decode(content, coco_json.Tables[msgspec.Raw]).annotations)
    assert len(list(coco_json._annotation_slices(raw))) >= min_slices
    ours = coco_json.decode_tables(content)
    whole = coco_json.decode(content, coco_json.Tables[list[coco_json.Annotation]])
    assert (ours.images, ours.categories) == (whole.images, whole.categories)
    expected = coco_json.to_columns(whole.annotations)
    for name, column in expected._asdict().items():
        assert getattr(ours.annotations, name).dtype == column.dtype
        np.testing.assert_array_equal(getattr(ours.annotations, name), column, err_msg=name)
    return ours.annotations


@pytest.mark.parametrize("indent", [None, 2])
def test_slices_have_what_the_file_has(indent: int | None) -> None:
    for order in (1, -1):
        content = dict([*document().items()][::order])
        assert_same(encode(content, indent=indent), min_slices=20)
    assert_same(b"\xef\xbb\xbf" + encode(document(), separators=(",", ":")), min_slices=20)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("segmentation", lambda i: [[1.5] * 8, [2] * 6]),
        ("segmentation", lambda i: {"counts": [3, i], "size": [9, 9]}),
        ("attributes", lambda i: [{"name": "x"}, {"name": "]}"}]),
        ("id", float),
        ("bbox", lambda i: ["1.5", 2, "3", 4]),
        ("bbox", lambda i: ["inf", 1, 2, 3]),
        ("area", lambda i: ("n/a", "7", "inf", None)[i % 4]),
        ("caption", lambda i: "\\" * i + '"' + '"}, {"id": 3'),
    ],
)
def test_what_tools_write_into_annotations(key: str, value: Callable[[int], Any]) -> None:
    columns = assert_same(encode(document(**{key: value})), min_slices=20)
    assert not np.isinf(columns.area).any()
    assert not np.isinf(columns.bbox).any()


def error_of(content: bytes, slice_bytes: int = SLICE_BYTES) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco_json, "SLICE_BYTES", slice_bytes)
        patch.setattr(coco, "read_content", lambda path: content)
        try:
            coco.read_files({"train": SplitFiles([Path()], Path("x.json"))})
        except DataError as error:
            return str(error)
    return None


@given(st.integers(0, 12_000), st.binary(max_size=4), st.integers(0, 5))
def test_any_damage_has_the_same_result(place: int, inserted: bytes, removed: int) -> None:
    text = encode({key: value for key, value in document().items() if key != "info"})
    damaged = text[:place] + inserted + text[place + removed :]
    error = error_of(damaged)
    assert error == error_of(damaged, 1 << 30)
    try:
        coco_json.decode(damaged, coco_json.Tables[list[coco_json.Annotation]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        assert error is not None
    else:
        assert_same(damaged)


def test_a_large_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(encode(document()))
    in_memory = coco.read(path)["train"]
    monkeypatch.setattr(coco_json, "MAPPED_BYTES", 1)
    assert isinstance(coco_json.read_content(path), mmap.mmap)
    mapped = coco.read(path)["train"]
    assert mapped.file_names == in_memory.file_names
    assert mapped.boxes.tolist() == in_memory.boxes.tolist()
