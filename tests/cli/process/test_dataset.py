"""`ssdctl dataset export` writes the store in layouts that other programs read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli
from data.formats import exports
from PIL import Image


@pytest.fixture
def dataset(tmp_path: Path, cli: Cli) -> Path:
    """Return a prepared dataset with a crowd and a packed store."""
    root = exports.cvat_coco(tmp_path / "parts", ("train", "val", "test"))
    path = root / "annotations/instances_train.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["iscrowd"] = 1
    content["annotations"][1]["area"] = 123.0
    path.write_text(json.dumps(content))
    assert cli("prepare", "--data", root).code == 0
    return root


def labels_of(data: Path, cli: Cli) -> dict[str, list[Any]]:
    """Return the boxes of each split, read through `dataset export --to coco`."""
    out = data.with_name(f"{data.name}-coco")
    result = cli("dataset", "export", data, "--to", "coco", "--out", out)
    assert result.code == 0, result.err
    labels = {}
    for path in sorted((out / "annotations").glob("instances_*.json")):
        content = json.loads(path.read_text())
        names = {c["id"]: c["name"] for c in content["categories"]}
        labels[path.stem] = sorted(
            (a["image_id"], names[a["category_id"]], a["iscrowd"], *np.round(a["bbox"]).tolist())
            for a in content["annotations"]
        )
    return labels


@pytest.mark.parametrize("target", ["coco", "yolo", "voc"])
def test_an_exported_dataset_is_the_same_when_read_again(
    dataset: Path, cli: Cli, target: str
) -> None:
    result = cli("dataset", "export", dataset, "--to", target, "--out", "out", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["images"] == {"train": 6, "val": 6, "test": 6}
    assert ("crowd regions, which YOLO lacks" in result.err) == (target == "yolo")
    assert cli("prepare", "--data", "out").code == 0
    expected, exported = labels_of(dataset, cli), labels_of(Path("out"), cli)
    if target == "yolo":
        for path in (dataset / "images/train").iterdir():
            assert (Path("out/images/train") / path.name).read_bytes() == path.read_bytes()
        # It cannot express crowds.
        expected = {k: sorted((*v[:2], 0, *v[3:]) for v in e) for k, e in expected.items()}
    assert exported == expected


def test_coco_results_fit_an_export_too(dataset: Path, cli: Cli) -> None:
    """It keeps the ids of images and categories, and areas as annotated."""
    for split in ("val", "test"):
        (dataset / f"annotations/instances_{split}.json").unlink()  # have other ids
    path = dataset / "annotations/instances_train.json"
    content = json.loads(path.read_text())
    for entry in (*content["images"], *content["annotations"]):
        entry["image_id" if "image_id" in entry else "id"] += 100
    for entry in content["categories"]:
        entry["id"] += 7
    for entry in content["annotations"]:
        entry["category_id"] += 7
    path.write_text(json.dumps(content))
    assert cli("dataset", "export", dataset, "--to", "coco", "--out", "out").code == 3
    assert cli("prepare", "--data", dataset).code == 0  # only it replaces packed images
    result = cli("dataset", "export", dataset, "--to", "coco", "--out", "out")
    assert result.code == 0, result.err
    exported = json.loads(Path("out/annotations/instances_train2017.json").read_text())
    keys = ("image_id", "category_id", "area")
    rows, expected = ([[a[k] for k in keys] for a in d["annotations"]] for d in (exported, content))
    assert rows == expected
    assert {i["id"] for i in exported["images"]} == {i["id"] for i in content["images"]}


def test_boxes_of_a_shrunk_store_fit_its_pixels(shapes: Path, cli: Cli) -> None:
    result = cli("prepare", "--data", shapes, "--store", "small", "--shrink", 300)
    assert result.code == 0, result.err
    options = ("--store", "small", "--to", "coco", "--out", "out")
    assert cli("dataset", "export", shapes, *options).code == 0
    exported = json.loads(Path("out/annotations/instances_train2017.json").read_text())
    original = json.loads((shapes / "annotations/instances_train2017.json").read_text())
    by_name = {i["file_name"]: i for i in original["images"]}
    for image in exported["images"]:
        with Image.open(Path("out/train2017") / image["file_name"]) as opened:
            assert opened.size == (image["width"], image["height"])
            assert min(opened.size) <= 300
    first, image = exported["annotations"][0], exported["images"][0]
    scale = image["width"] / by_name[image["file_name"]]["width"]
    np.testing.assert_allclose(
        first["bbox"], np.array(original["annotations"][0]["bbox"]) * scale, rtol=0.01
    )


def test_images_keep_their_own_file_and_boxes(dataset: Path, cli: Cli) -> None:
    """A name that got an image id may be the name of another image."""
    path = dataset / "annotations/instances_train.json"
    content = json.loads(path.read_text())
    names = ["cam1/0001.png", "cam2/0001.png", "0001-1.png"]
    for image, name in zip(content["images"], names, strict=False):
        target = dataset / "images/train" / name
        target.parent.mkdir(exist_ok=True)
        (dataset / "images/train" / image["file_name"]).rename(target)
        image["file_name"] = name
    path.write_text(json.dumps(content))
    assert cli("prepare", "--data", dataset).code == 0
    expected = [(dataset / "images/train" / i["file_name"]).read_bytes() for i in content["images"]]
    for target, folder in (("coco", "train2017"), ("yolo", "images/train")):
        result = cli("dataset", "export", dataset, "--to", target, "--out", target)
        assert result.code == 0, result.err
        files = {p.name: p.read_bytes() for p in (Path(target) / folder).iterdir()}
        assert sorted(files.values()) == sorted(expected)
    exported = json.loads(Path("coco/annotations/instances_train2017.json").read_text())["images"]
    files = {p.name: p.read_bytes() for p in Path("coco/train2017").iterdir()}
    assert [files[image["file_name"]] for image in exported] == expected


def test_a_folder_with_files_is_not_changed(dataset: Path, cli: Cli) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("x")
    result = cli("dataset", "export", dataset, "--to", "yolo", "--out", "out")
    assert (result.code, "--out" in result.err) == (2, True), result.err
    assert [p.name for p in Path("out").iterdir()] == ["mine.txt"]


def test_a_parquet_dataset_for_hugging_face(dataset: Path, cli: Cli) -> None:
    from pyarrow import parquet

    assert cli("dataset", "export", dataset, "--to", "hf", "--out", "out").code == 0
    tables = {path.stem.partition("-")[0]: parquet.read_table(path)
              for path in Path("out/data").glob("*.parquet")}  # fmt: skip
    assert {name: len(table) for name, table in tables.items()} == {
        "train": 6, "validation": 6, "test": 6,
    }  # fmt: skip
    features = json.loads(tables["train"].schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"]["_type"] == "Image"
    assert json.dumps(list(exports.NAMES)) in json.dumps(features["objects"])
    row = tables["train"].to_pylist()[0]
    with Image.open(io.BytesIO(row["image"]["bytes"])) as opened:
        assert opened.size == exports.SIZE
    objects = exports.samples()[0].objects
    assert row["objects"]["category"] == [label for label, *_ in objects]
    assert row["objects"]["bbox"] == [[float(v) for v in bbox] for _, *bbox in objects]
    assert row["objects"]["is_crowd"] == [True, False]


def test_voc_keeps_names_that_do_not_clash(tmp_path: Path, cli: Cli) -> None:
    """All splits have one folder, and a list has one word for each image."""
    exports.voc_mirrored(tmp_path / "data")
    (tmp_path / "data/images/train/0.jpg").rename(tmp_path / "data/images/train/my shot.jpg")
    (tmp_path / "data/annotations/train/0.xml").rename(
        tmp_path / "data/annotations/train/my shot.xml"
    )
    result = cli("dataset", "export", "data", "--to", "voc", "--out", "out")
    assert result.code == 0, result.err
    names = sorted(path.name for path in Path("out/JPEGImages").iterdir())
    kept = ["0.jpg", *(f"{n}.jpg" for n in range(1, 6)), "my_shot.jpg"]
    assert sorted(n for n in names if not n.startswith("val_")) == kept
    assert len(names) == 12
    lists = [Path(f"out/ImageSets/Main/{s}.txt").read_text().split() for s in ("train", "val")]
    assert sorted(lists[0] + lists[1]) == sorted(Path(name).stem for name in names)
