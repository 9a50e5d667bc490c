"""Exports of labeling tools are recognized, prepared, trained on and scored unchanged."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, Result
from data.formats import exports

from ssdctl.config import DataConfig, PrepareConfig
from ssdctl.data.annotations import Annotations, ClassName, split_of
from ssdctl.data.check import duplicate_names
from ssdctl.data.dataset import find
from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.open_dataset import count_images, open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.sources import is_prepared
from ssdctl.data.store import Split
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import quoted


def prepared(cli: Cli, data: object, *options: object) -> Result:
    return cli("prepare", "--data", data, *options).expect(0)


def read(root: Path) -> dict[str, Annotations]:
    return find(root)[1].read(root)


def folders(data: Path) -> tuple[Path, Path]:
    return dataset_folders(DataConfig(root=str(data)))


def opened(data: Path, split: str = "train") -> Split:
    return open_dataset(*folders(data))[split]


def counts(data: Path) -> tuple[int, int]:
    size = count_images(*folders(data))
    return size.trainable, len(size.classes)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_supercategory_with_boxes_in_one_split_is_in_all(tmp_path: Path, split: str) -> None:
    root = exports.roboflow_coco(tmp_path / "export")
    for name in ("train", "valid", "test"):
        with exports.edited(root / name / "_annotations.coco.json") as content:
            things = [c | {"supercategory": "parts"} for c in content["categories"]]
            content["categories"] = [{"id": 0, "name": "parts", "supercategory": "none"}, *things]
    assert counts(root) == (5, 2)
    assert "parts" in read(root)["train"].notes[0]
    with exports.edited(root / split / "_annotations.coco.json") as content:
        content["annotations"][0]["category_id"] = 0
    assert counts(root) == (5, 3)
    splits = open_dataset(*folders(root))
    for name in ("train", "val", "test"):
        assert [c.name for c in splits[name].classes] == ["parts", *exports.NAMES]
    assert counts(root) == (5, 3)


@pytest.mark.parametrize("name", ["tf_csv", "via_json", "createml_json", "open_images"])
def test_errors_name_the_labels_of_the_split(tmp_path: Path, name: str) -> None:
    splits = read(getattr(exports, name)(tmp_path))
    named = {split_of(part.origin.relative_to(tmp_path).as_posix()) for part in splits.values()}
    assert named == {*splits} == {"train", "val"}


def test_classes_that_voc_loses_are_named(tmp_path: Path, cli: Cli) -> None:
    label = {"images/a.png": None, "labels/a.txt": "0 .5 .5 .2 .2"}
    exports.tree(tmp_path / "a", {"classes.txt": "x\nmoon", **label})
    for target in ("coco", "voc"):
        export = ("dataset", "export", tmp_path / "a", "--to", target, "--out", target)
        assert ("VOC has no place for: moon" in cli(*export).expect(0).err) == (target == "voc")


def test_categories_of_the_same_name_are_reported(tmp_path: Path) -> None:
    root = exports.coco(tmp_path / "parts")
    for path in root.glob("annotations/*.json"):
        with exports.edited(path) as content:
            content["categories"] = [c | {"name": "bolt"} for c in content["categories"]]
    train, val = prepare(root, tmp_path / "store", PrepareConfig(pack=False)).splits
    assert "have the same name" in train.warnings[0]
    assert "bolt (id 1), bolt (id 4)" in train.warnings[0]
    assert not any("bolt (id 1)" in warning for warning in val.warnings)
    splits = open_dataset(root, tmp_path / "store")
    for target in ("coco", "yolo", "voc"):  # each class keeps its boxes
        export_dataset(splits, tmp_path / target, target)
        exported = open_dataset(tmp_path / target, tmp_path / f"store-{target}")["train"]
        np.testing.assert_array_equal(exported.labels, splits["train"].labels)
    names = enumerate(("Traffic light", "traffic_light", "car"))
    (warning,) = duplicate_names([ClassName(*entry) for entry in names])
    assert "Traffic light (id 0), traffic_light (id 1)." in warning


@pytest.mark.parametrize(
    ("files", "found", "hint"),
    [
        ({"a.jpg": "", "p.vott": "{}"}, r"p\.vott", "vott_json"),
        ({"test.json": '{"images": "annotations" "categories"'}, r"test\.json", "test.json reads"),
        ({"images/P1.png": "", "labelTxt/P1.txt": "imagesource:x"}, r"P1\.txt", "DOTA2COCO.py"),
        ({"a.jpg": "", "labels/a.txt": "0 .5 .5 .1 .1"}, r"labels/a\.txt", "labels/a.txt is YOLO"),
        (
            {"photos/a.jpg": "", "b.JPG": ""},
            r"2 \.jpg files such as b\.JPG \(",
            "these images have no labels: draw",
        ),
        (
            {"images/a.png": "", "labels/annotations.xml": "<annotations></annotations>"},
            "xml",
            "labels/annotations.xml",
        ),
        ({}, r"dataset.toml, annotations/\*\.json.*data\.yaml", "give the folder"),
    ],
)
def test_what_a_folder_has_instead_of_a_dataset_is_named(
    tmp_path: Path, files: dict[str, str], found: str, hint: str
) -> None:
    (tmp_path / "data").mkdir()
    exports.tree(tmp_path / "data", files)
    with pytest.raises(DataError, match=found) as error:
        find(tmp_path / "data")
    assert hint in (error.value.hint or "")


def test_datasets_in_folders_around_are_named(tmp_path: Path) -> None:
    root = exports.flat_coco(tmp_path / "training_demo/images/my export")
    for given in (tmp_path, root.parent, root / "images"):
        with pytest.raises(DataError, match=re.escape(str(given))) as error:
            find(given)
        assert f"--data {quoted(root)}" in str(error.value.hint)


def two_formats(root: Path) -> None:
    exports.generated(exports.flat_coco(root), "voc: labelme2voc")


def two_files_for_a_split(root: Path) -> None:
    path = exports.flat_coco(root) / "result.json"
    shutil.copy(path, path.with_name("result-2.json"))


@pytest.mark.parametrize(
    ("make", "words", "choice"),
    [
        (
            two_formats,
            (": coco (", "result.json", "), voc (", "--from coco or --from voc"),
            ("--from", "voc"),
        ),
        (two_files_for_a_split, ("result.json", "result-2.json"), ("--data", "data/result-2.json")),
    ],
)
def test_several_datasets_in_a_folder(
    tmp_path: Path, cli: Cli, make: Callable[[Path], None], words: tuple[str], choice: tuple[str]
) -> None:
    make(tmp_path / "data")
    cli("prepare", "--data", "data").expect(3, *words)
    prepared(cli, "data", "--no-pack", *choice)


def test_masks_and_what_has_no_box_in_cvat(tmp_path: Path, cli: Cli) -> None:
    shapes = (
        '<mask label="x" rle="3, 4" left="4" top="5" width="6" height="7"/>'
        '<polyline label="x" points="1,1;2,2"/>'
        '<box label="" xtl="1" ytl="1" xbr="3" ybr="2"/><ellipse label=" " cx="4" cy="3" rx="8" ry="4"/>'
    )
    image = f'<image id="0" name="a.png" width="100" height="50">{shapes}</image>'
    xml = f"<annotations>{image}</annotations>"
    exports.tree(tmp_path, {"images/a.png": None, "annotations.xml": xml})
    err = prepared(cli, tmp_path).err
    assert "polyline shapes, left out: 1" in err
    assert "shapes without a label, left out: 2" in err
    boxes = np.asarray(opened(tmp_path).boxes) * [100, 50, 100, 50]
    np.testing.assert_allclose(boxes, [[4, 5, 10, 12]], atol=1e-4)


@pytest.mark.parametrize(
    ("make", "file", "old", "new", "words"),
    [
        (exports.tf_csv, "data/train_labels.csv", "bolt,8", "bolt,x", r"train_labels\.csv:2"),
        (exports.tf_csv, "data/train_labels.csv", "0.jpg,96", "0.jpg,95", r"\.csv:3: 0\.jpg"),
        (exports.tf_csv, "data/train_labels.csv", "1.jpg", "9.jpg", r"not below.*9\.jpg"),
        (exports.kitti, "training/label_2/1.txt", "30.00", "nan", r"1\.txt:2"),
        (exports.kitti, "training/label_2/1.txt", " -1.59", "", r"1\.txt:2"),
    ],
)
def test_broken_lines_of_tables(
    tmp_path: Path, make: Callable[[Path], Path], file: str, old: str, new: str, words: str
) -> None:
    path = make(tmp_path) / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=words):
        read(tmp_path)


def test_tables_leave_out_what_is_not_labeled(tmp_path: Path) -> None:
    path = exports.tf_csv(tmp_path) / "data/train_labels.csv"
    path.write_text(path.read_text().replace("bolt", "", 1))
    splits = read(tmp_path)
    assert "without a class, left out: 1" in splits["train"].notes[0]
    assert len(splits["train"].boxes) == 6
    exports.kitti(tmp_path / "kitti")
    splits = read(tmp_path / "kitti")
    assert "DontCare, left out: 6" in splits["train"].notes[0]


@pytest.mark.parametrize(("frame", "code"), [('frame="1.0"', 0), ("", 3), ('frame="0.5"', 3)])
def test_cvat_tracks(tmp_path: Path, frame: str, code: int) -> None:
    """Boxes of a track outside its frame are left out; the number of a frame is never guessed."""
    box = '<box {} outside="{}" xtl="1" ytl="2" xbr="40" ybr="30"/>'
    image = '<image id="0" name="frame_000000.PNG" width="96.0" height="64"><sphere/></image>'
    boxes = box.format(frame, 0) + box.format('frame="2"', 1)
    xml = f'<annotations><track id="5" label="x">{boxes}</track>{image}</annotations>'
    images = dict.fromkeys(f"images/frame_{n:06d}.PNG" for n in range(2))
    exports.tree(tmp_path, {**images, "annotations.xml": xml})
    if code:
        with pytest.raises(DataError, match="track 5"):
            read(tmp_path)
    else:
        train = read(tmp_path)["train"]
        assert [train.file_names[row] for row in train.rows] == ["images/frame_000001.PNG"]
        assert sorted(note.partition(": ")[2] for note in train.notes) == [
            "boxes outside their frame, left out: 1",
            "sphere shapes, left out: 1",
        ]


def test_frames_without_a_box_are_read(tmp_path: Path) -> None:
    box = '<box frame="4" outside="0" xtl="1" ytl="2" xbr="40" ybr="30"/>'
    meta = "<task><size>9</size><start_frame>2</start_frame><stop_frame>5</stop_frame></task>"
    line = '<polyline frame="2" outside="0" points="1,2;3,4"/>'  # of an object without a box
    track = f'<track id="5" label="x">{box}{line}</track>'
    xml = f"<annotations><meta>{meta}</meta>{track}</annotations>"
    images = dict.fromkeys(f"images/frame_{n:06d}.png" for n in (1, 2, 4, 5, 6))
    exports.tree(tmp_path, {**images, "annotations.xml": xml})
    report = prepare(tmp_path, tmp_path / "store", PrepareConfig(pack=False)).splits[0]
    assert (report.images, report.trainable) == (3, 1)
    assert [kind for kind in report.counts() if "may show objects" in kind]
    assert report.notes[-1].endswith("2, such as images/frame_000001.png")
    (tmp_path / "annotations.xml").write_text(xml.replace(meta, 2 * meta))
    with pytest.raises(DataError, match="several tasks"):
        read(tmp_path)


def test_dropping_over_5_percent_is_refused_with_the_reason(tmp_path: Path, cli: Cli) -> None:
    exports.flat_coco(tmp_path)
    with exports.edited(tmp_path / "result.json") as content:
        content["annotations"][0]["bbox"] = [0, 0, 0, 5]
    options = f"--data {tmp_path} --shrink 300 --from coco"
    cli("prepare", *options.split()).expect(3, "no size", f"{options} --allow-dropped")
    prepared(cli, tmp_path, "--allow-dropped")


def test_names_that_are_not_utf8(tmp_path: Path, cli: Cli) -> None:
    name, label = os.fsdecode(b"M\xfcller"), "0 .5 .5 .2 .4"
    exports.tree(tmp_path, {"images/a.png": None, "labels/a.txt": label, "classes.txt": "x"})
    exports.tree(tmp_path, {f"{name}.txt": label, "images/x": ""})
    prepared(cli, tmp_path, "--no-pack")
    (tmp_path / f"{name}.txt").write_text("")
    assert not is_prepared(tmp_path, tmp_path / "prepared")
    shutil.copy(tmp_path / "images/a.png", tmp_path / f"images/{name}.png")
    cli("prepare", "--data", tmp_path).expect(3, "UTF-8")
    root = exports.flat_coco(tmp_path / name)
    cli("prepare", "--data", root).expect(3, "rename the folder")
    assert not (root / "prepared").exists()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda c: [a.update(bbox=[900, 0, 9, 5]) for a in c["annotations"]], "x box outside"),
        (lambda c: c["annotations"].clear(), "6 images with no objects"),
        (lambda c: c["images"].clear() or c["annotations"].clear(), "lists no images"),
    ],
)
def test_a_dataset_without_anything_to_train_on_is_refused_whatever_is_allowed(
    tmp_path: Path, cli: Cli, break_it: Callable[..., None], reason: str
) -> None:
    exports.flat_coco(tmp_path)
    with exports.edited(tmp_path / "result.json") as content:
        break_it(content)
    cli("prepare", "--data", tmp_path, "--allow-dropped").expect(3, reason)
