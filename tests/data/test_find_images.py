"""Which image file labels mean, and which split: the same in every format, and never a guess."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from conftest import Cli
from data.formats.exports import image_file, tree

from ssdctl.data.annotations import AUTOMATIC, split_of
from ssdctl.data.dataset import find, read_dataset, resolve_images
from ssdctl.data.find_images import ImageFinder, Wanted
from ssdctl.data.open_dataset import annotations_of, annotations_with_images
from ssdctl.errors import DataError

SIZE = (100, 50)


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
    box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    return (
        f"<annotation><folder>{folder}</folder><filename>{name}</filename><size><width>100</width>"
        f"<height>50</height></size><object><name>x</name>{box}</object></annotation>"
    )


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
    "neither train nor val, VOC": (
        "train/a.jpg val/b.jpg old/c.jpg",
        {f"{name}.xml": voc() for name in ("train/a", "val/b", "old/c")},
        {"train": "train/a.jpg", "val": "val/b.jpg"},
    ),
    "validation images below the training images": (
        "0.png val/0.png",
        {"train.json": coco("0.png"), "val.json": coco("0.png")},
        {"train": "0.png", "val": "val/0.png"},
    ),
    "an exact path beside a longer one": (
        "a.jpg sub/a.jpg",
        {"a.json": coco("a.jpg sub/a.jpg")},
        {"train": "a.jpg sub/a.jpg"},
    ),
    "two files of one name, of which both are listed": (
        "a.png images/a.png images/b.png images/c.png",
        {"a.json": coco("a.png images/a.png b.png c.png")},
        {"train": "a.png images/a.png images/b.png images/c.png"},
    ),
    "the first images are in one folder": (
        " ".join(f"images/{n}.png" for n in range(25)) + " other/z.png",
        {"a.json": coco(" ".join(f"{n}.png" for n in range(25)) + " z.png")},
        {"train": " ".join(f"images/{n}.png" for n in range(25)) + " other/z.png"},
    ),
    "a path of another machine, of an image in the folder above": (
        "images/val/0.jpg images/val/0.bmp",
        {"a.json": coco("C:/x/val/0.jpg C:/x/0.bmp")},
        {"train": "images/val/0.jpg -"},
    ),
    "a missing image of a folder val in the folder of the split": (
        "images/train/1.bmp images/train/val/1.bmp images/val/1.jpg images/val/val/2.jpg",
        {
            "annotations/instances_train.json": coco("1.bmp val/1.bmp"),
            "annotations/instances_val.json": coco("1.jpg val/1.jpg val/2.jpg"),
        },
        {
            "train": "images/train/1.bmp images/train/val/1.bmp",
            "val": "images/val/1.jpg - images/val/val/2.jpg",
        },
    ),
    "two missing images of the folder above": (
        "train2017/cam1/1.bmp train2017/cam1/2.jpg",
        {"annotations/instances_train2017.json": coco("2.jpg 1.bmp cam1/1.bmp")},
        {"train": "- - train2017/cam1/1.bmp"},
    ),
    "a missing image of the folder that dataset.toml names": (
        "photos/0.jpg photos/val/1.jpg",
        {"t.json": coco("0.jpg"), "v.json": coco("val/1.jpg 1.jpg")}
        | {
            "dataset.toml": '[train]\nimages = "photos"\nannotations = "t.json"\n'
            '[val]\nimages = "photos"\nannotations = "v.json"\n'
        },
        {"train": "photos/0.jpg", "val": "photos/val/1.jpg -"},
    ),
    "a missing image of a folder, and a file of its name in another one": (
        "train2017/0.jpg train2017/cam1/0.jpg",
        {"annotations/instances_train2017.json": coco("0.jpg cam2/0.jpg")},
        {"train": "train2017/0.jpg -"},
    ),
    "COCO's own folders, names from the dataset folder": (
        "train2017/val/0.png train2017/val/1.png",
        {"annotations/instances_train2017.json": coco("train2017/val/0.png train2017/val/1.png")},
        {"train": "train2017/val/0.png train2017/val/1.png"},
    ),
    "the first images are missing": (
        "photos/z1.png photos/z2.png",
        {"a.json": coco(" ".join(f"{n}.png" for n in range(25)) + " z1.png z2.png")},
        {"train": " - " * 25 + "photos/z1.png photos/z2.png"},
    ),
    "YOLO, a folder val in both splits": (
        "images/train/a.jpg images/train/val/a.jpg images/val/a.jpg images/val/val/a.jpg",
        {f"labels/{name}.txt": YOLO for name in ("train/a", "train/val/a", "val/a", "val/val/a")}
        | {"data.yaml": "names: [x]\ntrain: images/train\nval: images/val"},
        {
            "train": "images/train/a.jpg images/train/val/a.jpg",
            "val": "images/val/a.jpg images/val/val/a.jpg",
        },
    ),
    "stale data.yaml, and folders of splits": (
        "images/train/a.jpg images/val/b.jpg",
        {"labels/train/a.txt": YOLO, "labels/val/b.txt": YOLO}
        | {"data.yaml": "names: [x]\ntrain: ../train/images\nval: /gone/dev_set"},
        {"train": "images/train/a.jpg", "val": "images/val/b.jpg"},
    ),
    "CVAT, a file per split": (
        "images/train/a.jpg images/val/a.jpg",
        {"train.xml": cvat(":a.jpg"), "val.xml": cvat(":a.jpg")},
        {"train": "images/train/a.jpg", "val": "images/val/a.jpg"},
    ),
    "Open Images, folders without labels": (
        "train/a.jpg train/s/b.jpg validation/c.jpg validation/t/d.jpg",
        {"train-annotations-bbox.csv": openimages("a")}
        | {"validation-annotations-bbox.csv": openimages("c")},
        {
            "train": "train/a.jpg train/s/b.jpg",
            "val": "validation/c.jpg validation/t/d.jpg",
        },
    ),
    "Open Images, drawings of its images": (
        "train/a.jpg drawn/train/a.png",
        {"train-annotations-bbox.csv": openimages("a")},
        {"train": "train/a.jpg"},
    ),
    "labelImg": (
        "images/a.jpg images/b.jpg",
        {"images/classes.txt": "x", "images/a.txt": YOLO, "images/b.txt": ""},
        {"train": "images/a.jpg images/b.jpg"},
    ),
    "CSV of the rest": (
        "images/a.jpg images/b.jpg",
        {"labels.csv": csv("a.jpg"), "test_labels.csv": csv("b.jpg")},
        {"train": "images/a.jpg", "val": "images/b.jpg"},
    ),
    "data.yaml with another word": (
        "train/a.jpg val/b.jpg",
        {
            "data.yaml": "names: [x]\ntrain: ../train\nval: ../valid",
            "train/a.txt": YOLO, "val/b.txt": YOLO,
        },
        {"train": "train/a.jpg", "val": "val/b.jpg"},
    ),
    "YOLO, two split words": (
        "training_demo/images/train/a.jpg training_demo/images/test/b.jpg",
        {
            "classes.txt": "x",
            "training_demo/labels/train/a.txt": YOLO,
            "training_demo/labels/test/b.txt": YOLO,
        },
        {"train": "training_demo/images/train/a.jpg", "val": "training_demo/images/test/b.jpg"},
    ),
    "YOLO, a label of a missing image": (
        "images/day1/a.jpg images/day1/b.jpg images/day2/b.jpg",
        {"classes.txt": "x", "labels/day1/a.txt": YOLO, "labels/day2/a.txt": YOLO}
        | {"labels/day2/b.txt": YOLO},
        {"train": "images/day1/a.jpg images/day1/b.jpg images/day2/b.jpg"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_images_that_labels_mean(tmp_path: Path, name: str) -> None:
    images, labels, expected = CASES[name]
    root = dataset(tmp_path / "data", images, labels)
    assert used(root) == {split: files(text) for split, text in expected.items()}
    if YOLO in labels.values():
        num_boxes = sum(len(split.boxes) for split in read_dataset(root, AUTOMATIC).values())
        is_missing = name == "YOLO, a label of a missing image"
        assert num_boxes == sum(text == YOLO for text in labels.values()) - is_missing


REFUSED: dict[str, tuple[str, dict[str, str], Iterable[str]]] = {
    # a name: images, labels, and what the error names
    "two folders, VOC": (
        "photos/a.jpg drawn/a.jpg",
        {"annots/a.xml": voc("a.jpg")},
        ("photos/a.jpg", "drawn/a.jpg"),
    ),
    "masks beside labels": (
        "photos/a.jpg annots/masks/a.jpg",
        {"annots/a.xml": voc("a.jpg")},
        ("photos/a.jpg", "annots/masks/a.jpg"),
    ),
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
    "two folders, CSV": ("x/a.jpg y/a.jpg", {"train.csv": csv("a.jpg")}, ("x/a.jpg", "y/a.jpg")),
    "a missing split, CSV": (
        "images/train/a.jpg",
        {"train.csv": csv("a.jpg"), "test.csv": csv("a.jpg")},
        ("a.jpg",),
    ),
    "a missing image, and the long name of another": (
        "train/a.jpg val/val/a.jpg",
        {"train/l.csv": csv("a.jpg"), "val/l.csv": csv("a.jpg val/a.jpg")},
        ("not below", ": a.jpg"),
    ),
    "a missing split, CVAT": (
        "images/train/a.png",
        {"annotations.xml": cvat("Train:a.png Test:a.png")},
        ("a.png",),
    ),
    "YOLO without a label": (
        "img/a.jpg",
        {"classes.txt": "x", "labels/b.txt": YOLO},
        ("img/a.jpg", "labels/b.txt"),
    ),
    "YOLO, two folders": (
        "photos/a.jpg drawn/a.jpg",
        {"classes.txt": "x", "labels/a.txt": YOLO},
        ("photos/a.jpg", "drawn/a.jpg"),
    ),
    "YOLO, different labels": (
        "images/a.jpg",
        {"classes.txt": "x", "labels/a.txt": YOLO, "images/a.txt": f"{YOLO}\n{YOLO}"},
        ("labels/a.txt", "images/a.txt"),
    ),
    "YOLO, other classes per split": (
        "train/a.jpg",
        {"train/a.txt": YOLO, "train/classes.txt": "x", "val/classes.txt": "y"},
        ("train/classes.txt", "val/classes.txt"),
    ),
    "stale data.yaml": (
        "images/a.jpg",
        {"data.yaml": "names: [x]\ntrain: old/train/images\nval: old/val/images"}
        | {"labels/a.txt": YOLO},
        ("old/train/images",),
    ),
    "stale data.yaml without split words": (
        "images/a.jpg",
        {"data.yaml": "names: [x]\ntrain: one/images\nval: two/images", "labels/a.txt": YOLO},
        ("one/images", "two/images"),
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


def test_the_declared_size_decides_between_equal_candidates(tmp_path: Path) -> None:
    image_file(tmp_path / "drawn/a.jpg", (200, 100))
    dataset(tmp_path, "photos/a.jpg", {"annots/a.xml": voc("a.jpg")})
    assert used(tmp_path) == {"train": ["photos/a.jpg"]}


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
def test_the_folder_of_the_images_is_an_option(
    tmp_path: Path, cli: Cli, labels: dict[str, str]
) -> None:
    data = dataset(tmp_path / "data", "pics/a.jpg drawn/a.jpg", labels)
    result = cli("prepare", "--data", data)
    assert result.code == 3
    assert "--image-dir" in result.err
    assert cli("prepare", "--data", data, "--image-dir", "pic").code == 2
    for folder in ("pics", data / "pics"):
        result = cli("prepare", "--data", data, "--image-dir", folder, "--force")
        assert result.code == 0, result.err
    annotations = annotations_of(data, data / "prepared")["train"]
    assert (annotations.folder / annotations.file_names[0]) == data / "pics/a.jpg"


def test_a_dataset_toml_is_a_dataset(tmp_path: Path, cli: Cli) -> None:
    toml = '[train]\nimages = "pics"\nannotations = "a.json"\n'
    dataset(tmp_path / "data", "pics/a.jpg", {"a.json": coco("a.jpg"), "dataset.toml": toml})
    result = cli("prepare", "--data", tmp_path / "data/dataset.toml", "--no-pack", "--json")
    assert json.loads(result.out)["root"] == str(tmp_path / "data")


@pytest.mark.parametrize("folder", ["annots", "images"])
def test_the_hint_names_the_folder_above(tmp_path: Path, cli: Cli, folder: str) -> None:
    dataset(tmp_path / "kangaroo", "images/a.jpg", {"annots/a.xml": voc("a.jpg")})
    result = cli("prepare", "--data", tmp_path / "kangaroo" / folder)
    assert result.code == 3
    assert f"--data {tmp_path / 'kangaroo'}?" in result.err


def test_a_refused_dataset_gets_no_store(tmp_path: Path, cli: Cli) -> None:
    data = dataset(tmp_path, "a.jpg", {"a.json": coco("a.jpg b.jpg")})
    assert cli("prepare", "--data", data).code == 3
    assert not (data / "prepared").exists()
    tree(data, {"a.json": coco("a.jpg")})
    assert cli("prepare", "--data", data).code == 0
    tree(data, {"a.json": coco("a.jpg b.jpg")})
    assert cli("prepare", "--data", data).code == 3
    assert (data / "prepared/report.json").exists()


def test_copies_with_drawn_boxes_are_named(tmp_path: Path, cli: Cli) -> None:
    rows = [csv("a/1.jpg"), *(f"b/{n}.jpg,100,50,x,2,1,7,6" for n in (1, 2))]
    data = dataset(tmp_path, "a/1.jpg b/1.jpg b/2.jpg", {"train.csv": "\n".join(rows)})
    with (data / "b/1.jpg").open("ab") as file:
        file.write(b"drawn")
    found = cli("prepare", "--data", data).err
    assert "1 image with the name, size and boxes of another one" in found


def test_a_class_with_a_comma_can_be_kept(tmp_path: Path, cli: Cli) -> None:
    labels = csv("a.jpg").replace(",x,", ',"a,b",')
    data = dataset(tmp_path / "data", "a.jpg", {"train.csv": labels})
    result = cli("prepare", "--data", data, "--classes", "a,b")
    assert result.code == 2
    arguments = shlex.split(result.err.partition("write ")[2].partition(" for ")[0])
    assert arguments == ["--classes", '["a,b"]']
    assert cli("prepare", "--data", data, *arguments).code == 0
    assert arguments[1] in cli("prepare", "--data", data).err  # the options of the last time


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("training_demo/images/valid", "val"),
        ("test/instances_train2017.json", "train"),
        ("data/train/val_old", "val"),
        ("trainer/devices", None),
        ("train/train_test", "train"),
        ("obj_Train_data", "train"),
        ("", None),
    ],
)
def test_the_innermost_word_is_the_split(path: str, split: str | None) -> None:
    assert split_of(path) == split


def test_names_that_are_no_paths_are_noted(tmp_path: Path) -> None:
    splits = read_dataset(
        dataset(tmp_path, "pics/a.jpg", {"a.csv": csv("/home/me/a.jpg")}), AUTOMATIC
    )
    (note,) = splits["train"].notes
    assert "'/home/me/a.jpg' to pics/a.jpg" in note


def test_folders_of_splits_that_labels_do_not_name_are_noted(tmp_path: Path) -> None:
    data = dataset(tmp_path, "train/a.jpg val/b.jpg", {"a.json": coco("train/a.jpg val/b.jpg")})
    (note,) = read_dataset(data, AUTOMATIC)["train"].notes
    assert "(train: 1, val: 1)" in note


def test_the_label_of_a_missing_image_is_named(tmp_path: Path) -> None:
    yaml = "names: [x]\ntrain: images/train\n"
    labels = {f"labels/train/{name}.txt": YOLO for name in ("0", "cam1/0")}
    data = dataset(tmp_path, "images/train/cam1/0.png", {"data.yaml": yaml, **labels})
    (note,) = read_dataset(data, AUTOMATIC)["train"].notes
    assert "labels/train/0.txt" in note


def test_images_of_a_dataset_without_a_store_are_found(tmp_path: Path) -> None:
    data = dataset(tmp_path, "pics/a.jpg", {"a.json": coco("a.jpg")})
    train = annotations_with_images(data, data / "prepared")["train"]
    assert train.folder / train.file_names[0] == data / "pics/a.jpg"
    assert not (data / "prepared").exists()


def test_another_word_than_in_data_yaml_is_noted(tmp_path: Path) -> None:
    data = dataset(tmp_path, *CASES["data.yaml with another word"][:2])
    (note,) = read_dataset(data, AUTOMATIC)["train"].notes
    assert "../valid" in note
    assert "val is used" in note


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"traffic light {KITTI}", "traffic light"),
        (f"car {KITTI} 0.93", "car"),
        (f"type 2 {KITTI}", "type 2"),
        (f"type 2 {KITTI} 0.93", "type 2"),
    ],
)
def test_the_class_of_kitti_may_have_spaces(tmp_path: Path, line: str, name: str) -> None:
    data = dataset(tmp_path, "image_2/0.png", {"label_2/0.txt": line})
    train = read_dataset(data, AUTOMATIC)["train"]
    assert [c.name for c in train.classes] == [name]
    assert train.boxes.tolist() == [[5, 6, 20, 20]]


def test_finding_images_is_fast(tmp_path: Path) -> None:
    names = [f"images/{n % 50}/{n:06d}.jpg" for n in range(20_000)]
    finder = ImageFinder(tmp_path, files=names)
    wanted = [Wanted(name.rpartition("/")[2], "annotations") for name in names]
    assert [item.file for item in finder.find(wanted, tmp_path) if item] == names
