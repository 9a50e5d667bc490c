"""Annotations are untrusted: what is refused, dropped or repaired."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.data.annotations import Annotations
from ssdctl.data.check import CLIPPED, Checked, clip
from ssdctl.data.check import check as check_annotations
from ssdctl.data.dataset import resolve_images
from ssdctl.data.formats import coco
from ssdctl.data.prepare import prepare
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


def read(path: Path) -> Annotations:
    return coco.read(path)["train"]


def thing(number: int, image: int = 3, **changes: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": 12, "bbox": [0, 0, 5, 5], **changes}


def check(folder: Path, **changes: Any) -> Checked:
    return check_annotations(read(written(folder, document(**changes))))


def trained(checked: Checked) -> list[list[float]]:
    """The left, top, right and bottom of the boxes that are trained on, in images of 100 x 50."""
    fractions = checked.objects.fractions[checked.objects.is_trained]
    return np.round(fractions * [100.0, 50, 100, 50], 3).tolist()


@pytest.mark.parametrize("name", ["images", "annotations", "categories"])
def test_a_table_that_occurs_twice_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    text = json.dumps(document())[:-1] + f',\n\n"{name}" : []}}'
    with pytest.raises(DataError, match=f"annotations.json:3: .*{name}.* line 1"):
        read(written(tmp_path, text))
    # The name may occur elsewhere.
    info = {name: 2, "annotations": {name: 2}, "text": f'a {{"{name}": \\" {{', "x": name}
    path = written(tmp_path, {"info": info, **document(), "more": [info]})
    assert len(read(path).file_names) == 2


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        *(("bbox", f"[10, {n}, 1, 1]", "") for n in ("NaN", "Infinity", "1e999", "-1e999")),
        *(("id", "1.5", "id"), ("category_id", "1e300", "category_id")),
        *(("image_id", '"x"', "image_id"), ("bbox", '[1, "x"]', "bbox")),
        *((k, n, k) for k in ("id", "image_id", "category_id", "iscrowd") for n in BEYOND_64_BITS),
    ],
)
def test_what_is_no_number_is_named(tmp_path: Path, key: str, value: object, place: str) -> None:
    text = json.dumps(document(annotations=[thing(1), thing(2, **{key: "VALUE"})]))
    where = rf"annotations\[1\]\.{place}" if place else r"annotations\.json"
    with pytest.raises(DataError, match=where):
        read(written(tmp_path, text.replace('"VALUE"', str(value))))


def image(number: int = 3, name: str = "x.jpg", width: int = 9, height: int = 9) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": width, "height": height}


@pytest.mark.parametrize(
    ("table", "entries", "words"),
    [
        ("images", [image(7), image(7)], "duplicate image ids: 7"),
        ("annotations", [thing(5, image=4)], "images that the file does not list: 5 .image 4."),
        ("categories", [{"id": 12, "name": n} for n in "ab"], "duplicate category ids: 12"),
        ("categories", [], "no categories"),
        ("categories", [{"id": 12, "name": " "}], "without a name: category 12"),
        *(("images", [image(name=name)], "no file fits") for name in ("../x.jpg", "")),
        ("images", [image(name="/etc/passwd")], "no file fits"),
        ("images", [image(width=0)], "size 0 x 9"),
        ("images", [image(height=65536)], "size 9 x 65536"),
        *(("images", [image(width=n)], "width") for n in BEYOND_64_BITS),
    ],
)
def test_broken_references(tmp_path: Path, table: str, entries: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check(tmp_path, **{table: entries})
    with pytest.raises(DataError, match=words):
        prepare(tmp_path / "annotations.json", tmp_path / "store")


def test_names_of_lvis(tmp_path: Path) -> None:
    images = [image(7, "train2017/a.jpg"), {"id": 3, "coco_url": "http://x.org/val2017/b.jpg"}]
    path = written(tmp_path, document(images=images))
    assert read(path).file_names == ["train2017/a.jpg", "val2017/b.jpg"]


def test_annotation_ids_that_occur_twice_are_renumbered(tmp_path: Path) -> None:
    """Merging tools write them; a published set of 1,500 images has two."""
    entries = [thing(n, image) for n, image in ((5, 3), (5, 7), (1, 3), (5, 3))]
    checked = check(tmp_path, annotations=entries)
    assert len(trained(checked)) == 4
    found = [(f.kind, f.image_id, f.annotation_id) for f in checked.findings]
    assert found == [(coco.RENUMBERED, 7, 5), (coco.RENUMBERED, 3, 5)]
    assert len(set(read(tmp_path / "annotations.json").ids.tolist())) == 4


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
    """Kept boxes have a size and are clipped to the image; all others are listed."""
    entries = [thing(i, (3, 7)[i % 2], bbox=bbox) for i, bbox in enumerate(bboxes)]
    folder = tmp_path_factory.getbasetemp() / "coco"  # for all examples
    folder.mkdir(exist_ok=True)
    objects, _, findings, _ = check(folder, annotations=entries)
    fractions = objects.fractions[objects.is_trained]
    assert (fractions[:, 2:] > fractions[:, :2]).all()
    assert objects.starts[-1] == len(objects.boxes)
    dropped = {f.annotation_id for f in findings if "dropped" in f.kind}
    assert len(fractions) + len(dropped) == len(bboxes)
    expected: list[list[list[float]]] = [[], []]
    for i, (x, y, w, h) in enumerate(bboxes):
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, 100), min(y + h, 50)
        if i not in dropped:
            expected[1 - i % 2].append([left / 100, top / 50, right / 100, bottom / 50])
    boxes = np.reshape([box for of_image in expected for box in of_image], (-1, 4))
    np.testing.assert_allclose(fractions, boxes, atol=1e-6)


def test_entries_of_one_file_must_agree(tmp_path: Path) -> None:
    images = [image(7, "a.jpg", 100, 50), image(3, "a.jpg", 101, 50)]
    with pytest.raises(DataError, match=r"a\.jpg"):
        resolve_images(coco.read(written(tmp_path, document(images=images))))


def nearest_float32(value: Fraction) -> np.float32:
    """Round an exact value to the nearest float32, by comparing its neighbors exactly."""
    guess = np.float32(float(value))
    around = (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(2)))
    return min(around, key=lambda candidate: abs(Fraction(float(candidate)) - value))


def test_fractions_equal_exact_arithmetic() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 700, (1000, 2))
    low = rng.uniform(0, sizes - 3)
    boxes = np.concatenate([low, rng.uniform(1, sizes - low)], axis=1)
    for decimals in (0, 1, 2):
        boxes[decimals::4] = boxes[decimals::4].round(decimals)
    _, fractions, kinds = clip(boxes, sizes)
    assert (kinds <= CLIPPED).all()
    for box, size, actual in zip(boxes.tolist(), sizes.tolist(), fractions.tolist(), strict=True):
        low_exact = [Fraction(v) for v in box[:2]]
        high = [a + Fraction(v) for a, v in zip(low_exact, box[2:], strict=True)]
        high = [min(v, Fraction(side)) for v, side in zip(high, size, strict=True)]
        exact = [v / side for v, side in zip([*low_exact, *high], size * 2, strict=True)]
        assert actual == [float(nearest_float32(v)) for v in exact]
