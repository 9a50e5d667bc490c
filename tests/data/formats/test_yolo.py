"""YOLO: data.yaml, Darknet's files, labels in the usual places, and what is broken."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from data.formats.exports import boxes_of, tree

from ssdctl.data.dataset import find
from ssdctl.data.formats.yolo import read, recognize
from ssdctl.errors import DataError

BOX = "0 .5 .5 .2 .4"


def yolo(
    root: Path, labels: Mapping[str, str | None], yaml: str | None = "names: [cat, dog]\n"
) -> Path:
    files = dict.fromkeys(labels)
    for name, text in labels.items():
        if text is not None:
            parts = ["labels" if p == "images" else p for p in Path(name).parts]
            files[str(Path(*parts).with_suffix(".txt"))] = text
    return tree(root, files if yaml is None else {**files, "data.yaml": yaml})


def test_labels_without_an_image_are_counted(tmp_path: Path) -> None:
    yolo(tmp_path, {"images/a.jpg": BOX})
    tree(tmp_path, {"labels/b.txt": BOX, "labels/c.txt": "", "labels/classes.txt": "cat\ndog\n"})
    (note,) = read(tmp_path)["train"].notes  # c has no box to lose
    assert "left out: 1, such as" in note
    assert "labels/b.txt" in note


@pytest.mark.parametrize("train", ["images/train", "images/train/list.txt"])
def test_labeled_images_that_no_split_names_are_counted(train: str, tmp_path: Path) -> None:
    images = dict.fromkeys(("images/train/a.jpg", "images/more/b.jpg"), BOX)
    yolo(tmp_path, images, f"train: {train}\nnames: [cat]\n")
    tree(tmp_path, {"images/train/list.txt": "a.jpg\n", "labels/train/c.txt": BOX})
    without, unnamed = sorted(read(tmp_path)["train"].notes)
    assert "labels/train/c.txt" in without
    assert "images/more/b.jpg" in unnamed


def test_linked_folders_and_files_of_macos(tmp_path: Path) -> None:
    yolo(tmp_path / "other", {"images/a.jpg": BOX}, None)
    files = {"images/._a.jpg": "\0", "labels/x": "", "data.yaml": "train: images\nnames: [cat]\n"}
    root = tree(tmp_path / "root", files)
    for name in ("images", "labels"):
        (root / name / "part").symlink_to(tmp_path / "other" / name)
    (root / "images/again").symlink_to(root / "images")
    assert list(boxes_of(read(root))) == ["images/part/a.jpg"]
    (root / "pool").symlink_to(root / "images")  # the same folder under another name
    (root / "data.yaml").write_text("train: pool\nnames: [cat]\n")
    assert list(boxes_of(read(root))) == ["images/part/a.jpg"]


def test_splits_may_link_to_the_same_images(tmp_path: Path) -> None:
    yaml = "train: images/train\nval: images/val\nnames: [cat]\n"
    files = {"labels/train/a.txt": BOX, "labels/val/b.txt": BOX, "data.yaml": yaml}
    tree(tmp_path, {"pool/a.jpg": None, "pool/b.jpg": None, "images/x": "", **files})
    for split in ("train", "val"):
        (tmp_path / "images" / split).symlink_to(tmp_path / "pool")
    splits = read(tmp_path)
    assert boxes_of(splits, "train")["images/train/a.jpg"]
    assert boxes_of(splits, "val")["images/val/b.jpg"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2 .5 .5 .2 .4", "a.txt:2: class 2"),
        ("0.5 .5 .5 .2 .4", "a.txt:2: class 0.5"),
        ("0 50 25 20 20", "a.txt:2: .*fractions"),
        ("0 nan .5 .2 .4", "a.txt:2: .*fractions"),
        ("0 .5 .5 .2 .4 .9", "a.txt:2: 5 numbers"),
        ("cat .5 .5 .2 .4", "a.txt:2: 'cat .5 .5 .2 .4'"),
        # data.yaml
        (None, "not YOLO"),
        ("names: [cat, dog]\nnc: 3\n", "nc is 3, but there are 2 names"),
        ("names: {0: cat, 2: dog}\n", "without a gap"),
        ("names: [cat, cat]\n", "twice: cat"),
        ("names: [[cat], dog]\n", "must be a list"),
        ("names: [cat, dog", "data.yaml: cannot be read"),
        ("names: [cat, dog]\nnames: [cat]\n", "line 2"),
        ("names:\n  0: cat\n  1: dog\n  1: cow\n", "line 4"),
        ("names: [cat, dog]\ntrain: pics\n", "pics is not below"),
        ("names: [cat, dog]\ntrain: ../../../../etc\n", "is not below"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, line: str | None, words: str) -> None:
    is_label = words.startswith("a.txt")
    label = f"{BOX}\n{line}\n" if is_label else BOX
    yolo(tmp_path, {"images/a.jpg": label}, "names: [cat, dog]" if is_label else line)
    with pytest.raises(DataError, match=words):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("obj.names", None), ("cfg/my.names", None), ("x/my.names", "names = y/my.names")],
)
def test_names_of_darknet(tmp_path: Path, name: str, data: str | None) -> None:
    yolo(tmp_path, {"images/a.jpg": "1 .5 .5 .2 .4"}, None)
    tree(tmp_path, {name: "cat\ndog\n"})
    if data is not None:
        tree(tmp_path, {"other.names": "x\n"})  # not the only one: only *.data decides
        with pytest.raises(DataError, match=re.escape(str(tmp_path))):
            find(tmp_path)
        (tmp_path / "my.data").write_bytes(f"# donn\xe9es\n{data}\n".encode("latin-1"))
    assert find(tmp_path)[0] == "yolo"
    assert boxes_of(read(tmp_path))["images/a.jpg"][0][0] == "dog"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\ncat\ndog\n", r"classes\.txt:1: .*blank"),
        (b"cat\n \ndog\n", r"classes\.txt:2: .*blank"),
        ("cat\ndog\n".encode("utf-16"), "UTF-16"),
        ("cät\ndög\n".encode("latin-1"), r"classes\.txt: cannot be read"),
    ],
)
def test_class_names_that_cannot_be_numbered_or_decoded(
    tmp_path: Path, content: bytes, words: str
) -> None:
    yolo(tmp_path, {"images/a.jpg": "1 .5 .5 .2 .4"}, None)
    (tmp_path / "classes.txt").write_bytes(b"cat\ndog\n\n \n")
    (tmp_path / "noise.data").write_bytes(b"\xff\xfe\xff")
    assert boxes_of(read(tmp_path))["images/a.jpg"][0][0] == "dog"
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(DataError, match=words):
        find(tmp_path)[1].read(tmp_path)
    (tmp_path / "labels/a.txt").unlink()  # of another format, with a list for another program
    assert recognize(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [("b/classes.txt", "dog\ncat\n"), ("b/obj.names", "dog\n"), ("b/data.yaml", "names: [dog]")],
)
def test_names_of_a_folder_must_be_the_datasets(tmp_path: Path, file: str, content: str) -> None:
    yolo(tmp_path, {"a/x.jpg": "0 .5 .5 .2 .4", "b/y.jpg": "0 .5 .5 .2 .4"}, "names: [cat, dog]")
    tree(tmp_path, {"a/classes.txt": "cat\n", file: content})
    with pytest.raises(DataError, match=re.escape(file)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("line", "is_yolo"),
    [
        (BOX, True),
        ("0 10 20 30 40", True),  # read as such, the error explains the fractions
        *((line, False) for line in ("a cat in a garden", "cat 10 20 30 40", "0 -9 20 30 40", "")),
    ],
)
@pytest.mark.parametrize("folder", ["photos", "marks"])
def test_text_of_yolo_is_recognized(tmp_path: Path, line: str, is_yolo: bool, folder: str) -> None:
    root = tree(tmp_path / "data", {"photos/a.jpg": None, f"{folder}/a.txt": line})
    with pytest.raises(DataError, match=re.escape(str(root))) as error:
        find(root)
    assert ("classes.txt, with" in str(error.value.hint)) == (line == BOX)
    (root / "classes.txt").write_text("cat\n")  # the hint leads to a dataset
    assert (recognize(root) is not None) == is_yolo
    if line == BOX:
        assert boxes_of(read(root)) == {"photos/a.jpg": [("cat", [40, 15, 20, 20], 0)]}
