"""YOLO: data.yaml, Darknet's files, labels in the usual places, and what is broken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.formats import exports
from data.formats.exports import boxes_of, tree
from data.samples import encoded, sample
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data.annotations import Conversion
from ssdctl.data.dataset import find
from ssdctl.data.formats.yolo import read, recognize
from ssdctl.data.prepare import prepare
from ssdctl.data.store import open_split
from ssdctl.errors import DataError, SsdctlError

BOX = "0 .5 .5 .2 .4"


def yolo(
    root: Path, labels: Mapping[str, str | None], yaml: str | None = "names: [cat, dog]\n"
) -> Path:
    """Images by path, each with the text of its label file."""
    for name, text in labels.items():
        exports.image_file(root / name)
        if text is not None:
            parts = ["labels" if p == "images" else p for p in Path(name).parts]
            exports.write(root.joinpath(*parts).with_suffix(".txt"), text)
    return tree(root, {} if yaml is None else {"data.yaml": yaml})


def test_boxes_polygons_backgrounds(tmp_path: Path) -> None:
    lines = "0 0.5 0.5 0.2 0.4\n1 0.1 0.1 0.3 0.1 0.3 0.5\n\n0 0.5 0.5 0.2 0.4\n"
    labels = {"images/train/a.jpg": lines, "images/train/b.jpg": "", "images/train/c.jpg": None}
    splits = read(yolo(tmp_path, {**labels, "images/val/d.jpg": "1.0 .5 .5 1 1"}))
    assert boxes_of(splits) == {
        "images/train/a.jpg": [("cat", [40, 15, 20, 20], 0), ("dog", [10, 5, 20, 20], 0)],
        "images/train/b.jpg": [],
        "images/train/c.jpg": [],
    }
    assert boxes_of(splits, "val") == {"images/val/d.jpg": [("dog", [0, 0, 100, 50], 0)]}


NAMES = "names: [no, dog]\n"
LISTED = ("./images/a.jpg", "/home/me/data/images/b.jpg"), ("../images/c.jpg",)
CVAT_LISTS = {
    "obj.names": "x\n",
    "T.txt": "data/images/Train/a.jpg",
    "V.txt": "data/images/x/b.jpg",
}


@pytest.mark.parametrize(
    ("train", "val", "yaml", "files"),
    [
        ("pics/images/a", "", "names: {0: no, 1: dog}\nnc: 2\ntrain: pics/images\n", {}),
        ("pics/images/a", "", NAMES + "train: ../pics/images\nval:\n", {}),
        ("images/t/a", "", NAMES + "path: ../datasets/x\ntrain: images/t\n", {}),
        ("train/images/a", "", NAMES + "path: /elsewhere/data\ntrain: train/images\n", {}),
        ("images/one/a", "", NAMES + "train: [images/one, images/one]\n", {}),
        ("train/a", "", NAMES, {}),
        ("images/train2017/a", "", NAMES + "kpt_shape: [2, 3]\n", {}),
        # Lists of images, in files and in data.yaml
        ("images/a images/b", "images/c", f"{NAMES}train: {[*LISTED[0]]}\nval: {[*LISTED[1]]}\n", {}),
        # Subsets of CVAT, which writes a byte order mark
        ("obj_train_data/a", "obj_valid_data/a", None, {"obj.names": "\ufeffno\r\n"}),
        ("obj_Train_data/a", "obj_Validation_data/a", None, {"obj.names": "no"}),
        ("images/Train/a", "images/x/b", f"{NAMES}path: .\nTrain: T.txt\nValidation: V.txt", CVAT_LISTS),
        ("images/Train/a", "images/Val/a", None, {"obj.names": "no"}),
    ],
)  # fmt: skip
def test_where_images_are(
    tmp_path: Path, train: str, val: str, yaml: str | None, files: dict[str, str | None]
) -> None:
    line = BOX + (" .1 .1 2 .2 .2 1" if yaml and "kpt" in yaml else "")
    images = [[f"{name}.jpg" for name in names.split()] for names in (train, val)]
    yolo(tmp_path, dict.fromkeys(images[0] + images[1], line), yaml)
    splits = read(tree(tmp_path, files))
    expected = [("no", [40, 15, 20, 20], 0)]  # not false
    assert boxes_of(splits) == dict.fromkeys(images[0], expected)
    assert (boxes_of(splits, "val") if val else {}) == dict.fromkeys(images[1], expected)


def test_a_list_names_images_that_exist(tmp_path: Path) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX}, "names: [cat]\ntrain: images\nval: val.txt\n")
    with pytest.raises(DataError, match=r"val\.txt.*images/z\.jpg"):
        read(tree(tmp_path, {"val.txt": "images/z.jpg\n"}))


def test_turned_images_count_as_shown(tmp_path: Path) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX})
    exports.image_file(tmp_path / "images/a.jpg", turn=6)  # shown as 50 x 100
    assert boxes_of(read(tmp_path))["images/a.jpg"][0][1] == [20, 30, 10, 40]


@pytest.mark.parametrize("options", [{}, {"pack": False}, {"shrink": 40}, {"encoding": "raw"}])
def test_images_that_keep_their_size_are_turned(tmp_path: Path, options: dict[str, Any]) -> None:
    shown = sample(100, 50, 1)
    stored = {"jpg": encoded(shown.rotate(180), turn=3), "png": encoded(shown, "PNG")}
    stored["webp"] = encoded(shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "WEBP", turn=2)
    yolo(tmp_path, {f"images/{suffix}.{suffix}": BOX for suffix in stored})
    for suffix, content in stored.items():
        (tmp_path / f"images/{suffix}.{suffix}").write_bytes(content)
    rows = "".join(f"{s}.{s},100,50,cat,1,1,9,9\n" for s in stored)
    table = f"filename,width,height,class,xmin,ymin,xmax,ymax\n{rows}"
    exports.write(tmp_path / "train.csv", table)
    for source in ("tf-csv", "yolo"):  # whose images must not be taken over
        conversion = Conversion(source)
        prepare(tmp_path, tmp_path / "store", PrepareConfig(**options), conversion)
    split = open_split(tmp_path, tmp_path / "store", "train")
    for row in range(3):
        pixels = split.decode(row)
        expected = np.asarray(shown.resize(pixels.shape[1::-1]), np.int16)
        assert np.abs(pixels - expected).mean() < 20


@pytest.mark.parametrize("name", ["b.jpg", "b.HEIC"])
def test_unreadable_images_are_left_to_the_check(tmp_path: Path, name: str) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX, "images/b.jpg": BOX})
    (tmp_path / "images/b.jpg").unlink()
    splits = read(tree(tmp_path, {f"images/{name}": "?"}))
    assert splits["train"].sizes.tolist()[1] == [0, 0]  # dropped by the check
    assert boxes_of(splits)[f"images/{name}"] == []


def test_labels_without_an_image_are_counted(tmp_path: Path) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX})
    tree(tmp_path, {"labels/b.txt": BOX, "labels/c.txt": "", "labels/classes.txt": "cat\ndog\n"})
    (note,) = read(tmp_path)["train"].notes  # c has no box to lose
    assert "left out: 1, such as" in note
    assert "labels/b.txt" in note


def test_linked_folders_and_files_of_macos(tmp_path: Path) -> None:
    yolo(tmp_path / "other", {"images/a.jpg": BOX}, None)
    files = {"images/._a.jpg": "\0", "labels/x": "", "data.yaml": "train: images\nnames: [cat]\n"}
    root = tree(tmp_path / "root", files)
    for name in ("images", "labels"):
        (root / name / "part").symlink_to(tmp_path / "other" / name)
    assert list(boxes_of(read(root))) == ["images/part/a.jpg"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2 .5 .5 .2 .4", "a.txt:2: class 2"),
        ("-1 .5 .5 .2 .4", "a.txt:2: class -1"),
        ("0.5 .5 .5 .2 .4", "a.txt:2: class 0.5"),
        ("0 50 25 20 20", "a.txt:2: .*fractions"),
        ("0 nan .5 .2 .4", "a.txt:2: .*fractions"),
        ("0 .5 .5 .2", "a.txt:2: 3 numbers"),
        ("0 .5 .5 .2 .4 .9", "a.txt:2: 5 numbers"),
        ("cat .5 .5 .2 .4", "a.txt:2: 'cat .5 .5 .2 .4'"),
        ("nan .5 .5 .2 .4", "a.txt:2"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    yolo(tmp_path, {"images/a.jpg": f"{BOX}\n{line}\n"})
    with pytest.raises(DataError, match=words):
        read(tmp_path)


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
def test_a_broken_description(tmp_path: Path, yaml: str | None, words: str) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX}, yaml)
    with pytest.raises(DataError, match=words):
        read(tmp_path)


@given(st.data())
def test_any_label_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Boxes inside the image within the slack, or one message that names the file."""
    root = tmp_path_factory.getbasetemp() / "yolo"
    numbers = st.one_of(st.floats(-0.1, 1.1), st.floats(), st.integers(-2, 3)).map(str)
    lines = st.lists(st.lists(numbers, max_size=8).map(" ".join), max_size=3).map("\n".join)
    yolo(root, {"images/a.jpg": data.draw(st.one_of(lines, st.text(max_size=20)))})
    try:
        splits = read(root)
    except SsdctlError as error:
        assert "a.txt" in str(error)  # noqa: PT017
    else:
        for _, (x, y, w, h), _ in boxes_of(splits)["images/a.jpg"]:
            assert min(x, y) >= -51
            assert x + w <= 152
            assert y + h <= 77


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("obj.names", None),
        ("my.names", None),
        ("cfg/my.names", None),
        ("x/my.names", "names = y/my.names"),
    ],
)
def test_names_of_darknet(tmp_path: Path, name: str, data: str | None) -> None:
    yolo(tmp_path, {"images/a.jpg": "1 .5 .5 .2 .4"}, None)
    tree(tmp_path, {name: "cat\ndog\n"})
    if data is not None:
        tree(tmp_path, {"other.names": "x\n"})  # not the only one: only *.data decides
        with pytest.raises(DataError, match=re.escape(str(tmp_path))):
            find(tmp_path)
        tree(tmp_path, {"my.data": f"classes = 2\n{data}\n"})
    assert find(tmp_path)[0] == "yolo"
    assert boxes_of(read(tmp_path))["images/a.jpg"][0][0] == "dog"


