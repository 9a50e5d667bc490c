"""The embedded dataset is real COCO data, and the same for the same seed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssdctl.data.annotations import Conversion
from ssdctl.data.dataset import read_dataset
from ssdctl.data.shapes import STYLES, ShapeClass, Style, draw_image, generate
from ssdctl.errors import DataError, UsageError


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        generate(tmp_path / name, num_train=3, num_val=2, seed=seed)
    contents = {
        name: [p.read_bytes() for p in sorted((tmp_path / name).rglob("*.j*"))] for name in "abc"
    }
    assert contents["a"] == contents["b"]
    assert contents["a"] != contents["c"]
    train = (tmp_path / "a/train2017/000000000001.jpg").read_bytes()
    assert train != (tmp_path / "a/val2017/000000000001.jpg").read_bytes()


def test_boxes_enclose_what_was_drawn() -> None:
    """Outside all boxes an image has the texture's muted colors, inside it has vivid ones."""
    for index in range(12):
        image, boxes = draw_image(0, "train", index)
        pixels = image.astype(np.int32)
        vivid = pixels.max(-1) - pixels.min(-1)
        inside = np.zeros(vivid.shape, bool)
        for box in boxes:
            assert box.left >= 0
            assert box.left + box.width <= image.shape[1]
            assert box.top + box.height <= image.shape[0]
            inside[box.top : box.top + box.height, box.left : box.left + box.width] = True
        if boxes:
            assert vivid[inside].mean() > vivid[~inside].mean() + 5


def test_classes_and_brightness_of_a_style(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (ShapeClass(3, "star", 0.0), ShapeClass(5, "ring", 0.5))
    monkeypatch.setitem(STYLES, "dark", Style(classes, (0.05, 0.4), 1.0, stripes=0.5))
    generate(tmp_path, num_train=6, num_val=0, style="dark")
    document = json.loads((tmp_path / "annotations/instances_train2017.json").read_bytes())
    assert [(c["id"], c["name"]) for c in document["categories"]] == [(3, "star"), (5, "ring")]
    assert {a["category_id"] for a in document["annotations"]} == {3, 5}
    dark, bright = (draw_image(0, "val", 0, style)[0].mean() for style in ("dark", "solid"))
    assert dark < bright


def test_a_complete_dataset_is_not_drawn_again(tmp_path: Path) -> None:
    def again(**changes: int) -> bool:
        return generate(tmp_path, **{"num_train": 3, "num_val": 2, "seed": 1} | changes)

    assert again()
    image = tmp_path / "train2017/000000000002.jpg"
    before = image.read_bytes()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")}
    assert not again()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")} == times
    image.unlink()
    assert again()
    assert image.read_bytes() == before
    assert again(num_val=3)
    with image.open("rb") as opened:  # replaced, not overwritten
        assert again(seed=2)
        assert opened.read() == before
    assert image.read_bytes() != before


def test_changed_labels_are_kept(tmp_path: Path) -> None:
    generate(tmp_path, num_train=2, num_val=1)
    path = tmp_path / "annotations/instances_train2017.json"
    document = json.loads(path.read_bytes())
    document["annotations"][0]["bbox"][0] += 1
    path.write_text(json.dumps(document))
    changed, added = (tmp_path / f"train2017/00000000000{n}.jpg" for n in (1, 3))
    for image in (changed, added):
        image.write_bytes(b"mine")
    for num_train, num_val in ((2, 1), (3, 2)):  # complete, then drawn again
        generate(tmp_path, num_train=num_train, num_val=num_val)
    replaced = path.with_name(f"{path.name}.replaced")
    assert json.loads(replaced.read_bytes()) == document
    for image in (changed, added):
        assert image.with_name(f"{image.name}.replaced").read_bytes() == b"mine"
    assert len(list(added.parent.iterdir())) == 5
    assert len(list(path.parent.iterdir())) == 3


def test_an_interrupted_generation_leaves_no_labels_of_other_images(tmp_path: Path) -> None:
    generate(tmp_path, num_train=3, num_val=2, seed=1)

    def interrupt(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        yield next(iter(items))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, num_train=3, num_val=2, seed=2, progress=interrupt)
    with pytest.raises(DataError, match="instances_train2017"):
        read_dataset(tmp_path, Conversion())
    half = tmp_path / f"train2017/.000000000001.jpg.{'0' * 12}.{2**22 + 1}.tmp"  # of a killed run
    half.touch()
    assert generate(tmp_path, num_train=3, num_val=2, seed=3)
    assert not half.exists()
    assert not [*tmp_path.rglob("*.replaced")], "its own images are set aside"
    assert {*read_dataset(tmp_path, Conversion())} == {"train", "val"}


@pytest.mark.parametrize("name", ["annotations/instances_val2017.json", "val2017/000000000001.jpg"])
def test_annotations_and_images_of_others_are_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(UsageError, match="not generated by ssdctl"):
        generate(tmp_path, num_train=3, num_val=2, seed=0)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
