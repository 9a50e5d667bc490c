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
from ssdctl.data.convert import Conversion, convert, convert_again, describe_conversion
from ssdctl.data.formats.coco_writer import divided, document, with_classes

from ssdctl.data.annotations import LabeledBox, LabeledImage
from ssdctl.data.dataset import find_splits
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
