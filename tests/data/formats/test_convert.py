"""Other layouts are converted to COCO's; datasets are divided and reduced to some classes."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from ssdctl.data.annotations import LabeledBox, LabeledImage
from ssdctl.data.convert import Conversion, convert, convert_again, describe_conversion
from ssdctl.data.dataset import find_splits
from ssdctl.data.formats.coco_writer import divided, document, with_classes
from ssdctl.data.open_dataset import count_images, open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.errors import DataError, SsdctlError, UsageError


def picture(path: Path, size: tuple[int, int] = (100, 50), turn: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {}
    if turn != 1:
        more["exif"] = Image.Exif()
        more["exif"][ExifTags.Base.Orientation] = turn
    Image.new("RGB", size, "teal").save(path, **more)


def make(root: Path, source: str | None, split: float | None = None, *classes: str) -> None:
    convert(root, Conversion(source, split, classes))


def boxes_of(root: Path, split: str = "train") -> dict[str, list[tuple[str, list[float], int]]]:
    """Image -> (class, bbox, crowd), as the written annotations have them."""
    content = json.loads(find_splits(root)[split].annotations.read_text())
    names = {c["id"]: c["name"] for c in content["categories"]}
    boxes: dict[str, list[tuple[str, list[float], int]]] = {
        i["file_name"]: [] for i in content["images"]
    }
    files = {i["id"]: i["file_name"] for i in content["images"]}
    for a in content["annotations"]:
        entry = (names[a["category_id"]], a["bbox"], a["iscrowd"])
        boxes[files[a["image_id"]]].append(entry)
    return boxes


def xml(*objects: str, size: tuple[int, int] | None = (100, 50), file: str = "x.jpg") -> str:
    width, height = size or (0, 0)
    sizes = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return (
        f"<annotation><folder>VOC</folder><filename>{file}</filename>"
        f"{sizes if size else ''}{''.join(objects)}</annotation>"
    )


def thing(name: str, *box: object, more: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


def voc(root: Path, stems: dict[str, str], lists: dict[str, list[str]] | None = None) -> None:
    for stem, content in stems.items():
        picture(root / "JPEGImages" / f"{stem}.jpg")
        (root / "Annotations").mkdir(exist_ok=True)
        (root / "Annotations" / f"{stem}.xml").write_text(content)
    for name, lines in (lists or {}).items():
        (root / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
        (root / "ImageSets/Main" / f"{name}.txt").write_text("\n".join(lines) + "\n")


class TestVoc:
    def test_lists_difficult_parts_and_pixels_from_one(self, tmp_path: Path) -> None:
        part = "<part><name>head</name><bndbox><xmin>3</xmin></bndbox></part>"
        voc(
            tmp_path,
            {
                "a": xml(thing("dog", 1, 1, 100, 50), thing("cat", 11, 11, 20, 30, more=part)),
                "b": xml(thing("cat", "5.5", 5, 10, 10, more="<difficult>1</difficult>")),
                "c": xml(thing("bird", 0, 0, 10, 10)),
                "d": xml(),
            },
            {"train": ["a", "b"], "val": ["c", "d"], "trainval": ["a", "b", "c", "d"]},
        )
        make(tmp_path, "voc")
        assert boxes_of(tmp_path) == {
            "JPEGImages/a.jpg": [("dog", [0, 0, 100, 50], 0), ("cat", [10, 10, 10, 20], 0)],
            "JPEGImages/b.jpg": [("cat", [4.5, 4, 5.5, 6], 1)],
        }
        assert boxes_of(tmp_path, "val") == {
            "JPEGImages/c.jpg": [("bird", [0, 0, 10, 10], 0)],
            "JPEGImages/d.jpg": [],
        }
        splits = open_dataset(tmp_path, tmp_path / "store")
        assert [c.name for c in splits["train"].classes] == ["bird", "cat", "dog"]
        assert splits["train"].classes == splits["val"].classes

    def test_a_devkit_of_two_years(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for year in ("VOC2007", "VOC2012"):
            stems = {f"{year}_{i}": xml(thing("cat", 1, 1, 9, 9)) for i in range(2)}
            voc(tmp_path / year, stems, {"trainval": [f"{year}_0"], "test": [f"{year}_1"]})
        caplog.set_level(logging.INFO, "ssdctl")
        make(tmp_path, "voc")
        assert "test images are used to validate" in caplog.messages[0]
        assert list(boxes_of(tmp_path)) == [
            "VOC2007/JPEGImages/VOC2007_0.jpg",
            "VOC2012/JPEGImages/VOC2012_0.jpg",
        ]
        assert len(boxes_of(tmp_path, "val")) == 2
        prepare(tmp_path, tmp_path / "store", pack=True)

    def test_no_lists_no_size_another_suffix(self, tmp_path: Path) -> None:
        picture(tmp_path / "images/a.PNG", (30, 20))
        (tmp_path / "annotations").mkdir()
        content = xml(thing("nut", 2, 2, 4, 4), size=None, file="C:\\other\\name.jpg")
        (tmp_path / "annotations/a.xml").write_text(content)
        make(tmp_path, "voc")
        assert boxes_of(tmp_path) == {"images/a.PNG": [("nut", [1, 1, 3, 3], 0)]}
        report = prepare(tmp_path, tmp_path / "store", pack=False).splits[0]
        assert report.findings == []

    def test_xml_next_to_the_images_in_a_folder_per_split(self, tmp_path: Path) -> None:
        for k, names in enumerate((("train", "valid", "test"), ("Train", "Val2017", "Test"))):
            root = tmp_path / str(k)
            for name in names:
                picture(root / name / "a.jpg")
                (root / name / "a.xml").write_text(xml(thing("nut", 2, 2, 4, 4)))
            make(root, "voc")
            for name, split in zip(names, ("train", "val", "test"), strict=True):
                assert list(boxes_of(root, split)) == [f"{name}/a.jpg"]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("<annotation>", "a.xml: broken XML"),
            ("", "a.xml: not plain XML"),
            ('<!DOCTYPE a [<!ENTITY b "bb">]><annotation>&b;</annotation>', "not plain XML"),
            (xml(thing("", 1, 1, 2, 2)), "a.xml: object 1 has no name"),
            (xml(thing("cat", 1, 1, "two", 2)), r"object 1 \(cat\) lacks a bndbox"),
            (xml(thing("cat", 1, 1, "nan", 2)), r"object 1 \(cat\) lacks a bndbox"),
            (xml("<object><name>cat</name></object>"), r"object 1 \(cat\) lacks a bndbox"),
            (xml(), "no object is labelled"),
        ],
    )
    def test_what_is_broken_is_named(self, tmp_path: Path, content: str, words: str) -> None:
        voc(tmp_path, {"a": content})
        with pytest.raises(DataError, match=words):
            make(tmp_path, "voc")
        assert not (tmp_path / "dataset.toml").exists()

    @pytest.mark.parametrize(("root", "prefix"), [("xmlns", ""), ("xmlns:v", "v:")])
    def test_a_namespace_makes_no_difference(self, tmp_path: Path, root: str, prefix: str) -> None:
        content = re.sub(r"<(/?)(\w)", rf"<\1{prefix}\2", xml(thing("cat", 1, 1, 9, 9)))
        content = content.replace("annotation>", f'annotation {root}="http://x.org/voc">', 1)
        voc(tmp_path, {"a": content})
        make(tmp_path, "voc")
        assert boxes_of(tmp_path) == {"JPEGImages/a.jpg": [("cat", [0, 0, 9, 9], 0)]}

    def test_lists_and_folders_of_cvat(self, tmp_path: Path) -> None:
        """A list per subset, images in folders, names with spaces."""
        stems = ("a", "day 1/b", "c d", "e")
        for stem in stems:
            (tmp_path / "Annotations" / stem).parent.mkdir(parents=True, exist_ok=True)
        content = xml(thing("cat", 1, 1, 9, 9))
        lists = {"Train": ["a", "day 1/b"], "Validation": ["c d  "], "default": ["e"]}
        voc(tmp_path, dict.fromkeys(stems, content), {**lists, "cat_Train": ["a  1"]})
        make(tmp_path, "voc")
        images = ["JPEGImages/a.jpg", "JPEGImages/day 1/b.jpg", "JPEGImages/e.jpg"]
        assert list(boxes_of(tmp_path)) == images
        assert list(boxes_of(tmp_path, "val")) == ["JPEGImages/c d.jpg"]

    def test_the_named_image_of_two_with_the_same_stem(self, tmp_path: Path) -> None:
        for suffix in (".bmp", ".jpg", ".png", ".tif", ".webp"):
            picture(tmp_path / f"data/a{suffix}")
        for suffix in (".bmp", ".png"):
            content = xml(thing("cat", 1, 1, 9, 9), file=f"a{suffix}")
            (tmp_path / "labels").mkdir(exist_ok=True)
            (tmp_path / "labels/a.xml").write_text(content)
            make(tmp_path, "voc")
            assert list(boxes_of(tmp_path)) == [f"data/a{suffix}"]

    def test_images_without_xml_are_counted_and_files_of_macos_ignored(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = tmp_path / "test"  # not a split: it is the dataset folder
        voc(root, {"a": xml(thing("cat", 1, 1, 9, 9))})
        picture(root / "JPEGImages/b.jpg")
        for name in ("JPEGImages/._a.jpg", "Annotations/._a.xml"):
            (root / name).write_bytes(b"\0\5\x16\7")
        caplog.set_level(logging.INFO, "ssdctl")
        make(root, "voc")
        assert list(boxes_of(root)) == ["JPEGImages/a.jpg"]
        assert "1 images have no XML file and are left out, among them b.jpg" in caplog.text

    def test_absent_and_unsafe_names(self, tmp_path: Path) -> None:
        voc(tmp_path, {"a": xml(thing("cat", 1, 1, 2, 2))}, {"train": ["a", "b"]})
        with pytest.raises(DataError, match=r"b\.xml: cannot be read"):
            make(tmp_path, "voc")
        voc(tmp_path, {}, {"train": ["../../etc/passwd"]})
        with pytest.raises(DataError, match="not plain names"):
            make(tmp_path, "voc")
        voc(tmp_path, {"b": xml(thing("cat", 1, 1, 2, 2))}, {"train": ["a", "b"]})
        (tmp_path / "JPEGImages/b.jpg").unlink()
        with pytest.raises(DataError, match=r"images of annotations are missing: b\.xml"):
            make(tmp_path, "voc")

    def test_another_layout(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not Pascal VOC"):
            make(tmp_path, "voc")
        with pytest.raises(DataError, match="no such dataset folder"):
            make(tmp_path / "none", "voc")


def yolo(
    root: Path, labels: dict[str, str | None], yaml: str | None = "names: [cat, dog]\n"
) -> None:
    """Images by path, each with the text of its label file."""
    for name, text in labels.items():
        picture(root / name)
        if text is not None:
            parts = ["labels" if p == "images" else p for p in Path(name).parts]
            path = root.joinpath(*parts).with_suffix(".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if yaml is not None:
        (root / "data.yaml").write_text(yaml)


class TestYolo:
    def test_boxes_polygons_backgrounds(self, tmp_path: Path) -> None:
        lines = "0 0.5 0.5 0.2 0.4\n1 0.1 0.1 0.3 0.1 0.3 0.5\n\n0 0.5 0.5 0.2 0.4\n"
        labels = {"images/train/a.jpg": lines, "images/train/b.jpg": "", "images/train/c.jpg": None}
        yolo(tmp_path, {**labels, "images/val/d.jpg": "1.0 .5 .5 1 1"})
        make(tmp_path, "yolo")
        assert boxes_of(tmp_path) == {
            "images/train/a.jpg": [("cat", [40, 15, 20, 20], 0), ("dog", [10, 5, 20, 20], 0)],
            "images/train/b.jpg": [],
            "images/train/c.jpg": [],
        }
        assert boxes_of(tmp_path, "val") == {"images/val/d.jpg": [("dog", [0, 0, 100, 50], 0)]}
        report = prepare(tmp_path, tmp_path / "store", pack=True).splits[0]
        assert (report.classes, report.trainable) == (2, 1)

    @pytest.mark.parametrize(
        ("yaml", "images"),
        [
            ("names: {0: cat, 1: dog}\nnc: 2\ntrain: pics/images\n", "pics/images"),
            ("names: ['cat', 'dog']\ntrain: ../pics/images\nval:\n", "pics/images"),
            ("path: ../datasets/x\ntrain: images/t\nnames: [cat, dog]\n", "images/t"),
            ("path: /elsewhere/data\ntrain: train/images\nnames: [cat, dog]\n", "train/images"),
            ("train: [images/one, images/one]\nnames: [cat, dog]\n", "images/one"),
            ("names: [cat, dog]\n", "images"),
            ("names: [cat, dog]\n", "train"),
            ("names: [cat, dog]\nkpt_shape: [2, 3]\n", "images/train2017"),
        ],
    )
    def test_places_of_images(self, tmp_path: Path, yaml: str, images: str) -> None:
        line = "0 .5 .5 .2 .4" + (" .1 .1 2 .2 .2 1" if "kpt" in yaml else "")
        yolo(tmp_path, {f"{images}/a.jpg": line}, yaml)
        make(tmp_path, "yolo")
        assert boxes_of(tmp_path) == {f"{images}/a.jpg": [("cat", [40, 15, 20, 20], 0)]}

    def test_lists_of_images(self, tmp_path: Path) -> None:
        yolo(
            tmp_path,
            {f"images/{n}.jpg": "0 .5 .5 .2 .4" for n in "abc"},
            "names: [no, yes]\ntrain: train.txt\nval: val.txt\n",
        )
        (tmp_path / "train.txt").write_text("./images/a.jpg\n/home/me/data/images/b.jpg\n")
        (tmp_path / "val.txt").write_text("images/c.jpg\n")
        make(tmp_path, "yolo")
        assert list(boxes_of(tmp_path)) == ["images/a.jpg", "images/b.jpg"]
        assert boxes_of(tmp_path, "val")["images/c.jpg"][0][0] == "no"  # not false
        (tmp_path / "val.txt").write_text("images/z.jpg\n")
        with pytest.raises(DataError, match=r"val\.txt: images that do not exist: images/z\.jpg"):
            make(tmp_path, "yolo")

    def test_names_without_yaml_and_labels_next_to_images(self, tmp_path: Path) -> None:
        yolo(tmp_path, {"a.jpg": "1 .5 .5 .2 .4"}, None)
        (tmp_path / "classes.txt").write_text("cat\ndog\n")
        make(tmp_path, "yolo")
        assert boxes_of(tmp_path) == {"a.jpg": [("dog", [40, 15, 20, 20], 0)]}

    def test_turned_images_count_as_shown(self, tmp_path: Path) -> None:
        yolo(tmp_path, {"images/a.jpg": "0 .5 .5 .2 .4"})
        picture(tmp_path / "images/a.jpg", turn=6)  # shown as 50 x 100
        make(tmp_path, "yolo")
        assert boxes_of(tmp_path)["images/a.jpg"][0][1] == [20, 30, 10, 40]
        prepare(tmp_path, tmp_path / "store", pack=True)
        split = open_dataset(tmp_path, tmp_path / "store")["train"]
        assert len(split.trainable) == 1

    @pytest.mark.parametrize("name", ["b.jpg", "b.HEIC"])
    def test_unreadable_images_are_dropped_and_reported(self, tmp_path: Path, name: str) -> None:
        yolo(tmp_path, {"images/a.jpg": "0 .5 .5 .2 .4", "images/b.jpg": "0 .5 .5 .2 .4"})
        (tmp_path / "images/b.jpg").unlink()
        (tmp_path / "images" / name).write_bytes(b"?")
        make(tmp_path, "yolo")
        with pytest.raises(DataError, match=r"1 of 2 images .* 1 x not a readable image"):
            prepare(tmp_path, tmp_path / "store", pack=False)
        report = prepare(tmp_path, tmp_path / "store", pack=True, allow_dropped=True).splits[0]
        assert [f.kind for f in report.findings] == ["image dropped"]
        assert name in report.findings[0].detail
        assert report.trainable == 1

    def test_labels_that_change_later_are_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root, store = tmp_path / "data", tmp_path / "store"
        yolo(root, {"images/a.jpg": "0 .5 .5 .2 .4", "images/b.jpg": None})
        open_dataset(root, store)
        open_dataset(root, store)
        assert not caplog.messages
        (root / "labels/b.txt").write_text("0 .5 .5 .2 .4")
        assert len(open_dataset(root, store)["train"].trainable) == 1
        (message,) = caplog.messages
        assert "changed, or were copied, since they were read" in message
        assert f"ssdctl prepare --data {root}" in message
        count_images(root, store)  # train --dry-run
        assert caplog.messages == [message, message]
        caplog.clear()
        convert_again(root, store)
        prepare(root, store, pack=True)
        assert len(open_dataset(root, store)["train"].trainable) == 2
        shutil.rmtree(root / "labels")
        (root / "data.yaml").unlink()
        open_dataset(root, store)
        assert not caplog.messages  # a packed store needs no originals

    def test_labels_without_an_image_are_counted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        line = "0 .5 .5 .2 .4"
        yolo(tmp_path, {"images/a.jpg": line, "images/b.jpg": line, "images/c.jpg": ""})
        for name in ("b", "c"):
            (tmp_path / f"images/{name}.jpg").unlink()  # c has no box to lose
        (tmp_path / "labels/classes.txt").write_text("cat\ndog\n")
        make(tmp_path, "yolo")
        (message,) = caplog.messages
        assert message == "1 label files have no image and are left out, among them labels/b.txt"

    @pytest.mark.parametrize(
        ("folders", "yaml"),
        [
            (("obj_train_data", "obj_valid_data"), None),
            (("obj_Train_data", "obj_Validation_data"), None),
            (("images/Train", "images/Validation"), "Train: Train.txt\nValidation: Val.txt\n"),
            (("images/Train", "images/Val"), None),
            (("train/images", "validation/images"), None),
        ],
    )
    def test_subsets_of_cvat(
        self, tmp_path: Path, folders: tuple[str, str], yaml: str | None
    ) -> None:
        line = "0 .5 .5 .2 .4"
        train, val = (f"{folder}/a.jpg" for folder in folders)
        yolo(tmp_path, {train: line, val: line}, yaml and f"names: {{0: a}}\npath: .\n{yaml}")
        (tmp_path / "obj.names").write_bytes(b"\xef\xbb\xbfcat\r\n")
        (tmp_path / "Train.txt").write_text(f"data/{train}\n")
        (tmp_path / "Val.txt").write_text(f"data/{val}\n")
        make(tmp_path, "yolo")
        assert list(boxes_of(tmp_path)) == [train]
        assert list(boxes_of(tmp_path, "val")) == [val]
        assert boxes_of(tmp_path)[train][0][0] == ("a" if yaml else "cat")

    def test_linked_folders_and_files_of_macos(self, tmp_path: Path) -> None:
        yolo(tmp_path / "other", {"images/a.jpg": "0 .5 .5 .2 .4"}, None)
        root = tmp_path / "root"
        for name in ("images", "labels"):
            (root / name).mkdir(parents=True)
            (root / name / "part").symlink_to(tmp_path / "other" / name)
        (root / "images/._a.jpg").write_bytes(b"\0\5\x16\7")
        (root / "data.yaml").write_text("train: images\nnames: [cat]\n")
        make(root, "yolo")
        assert list(boxes_of(root)) == ["images/part/a.jpg"]

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("2 .5 .5 .2 .4", "a.txt:2: class 2, but there are 2 names"),
            ("-1 .5 .5 .2 .4", "class -1"),
            ("0.5 .5 .5 .2 .4", "class 0.5"),
            ("0 50 25 20 20", "not fractions"),
            ("0 nan .5 .2 .4", "not fractions"),
            ("0 .5 .5 .2", "3 numbers after the class"),
            ("0 .5 .5 .2 .4 .9", "5 numbers after the class"),
            ("cat .5 .5 .2 .4", "a.txt:2: 'cat .5 .5 .2 .4'"),
            ("nan .5 .5 .2 .4", "a.txt:2"),
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path: Path, line: str, words: str) -> None:
        yolo(tmp_path, {"images/a.jpg": f"0 .5 .5 .2 .4\n{line}\n"})
        with pytest.raises(DataError, match=words):
            make(tmp_path, "yolo")

    @pytest.mark.parametrize(
        ("yaml", "words"),
        [
            (None, "not YOLO"),
            ("names: [cat, dog]\nnc: 3\n", "nc is 3, but there are 2 names"),
            ("names: {0: cat, 2: dog}\n", "without a gap"),
            ("names: [cat, cat]\n", "twice: cat"),
            ("names: []\n", "must be a list"),
            ("names: [[cat], dog]\n", "must be a list"),
            ("names: [cat, dog", "data.yaml: cannot be read"),
            ("names: [cat, dog]\nnames: [cat]\n", "line 2"),
            ("names:\n  0: cat\n  1: dog\n  1: cow\n", "line 4"),
            ("names: {0: cat, 1: dog, 0: cat}\n", "line 1"),
            ("names: [cat, dog]\ntrain: pics\n", "pics is not below"),
            ("names: [cat, dog]\ntrain: ../../../../etc\n", "is not below"),
        ],
    )
    def test_a_broken_description(self, tmp_path: Path, yaml: str | None, words: str) -> None:
        yolo(tmp_path, {"images/a.jpg": "0 .5 .5 .2 .4"}, yaml)
        with pytest.raises(DataError, match=words):
            make(tmp_path, "yolo")

    @given(st.data())
    @pytest.mark.process
    def test_any_label_file(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Boxes inside the image within the slack, or one message that names the file."""
        root = tmp_path_factory.getbasetemp() / "yolo"
        numbers = st.one_of(st.floats(-0.1, 1.1), st.floats(), st.integers(-2, 3)).map(str)
        lines = st.lists(st.lists(numbers, max_size=8).map(" ".join), max_size=3).map("\n".join)
        yolo(root, {"images/a.jpg": data.draw(st.one_of(lines, st.text(max_size=20)))})
        try:
            make(root, "yolo")
        except SsdctlError as error:
            assert "a.txt" in str(error)  # noqa: PT017
        else:
            for _, (x, y, w, h), _ in boxes_of(root)["images/a.jpg"]:
                assert min(x, y) >= -51
                assert x + w <= 152
                assert y + h <= 77


