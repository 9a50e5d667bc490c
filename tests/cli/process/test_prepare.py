"""`ssdctl prepare` and `dataset export` as users type them, from the annotations to a score."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_RUN, Cli
from data.formats import exports
from PIL import Image
from pyarrow import parquet


def test_a_dataset_without_validation(dataset: Path, cli: Cli) -> None:
    (dataset / "dataset.toml").write_text(
        '[train]\nimages = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
    )
    train = ("train", "--data", dataset, "--out", "run", "--steps", 1, *TINY_RUN.split())
    for command in ((*train, "--dry-run"), ("prepare", "--data", dataset), train):
        cli(*command).expect(0, "no validation split", f"ssdctl prepare --data {dataset} --split")
    cli("evaluate", "run/checkpoints/last.pt", "--device", "cpu").expect(3, "has no split val")
    shrink = ("--shrink", 300)
    assert cli("prepare", "--data", dataset, "--store", "s", "--classes", "ball", *shrink).code == 0
    advised = f"ssdctl prepare --data {dataset} --store s --shrink 300 --split 0.9"
    assert advised in cli("train", "--data", dataset, "--store", "s", "--dry-run").err
    assert cli(*advised.split()[1:]).code == 0  # the index remembers --classes
    assert cli("train", "--data", dataset, "--store", "s", "--dry-run").out.count("1 class: ball")
    files = {"images/a.jpg": None, "labels/a.txt": "0 .5 .5 .2 .2"}
    exports.tree(Path("one"), {"data.yaml": "train: images\nnames: [x]", **files})
    for command in (
        ("prepare",),
        ("train", "--dry-run"),
        ("train", "--steps", 1, *TINY_RUN.split()),
    ):
        result = cli(*command, "--data", "one").expect(0, "no validation split")
        assert "--split" not in result.err  # one image cannot be divided
    path = dataset / "annotations/instances_val2017.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    Path("found.json").write_text("[]")
    cli("evaluate", "found.json", "--data", path, "--annotated-only").expect(3, "no image to score")


def test_preview_shows_annotated_and_augmented_images(dataset: Path, cli: Cli) -> None:
    image = dataset / "train2017/000000000001.jpg"
    wide = Image.new("RGB", (1260, 9))
    wide.save("wide.png")
    refused = {"boxes.pdf": ".png", image: "earlier", "wide.png": "earlier"}
    refused[image.with_name("boxes.png")] = "in the dataset"
    for target, reason in refused.items():
        cli("prepare", "--data", dataset, "--preview", target).expect(2, reason)
    assert not (dataset / "prepared").exists()
    options = ("--preview", "boxes.JPG", "--shrink", 300, "--encoding", "raw")
    cli("prepare", "--data", dataset, *options).expect(0, "GB")
    for name in ("boxes.JPG", "boxes.png", "boxes.png"):  # its own file is replaced
        assert cli("prepare", "--data", dataset, "--preview", name, *options[2:]).code == 0
    with Image.open("boxes.JPG") as drawn:
        assert drawn.width == 12 + 4 * 312
        pixels = np.asarray(drawn.convert("RGB"), np.int16)
    tiles = [pixels[60:330, 12 + 312 * i : 12 + 312 * i + 290] for i in range(4)]
    for tile in tiles:
        assert tile.std() > 10
    assert np.abs(tiles[1] - tiles[2]).mean() > 1  # each epoch has its own colors


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_75(dataset: Path, sent: signal.Signals) -> None:
    program = """
import time
from ssdctl.data import image_check
check = image_check.check_image
def slow(*given):
    time.sleep(0.4)
    return check(*given)
