"""Which image file labels mean, and which split: the same in every format, and never a guess."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from conftest import Cli
from data.formats.exports import tree
from data.formats.test_voc import thing, xml

from ssdctl.data.annotations import AUTOMATIC
from ssdctl.data.dataset import find, read_dataset, resolve_images
from ssdctl.data.open_dataset import annotations_of
from ssdctl.errors import DataError


def coco(names: str) -> str:
    images = [
        {"id": n, "file_name": name, "width": 100, "height": 50}
        for n, name in enumerate(names.split(), 1)
    ]
    objects = [
        {"id": i["id"], "image_id": i["id"], "category_id": 1, "bbox": [i["id"], 1, 5, 5]}
        for i in images
    ]
    categories = [{"id": 1, "name": "x"}]
    return json.dumps({"images": images, "annotations": objects, "categories": categories})


def csv(names: str) -> str:
    rows = [f"{name},100,50,x,{n},1,{n + 5},6" for n, name in enumerate(names.split(), 1)]
    return "\n".join(["filename,width,height,class,xmin,ymin,xmax,ymax", *rows])


def cvat(names: str) -> str:
    images = [
        f'<image name="{name.partition(":")[2]}" subset="{name.partition(":")[0]}" width="100" '
        f'height="50"><box label="x" xtl="{n}" ytl="1" xbr="{n + 5}" ybr="6"/></image>'
        for n, name in enumerate(names.split(), 1)
    ]
    return f"<annotations>{''.join(images)}</annotations>"


def voc(named: str = "") -> str:
    folder, _, name = named.rpartition("/")
    return xml(thing("x", 2, 2, 9, 9), file=name, folder=folder)


def openimages(ids: str) -> str:
    rows = [f'{image},"/m/x",0.1,0.2,0.3,0.4' for image in ids.split()]
    return "\n".join(['"ImageID","LabelName","XMin","XMax","YMin","YMax"', *rows])


YOLO = "0 .5 .5 .2 .4"
KITTI = "0.00 0 -1.58 5 6 25 26 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59"


def used(root: Path) -> dict[str, list[str | None]]:
    """Each split's image files, relative to the dataset folder; None for one that is missing."""
    splits = resolve_images(find(root)[1].read(root))
    return {
        split: [
            None if size is None else (images.folder / name).relative_to(root).as_posix()
            for name, size in zip(images.file_names, num_bytes, strict=True)
        ]
        for split, (images, num_bytes) in splits.items()
    }


def dataset(root: Path, images: str, labels: Mapping[str, str]) -> Path:
    tree(root, dict.fromkeys(images.split()))
    return tree(root, labels)


def files(text: str) -> list[str | None]:
    return [None if name == "-" else name for name in text.split()]


CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    # a name: images, labels, and the images of each split; "-": missing
    "a path of another machine, of an image in the folder above": (
        "images/val/0.jpg images/val/0.bmp",
        {"a.json": coco("C:/x/val/0.jpg C:/x/0.bmp")},
        {"train": "images/val/0.jpg -"},
    ),
    "a path of another machine in two splits": (
        "images/a.jpg images/b.jpg",
        {"train.json": coco("C:/me/a.jpg"), "val.json": coco("C:/me/a.jpg C:/me/b.jpg")},
        {"train": "images/a.jpg", "val": "images/a.jpg images/b.jpg"},
    ),
    "upper and lower case": (
        "images/A.JPG images/b.jpg images/b.JPG images/c.PNG",
        {"a.json": coco("a.jpg b.jpg c.png c.PNG")},
        {"train": "images/A.JPG images/b.jpg - images/c.PNG"},
    ),
    "VOC's lists of files, and XML files in folders": (
        "JPEGImages/a.jpg JPEGImages/b.jpg",
        {
            "Annotations/x/a.xml": voc(), "Annotations/y/b.xml": voc(), "JPEGImages/b.HEIC": "",
            "ImageSets/Main/train.txt": "a.jpg", "ImageSets/Main/val.txt": r"JPEGImages\b.jpg",
        },
        {"train": "JPEGImages/a.jpg", "val": "JPEGImages/b.jpg"},
    ),
    "data.yaml with another word": (
        "train/a.jpg val/b.jpg",
        {
            "data.yaml": "names: [x]\ntrain: ../train\nval: ../valid",
            "train/a.txt": YOLO, "val/b.txt": YOLO,
        },
        {"train": "train/a.jpg", "val": "val/b.jpg"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_images_that_labels_mean(tmp_path: Path, name: str) -> None:
    images, labels, expected = CASES[name]
    root = dataset(tmp_path / "data", images, labels)
    assert used(root) == {split: files(text) for split, text in expected.items()}


REFUSED: dict[str, tuple[str, dict[str, str], Iterable[str]]] = {
    # a name: images, labels, and what the error names
    "the image with the stem, and the named one": (
        "JPEGImages/b.jpg thumbs/a.jpg",
        {"Annotations/a.xml": voc("b.jpg")},
        ("JPEGImages/b.jpg", "thumbs/a.jpg", "Annotations/a.xml"),
    ),
    "two versions of labels": (
        "images/a.jpg",
        {"v1/a.xml": voc(), "v2/a.xml": voc().replace("9", "8")},
        ("v1/a.xml", "v2/a.xml"),
    ),
    "two spellings of one name": (
        "images/u\u0308.jpg images/\u00fc.jpg",
        {"classes.txt": "x", "labels/\u00fc.txt": YOLO},
        ("images/u\u0308.jpg", "images/\u00fc.jpg"),
    ),
    "two folders, COCO": (
        "cam1/a.jpg cam2/a.jpg",
        {"a.json": coco("a.jpg")},
        ("cam1/a.jpg", "cam2/a.jpg"),
    ),
    "one file for two entries, COCO": (
        "photo/0.png",
        {"a.json": coco("cam1/0.png cam2/0.png")},
        ("cam1/0.png", "cam2/0.png", "photo/0.png"),
    ),
    "YOLO without a label": (
        "img/a.jpg",
        {"classes.txt": "x", "labels/b.txt": YOLO},
        ("img/a.jpg", "labels/b.txt"),
    ),
    "YOLO, different labels": (
        "images/a.jpg",
        {"classes.txt": "x", "labels/a.txt": YOLO, "images/a.txt": f"{YOLO}\n{YOLO}"},
        ("labels/a.txt", "images/a.txt"),
    ),
    "CSV of all and more": (
        "images/a.jpg images/b.jpg",
        {"all.csv": csv("a.jpg b.jpg"), "train.csv": csv("a.jpg")},
        ("all.csv", "train.csv"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_or_missing_is_named(tmp_path: Path, name: str) -> None:
    images, labels, words = REFUSED[name]
    with pytest.raises(DataError) as error:
        used(dataset(tmp_path / "data", images, labels))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "labels",
    [
        {"annots/a.xml": voc("a.jpg")},
        {"a.json": coco("a.jpg")},
        {"train.csv": csv("a.jpg")},
        {"annotations.xml": cvat("Train:a.jpg")},
        {"classes.txt": "x", "labels/a.txt": YOLO},
        {"label_2/a.txt": f"x {KITTI}"},
        {"bbox.csv": openimages("a")},
    ],
)
def test_the_image_folder_is_an_option(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, labels: dict[str, str]
) -> None:
    data = dataset(tmp_path / "data", "pics/a.jpg drawn/a.jpg", labels)
    cli("prepare", "--data", data).expect(3, "--image-dir")
    assert cli("prepare", "--data", data, "--image-dir", "pic").code == 2
    for folder in ("pics", data / "pics", os.path.relpath(data / "pics")):
        cli("prepare", "--data", data, "--image-dir", folder, "--force").expect(0)
    monkeypatch.chdir(data)
    cli("prepare", "--data", data, "--force").expect(0)
    annotations = annotations_of(data, data / "prepared")["train"]
    assert (annotations.folder / annotations.file_names[0]) == data / "pics/a.jpg"


def test_copies_with_drawn_boxes_are_named(tmp_path: Path, cli: Cli) -> None:
    rows = [csv("a/1.jpg"), *(f"b/{n}.jpg,100,50,x,2,1,7,6" for n in (1, 2))]
    data = dataset(tmp_path, "a/1.jpg b/1.jpg b/2.jpg", {"train.csv": "\n".join(rows)})
    with (data / "b/1.jpg").open("ab") as file:
        file.write(b"drawn")
    found = cli("prepare", "--data", data).err
    assert "1 image with the name, size and boxes of another one" in found


NOTED = [
    ("pics/a.jpg", {"a.csv": csv("/home/me/a.jpg")}, "'/home/me/a.jpg' to pics/a.jpg"),
    ("pics/A.JPG", {"a.csv": csv("a.jpg")}, "'a.jpg' to pics/A.JPG"),
    ("train/a.jpg val/b.jpg", {"a.json": coco("train/a.jpg val/b.jpg")}, "(train: 1, val: 1)"),
    ("x/a.jpg", {"a.json": coco("a.jpg"), "x/b.json": coco("a.jpg")}, "not read: x/b.json"),
    ("a.jpg b.jpg", {"l.csv": csv("a.jpg b.jpg"), "val.txt": "b.jpg"}, "not used.*: val.txt"),
    (*CASES["data.yaml with another word"][:2], "../valid"),
]


@pytest.mark.parametrize(("images", "labels", "words"), NOTED)
def test_what_was_not_exactly_as_the_labels_say_is_noted(
    tmp_path: Path, images: str, labels: dict[str, str], words: str
) -> None:
    (note,) = read_dataset(dataset(tmp_path, images, labels), AUTOMATIC)["train"].notes
    assert re.search(words, note)


def test_a_link_to_a_folder_has_no_other_images(tmp_path: Path) -> None:
    folders = [f"data/v{n}" for n in range(12)]
    dataset(tmp_path, " ".join(f"{f}/{f[6:]}.jpg" for f in folders), {"l.csv": csv("0.jpg 1.jpg")})
    for name in folders:
        for other in folders:
            (tmp_path / name / f"to-{other[5:]}").symlink_to(tmp_path / other)
    assert used(tmp_path) == {"train": ["data/v0/0.jpg", "data/v1/1.jpg"]}