class TestDividing:
    def test_split_is_the_same_everywhere(self, shapes: Path, tmp_path: Path) -> None:
        shutil.copytree(shapes / "train2017", tmp_path / "train2017")
        path = tmp_path / "annotations/instances_train2017.json"
        path.parent.mkdir()
        complete = json.loads((shapes / "annotations/instances_train2017.json").read_text())
        path.write_text(json.dumps(complete))
        make(tmp_path, None, 0.75)
        train, val = boxes_of(tmp_path), boxes_of(tmp_path, "val")
        assert (len(train), len(val)) == (18, 6)
        assert not set(train) & set(val)
        names = [i["file_name"] for i in complete["images"]]
        assert list(train) == [name for name in names if name in train]  # in the file's order
        assert sum(map(len, [*train.values(), *val.values()])) == len(complete["annotations"])
        complete["images"].reverse()
        path.write_text(json.dumps(complete))
        make(tmp_path, None, 0.75)
        assert set(boxes_of(tmp_path)) == set(train)
        open_dataset(tmp_path, tmp_path / "store")

    def test_the_same_again_changes_nothing(self, tmp_path: Path) -> None:
        yolo(tmp_path, {f"images/{i}.jpg": "0 .5 .5 .2 .4" for i in range(10)})
        make(tmp_path, "yolo", 0.8)
        written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
        prepare(tmp_path, tmp_path / "store", pack=False)
        make(tmp_path, "yolo", 0.8)
        make(tmp_path, None, 0.8)  # from the same originals
        assert prepare(tmp_path, tmp_path / "store", pack=False).unchanged
        assert {p: p.stat().st_mtime_ns for p in written} == written
        assert "source yolo, split 0.8" in (describe_conversion(tmp_path) or "")
        make(tmp_path, "yolo")
        assert set(find_splits(tmp_path)) == {"train"}
        assert not list((tmp_path / "annotations").glob("ssdctl_val*"))

    def test_a_dataset_toml_of_the_users_own(self, shapes: Path, tmp_path: Path) -> None:
        shutil.copytree(shapes / "train2017", tmp_path / "photos")
        shutil.copy(shapes / "annotations/instances_train2017.json", tmp_path / "labels.json")
        own = '# mine\n[train]\nimages = "photos"\nannotations = "labels.json"\n'
        (tmp_path / "dataset.toml").write_text(own)
        with pytest.raises(UsageError, match=r"dataset\.toml exists"):
            make(tmp_path, "voc")
        make(tmp_path, None, 0.5)
        make(tmp_path, None, 0.75, "ball", "star")
        assert (tmp_path / "dataset.original.toml").read_text() == own
        assert (len(boxes_of(tmp_path)), len(boxes_of(tmp_path, "val"))) == (18, 6)

    def test_classes_keep_ids_and_fields(self, shapes: Path, tmp_path: Path) -> None:
        path = shapes / "annotations/instances_train2017.json"
        complete = json.loads(path.read_text())
        kept = json.loads(with_classes(path.read_bytes(), ["star", "ball"], path))
        assert kept["categories"] == [c for c in complete["categories"] if c["id"] in (1, 7)]
        assert kept["images"] == complete["images"]
        assert kept["annotations"] == [
            a for a in complete["annotations"] if a["category_id"] in (1, 7)
        ]

    def test_what_makes_no_sense(self, shapes: Path, tmp_path: Path) -> None:
        root = tmp_path / "shapes"
        shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
        with pytest.raises(UsageError, match="has validation images already"):
            make(root, None, 0.9)
        with pytest.raises(UsageError, match="has no class 'bal'") as error:
            make(root, None, None, "bal")
        assert "'ball'" in (error.value.hint or "")
        with pytest.raises(DataError, match="no dataset found") as absent:
            make(tmp_path, None, 0.9)
        assert "dataset.toml" in (absent.value.hint or "")
        assert not (root / "dataset.toml").exists()

    @given(
        st.lists(st.text("abc/é", min_size=1), min_size=2, max_size=30, unique=True),
        st.floats(0.01, 0.99),
    )
    @pytest.mark.process
    def test_any_division(self, names: list[str], share: float) -> None:
        """Every image and box occurs once; both sides have some; fewer images move no others."""
        images = [LabeledImage(n, 9, 9, [LabeledBox("x", 0, 0, 1, 1)]) for n in names]
        parts = [json.loads(p) for p in divided(document(images, ["x"]), share, Path("a.json"))]
        sides: list[dict[str, Any]] = parts
        file_names = [{i["file_name"] for i in part["images"]} for part in sides]
        assert file_names[0] | file_names[1] == set(names)
        assert not file_names[0] & file_names[1]
        assert all(file_names)
        for part in sides:
            ids = [i["id"] for i in part["images"]]
            assert [a["image_id"] for a in part["annotations"]] == ids


