"""RetinaNet's CSV, VIA's, LabelMe's and Create ML's JSON: their variants, and what is left out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data.formats import exports

from ssdctl.data.annotations import Annotations
from ssdctl.data.check import check
from ssdctl.data.dataset import find
from ssdctl.data.formats import delimiter_of
from ssdctl.errors import DataError

BOX = [10.0, 20.0, 30.0, 15.0]  # left, top, width, height


def read(root: Path, content: Any, file: str = "labels.json") -> dict[str, Annotations]:
    text = content if isinstance(content, str) else json.dumps(content)
    exports.tree(root, {file: text, "a.png": None, "b.png": None})
    return find(root)[1].read(root)


def boxes_of(splits: dict[str, Annotations]) -> dict[str, list[tuple[str, list[float]]]]:
    boxes = exports.boxes_of(splits)
    return {name: [(label, box) for label, box, _ in found] for name, found in boxes.items()}


def via(*regions: dict[str, Any]) -> dict[str, Any]:
    return {"a.png1": {"filename": "a.png", "size": 1, "file_attributes": {}, "regions": regions}}


def region(shape: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    return {"shape_attributes": shape, "region_attributes": attributes}


RECT = {"name": "rect", "x": 10, "y": 20, "width": 30, "height": 15}


def labelme(*shapes: dict[str, Any], path: str = "a.png") -> dict[str, Any]:
    return {"shapes": shapes, "imagePath": path, "imageHeight": 50, "imageWidth": 100}


@pytest.mark.parametrize(
    "line",
    [
        "a,b[;]0", "saw; hand[,]0", "/m/01[,]Bread; whole", "/g/00[;]a,b", '"a;b"[,]0', "a[\t]b",
        "a;b;c;d;e;f;g.jpg[,]1,2,3,4,cat", "a.jpg[;]1,5;2,5;3,5;4,5;cat",
    ],
)  # fmt: skip
def test_the_delimiter_of_a_first_line(line: str) -> None:
    before, delimiter, rest = re.split(r"[\[\]]", line)
    assert delimiter_of(f"{before}{delimiter}{rest}") == delimiter


@pytest.mark.parametrize("row", ["a.png,10,20,40,bolt", "a.png,10,20,,35,bolt", "a.png,1,2,3,4,"])
def test_a_broken_row_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises(DataError, match=r"boxes\.csv:2"):
        read(tmp_path, f"a.png,10,20,40,35,bolt\n{row}\n", "boxes.csv")


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"kind": "bolt"}, "bolt"),
        ({"Class": "bolt", "note": "rusty"}, "bolt"),
        ({"type": {"bolt": True, "nut": False}}, "bolt"),
        ({}, "object"),
    ],
)
def test_the_class_of_a_via_region(tmp_path: Path, attributes: Any, name: str) -> None:
    splits = read(tmp_path, via(region(RECT, **attributes)))
    assert boxes_of(splits) == {"a.png": [(name, BOX)]}


def test_an_attribute_that_may_be_the_class_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="color, form"):
        read(tmp_path, via(region(RECT, color="red", form="round")))


def test_the_shapes_of_via(tmp_path: Path) -> None:
    circle = {"name": "circle", "cx": 50, "cy": 25, "r": 10}
    ellipse = {"name": "ellipse", "cx": 50, "cy": 25, "rx": 20, "ry": 10, "theta": 0}
    point = {"name": "point", "cx": 5, "cy": 5}
    splits = read(tmp_path, via(*(region(s, name="nut") for s in (circle, ellipse, point))))
    found = [("nut", [40.0, 15.0, 20.0, 20.0]), ("nut", [30.0, 15.0, 40.0, 20.0])]
    assert boxes_of(splits) == {"a.png": found}
    assert "point, left out: 1" in splits["train"].notes[0]


def test_an_image_with_shapes_that_are_left_out_is_not_empty(tmp_path: Path) -> None:
    line = {"label": "bolt", "points": [[1, 1], [9, 9]], "shape_type": "line"}
    square = {"label": "bolt", "points": [[40, 35], [10, 20]], "shape_type": "rectangle"}
    exports.tree(tmp_path, {"b.json": json.dumps(labelme(line, path="b.png"))})
    splits = read(tmp_path, labelme(square), "a.json")
    assert boxes_of(splits) == {"a.png": [("bolt", BOX)], "b.png": []}
    assert not check(splits["train"]).is_empty.any()


@pytest.mark.parametrize(
    ("kind", "points"),
    [("circle", [[50, 25], [50, 35]]), ("mask", [[40, 15], [59, 34]])],  # with the last pixel
)
def test_circles_and_masks_of_labelme(tmp_path: Path, kind: str, points: list[list[int]]) -> None:
    shape = {"label": "nut", "points": points, "shape_type": kind}
    splits = read(tmp_path, labelme(shape), "a.json")
    assert boxes_of(splits) == {"a.png": [("nut", [40.0, 15.0, 20.0, 20.0])]}


def test_the_name_of_a_labelme_file_counts_if_its_image_was_renamed(tmp_path: Path) -> None:
    shape = {"label": "nut", "points": [[10, 20], [40, 20], [40, 35]]}  # an old file
    splits = read(tmp_path, labelme(shape, path="C:\\photos\\before.png"), "a.json")
    assert boxes_of(splits) == {"a.png": [("nut", BOX)]}
    for file, image in (("a", "b"), ("c", "c")):
        with pytest.raises(DataError, match=rf"{file}\.json"):
            read(tmp_path, labelme(shape, path=f"{image}.png"), f"{file}.json")


def test_label_files_of_one_image_must_agree(tmp_path: Path) -> None:
    square, other = (
        {"label": name, "points": [[40, 35], [10, 20]], "shape_type": "rectangle"}
        for name in ("bolt", "nut")
    )
    exports.tree(tmp_path, {"old/a.json": json.dumps(labelme(square, path="../a.png"))})
    splits = read(tmp_path, labelme(square), "a.json")
    assert boxes_of(splits) == {"a.png": [("bolt", BOX)]}
    assert splits["train"].notes[0].endswith("left out: 1, such as old/a.json")
    with pytest.raises(DataError, match=r"a\.json and old/a\.json"):
        read(tmp_path, labelme(other), "a.json")


def test_other_json_files_are_not_taken_for_create_mls(tmp_path: Path) -> None:
    result = {"image_id": 1, "category_id": 1, "bbox": BOX, "score": 0.5}
    task = {"data": {"image": "a.png"}, "annotations": [{"completed_by": 1, "result": []}]}
    others = {"results": [result], "package": {"name": "a"}, "label-studio": [task]}
    others["info"] = {"image": "", "annotations": []}
    exports.tree(tmp_path, {f"{name}.json": json.dumps(text) for name, text in others.items()})
    box = {"label": "nut", "coordinates": {"x": 25, "y": 27.5, "width": 30, "height": 15}}
    splits = read(tmp_path, [{"image": "a.png", "verified": False, "annotations": [box]}])
    assert boxes_of(splits) == {"a.png": [("nut", BOX)]}


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("createml-json", [{"image": "a.png", "annotations": [{"label": "nut"}]}]),
        ("via-json", via(region({"name": "rect", "x": 1}, name="nut"))),
        ("labelme-json", labelme({"label": "nut", "points": [[1]]})),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, source: str, content: Any) -> None:
    with pytest.raises(DataError, match=r"labels\.json"):
        read(tmp_path, content)
    assert find(tmp_path)[0] == source