image_check.check_image, image_check.TASK_IMAGES = slow, 1
print("go", flush=True)
from ssdctl.__main__ import run
run()
"""
    command = [sys.executable, "-c", program, "prepare", "--data", str(dataset), "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lock = dataset / "prepared/.lock"
    while not lock.exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    assert "run the same command again" in err
    assert [p.name for p in (dataset / "prepared").iterdir()] == [".lock"]


@pytest.fixture
def crowded(tmp_path: Path, cli: Cli) -> Path:
    """Return a prepared dataset with a crowd and a packed store."""
    root = exports.coco(tmp_path / "parts", count=3)
    with exports.edited(root / "annotations/instances_train.json") as content:
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["area"] = 123.0
    assert cli("prepare", "--data", root).code == 0
    return root


def test_coco_results_fit_an_export_too(crowded: Path, cli: Cli) -> None:
    """It keeps the ids of images and categories, and areas as annotated."""
    cli("dataset", "export", crowded, "--to", "coco", "--out", "out").expect(0)
    content = json.loads((crowded / "annotations/instances_train.json").read_text())
    exported = json.loads(Path("out/annotations/instances_train2017.json").read_text())
    keys = ("image_id", "category_id", "area")
    rows, expected = ([[a[k] for k in keys] for a in d["annotations"]] for d in (exported, content))
    assert rows == expected
    assert {i["id"] for i in exported["images"]} == {i["id"] for i in content["images"]}


def test_boxes_of_a_shrunk_store_fit_its_pixels(shapes: Path, cli: Cli) -> None:
    cli("prepare", "--data", shapes, "--store", "small", "--shrink", 300).expect(0)
    options = ("--store", "small", "--to", "coco", "--out", "out")
    cli("dataset", "export", shapes, *options).expect(0, "--shrink")
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


def test_a_folder_with_files_is_not_changed(crowded: Path, cli: Cli) -> None:
    Path("out").mkdir()
    Path("out/mine.txt").write_text("x")
    cli("dataset", "export", crowded, "--to", "yolo", "--out", "out").expect(2, "--out")
    assert [p.name for p in Path("out").iterdir()] == ["mine.txt"]
    cli("prepare", "--data", crowded, "--store", "out").expect(2, "mine.txt")
    Path("out/mine.txt").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("out")
        assert cli("dataset", "export", crowded, "--to", "yolo", "--out", ".").code == 0
        assert Path("data.yaml").is_file()


def test_labels_are_not_written_into_a_dataset(
    crowded: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("dataset export parts --to yolo", "predict best.pt parts/images --save coco"):
        cli(*command.split(), "--out", crowded / "images/new").expect(2, "in the dataset")
    labels = next(crowded.glob("annotations/*train.json")).rename("labels.json")
    (crowded / "images/train").rename("images")
    for out, code in (("train", 2), ("new", 0)):
        cli("dataset", "export", labels, "--to", "yolo", "--out", out).expect(code)
    cli("prepare", "--data", "labels.json", "--no-pack").expect(0)
    cli("prepare", "--data", "new", "--no-pack", "--store", "store").expect(0)
    folder = Path.cwd()
    monkeypatch.chdir("/")
    for out, is_read in (("images/pred", True), ("new/train/a", True), ("pred", False)):
        result = cli("predict", "best.pt", "a.jpg", "--save", "yolo", "--out", folder / out)
        assert ("in the dataset" in result.err) == is_read, result.err


@pytest.mark.parametrize("target", ["coco", "yolo", "voc"])
def test_names_in_two_forms_of_unicode_stay_apart(target: str, cli: Cli) -> None:
    names = ("a/\u00e4", "b/a\u0308")
    labels = {f"labels/{name}.txt": "0 .5 .5 .2 .4" for name in names}
    exports.tree(Path("data"), {"classes.txt": "x", **labels})
    exports.tree(Path("data"), {f"images/{name}.jpg": None for name in names})
    cli("dataset", "export", "data", "--to", target, "--out", "out").expect(0)
    cli("prepare", "--data", "out", "--no-pack", "--split", "0.5").expect(0)


def test_a_parquet_dataset_for_hugging_face(crowded: Path, cli: Cli) -> None:
    assert cli("dataset", "export", crowded, "--to", "hf", "--out", "out").code == 0
    tables = {path.stem.partition("-")[0]: parquet.read_table(path)
              for path in Path("out/data").glob("*.parquet")}  # fmt: skip
    assert {*tables} == {"train", "validation", "test"}
    assert {len(table) for table in tables.values()} == {6}
    features = json.loads(tables["train"].schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"]["_type"] == "Image"
    assert json.dumps(list(exports.NAMES)) in json.dumps(features["objects"])
    row = tables["train"].to_pylist()[0]
    with Image.open(io.BytesIO(row["image"]["bytes"])) as opened:
        assert opened.size == exports.SIZE
    objects = exports.objects_of(0)
    assert row["objects"]["category"] == [label for label, *_ in objects]
    assert row["objects"]["bbox"] == [[float(v) for v in bbox] for _, *bbox in objects]
    assert row["objects"]["is_crowd"] == [True, False]