# Converts repeatedly, each time with other options than before.
PROGRAM = """
import itertools, sys
from pathlib import Path
from ssdctl.data.convert import Conversion, convert
print("go", flush=True)
for split, classes in itertools.cycle([(0.8, ()), (None, ()), (0.5, ()), (None, ("cat",))]):
    convert(Path(sys.argv[1]), Conversion("yolo", split, classes))
"""


def start(root: Path) -> subprocess.Popen[str]:
    """A process that converts `root` until it is killed, past its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


class TestKills:
    """dataset.toml and the annotations that it names are of one conversion, at any moment."""

    @pytest.mark.process
    def test_a_few(self, tmp_path: Path) -> None:
        self._kill(tmp_path, num_kills=6)

    @pytest.mark.slow
    def test_many(self, tmp_path: Path) -> None:
        self._kill(tmp_path, num_kills=50)

    def test_two_at_once(self, tmp_path: Path) -> None:
        self._fill(tmp_path)
        make(tmp_path, "yolo", 0.8)
        both = [start(tmp_path), start(tmp_path)]
        time.sleep(1)
        assert all(process.poll() is None for process in both)  # neither was disturbed by the other
        for process in both:
            end(process)
        self._check(tmp_path)

    @staticmethod
    def _fill(root: Path) -> None:
        yolo(root, {f"images/{i}.jpg": f"{i % 2} .5 .5 .2 .4" for i in range(20)})

    def _kill(self, root: Path, num_kills: int) -> None:
        self._fill(root)
        make(root, "yolo", 0.8)
        dice = random.Random(num_kills)
        for _ in range(num_kills):
            process = start(root)
            time.sleep(0.02 + dice.random() * 0.1)
            assert process.poll() is None
            end(process)
            self._check(root)
        make(root, "yolo")
        assert [p.name for p in (root / "annotations").glob("*.json")] == [
            find_splits(root)["train"].annotations.name
        ]

    @staticmethod
    def _check(root: Path) -> None:
        description = describe_conversion(root) or ""
        sides = {split: set(boxes_of(root, split)) for split in find_splits(root)}
        classes = {name for boxes in boxes_of(root).values() for name, _, _ in boxes}
        assert ("split" in description) == ("val" in sides), description
        assert sum(map(len, sides.values())) == len(set().union(*sides.values())) == 20, description
        assert len(sides["train"]) == (
            16 if "0.8" in description else 10 if "0.5" in description else 20
        ), description
        assert classes == ({"cat"} if "classes" in description else {"cat", "dog"}), description