@pytest.mark.parametrize(
    ("file", "content"),
    [("b/classes.txt", "dog\ncat\n"), ("b/obj.names", "dog\n"), ("b/data.yaml", "names: [dog]")],
)
def test_names_of_a_folder_must_be_those_of_the_dataset(
    tmp_path: Path, file: str, content: str
) -> None:
    yolo(tmp_path, {"a/x.jpg": "0 .5 .5 .2 .4", "b/y.jpg": "0 .5 .5 .2 .4"}, "names: [cat, dog]")
    tree(tmp_path, {"a/classes.txt": "cat\n", file: content})
    with pytest.raises(DataError, match=re.escape(file)):
        read(tmp_path)


def test_lists_of_darknet(tmp_path: Path) -> None:
    exports.darknet(tmp_path)
    for path in (tmp_path, tmp_path / "data/parts.data"):
        splits = read(path)
        folder = "data/img" if path == tmp_path else "img"
        assert list(boxes_of(splits)) == [f"{folder}/{n}.jpg" for n in range(6)]
        assert len(boxes_of(splits, "val")) == 6
    (tmp_path / "data/parts.names").rename(tmp_path / "data/parts.txt")
    with pytest.raises(DataError, match=r"parts\.data: names"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("line", "is_yolo"),
    [
        (BOX, True),
        *((line, False) for line in ("a cat in a garden", "cat 10 20 30 40", "0 10 20 30 40", "")),
    ],
)
@pytest.mark.parametrize("folder", ["photos", "marks"])
def test_text_beside_an_image_is_yolo_if_its_content_is(
    tmp_path: Path, line: str, is_yolo: bool, folder: str
) -> None:
    root = tree(tmp_path / "data", {"photos/a.jpg": None, f"{folder}/a.txt": line})
    with pytest.raises(DataError, match=re.escape(str(root))) as error:
        find(root)
    assert ("classes.txt, with" in str(error.value.hint)) == is_yolo
    (root / "classes.txt").write_text("cat\n")  # the hint leads to a dataset
    assert (recognize(root) is not None) == is_yolo
    if is_yolo:
        assert boxes_of(read(root)) == {"photos/a.jpg": [("cat", [40, 15, 20, 20], 0)]}
