"""Detections as labeling tools import them."""

import errno
import io
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from PIL import Image

from ssdctl.config.sections import SaveFormat
from ssdctl.data.annotations import ClassName, Conversion
from ssdctl.data.dataset import read_dataset
from ssdctl.errors import UsageError
from ssdctl.inference.save import WRITERS
from ssdctl.inference.sources import ImageSource, source_of
from ssdctl.model.results import Result

SIZE = (200, 100)
BUS = 'no: "bus" \U0001f68c'
CLASSES = [ClassName(0, "car"), ClassName(8, "bike"), ClassName(9, BUS)]
OUTSIDE = (200, 10, 220, 60)
BOXES = np.array([(20, 10, 60, 60), (-5, 0, 200, 101), OUTSIDE], np.float64)
Results = list[tuple[ImageSource, Result]]


def result_of(image: object, count: int) -> Result:
    return Result(
        BOXES[:count],
        np.array([0.9, 0.4, 0.35][:count]),
        np.array([1, 3, 1][:count]),
        classes=CLASSES,
        size=SIZE,
        image=image,
        open_image=Image.open,
    )


@pytest.fixture
def results() -> Results:
    """Return results of two images of the same name, in both forms, and of one from a server."""
    predictions: Results = []
    for name in ("photos/a/\u00fc\udcfc.png", "photos/a/../b c\udcff/u\u0308\udcff.png"):
        path = Path(name)
        path.parent.mkdir(parents=True)
        Image.new("RGB", SIZE).save(path)
        predictions.append((ImageSource(path), result_of(path, 3)))
    content = io.BytesIO(path.read_bytes())
    source = source_of("https://host/images/2.php?size=full")
    return [*predictions, (source, result_of(content, 0))]


def save(format_: SaveFormat, results: Results) -> Path:
    folder = Path("out")
    writer = WRITERS[format_](folder, {1: CLASSES[0], 3: CLASSES[2]})
    for source, result in results:
        writer.add(source, result)
    assert str(folder) in writer.close()
    return folder


@pytest.mark.parametrize("format_", ["coco", "labelstudio"])
def test_files_of_another_call_are_kept(format_: SaveFormat, results: Results) -> None:
    slow = WRITERS[format_](Path("out"), {1: CLASSES[0], 3: CLASSES[2]})
    files = {path: path.read_bytes() for path in save(format_, results).iterdir()}
    slow.add(*results[0])
    assert "-2.json" in slow.close()
    assert files == {path: path.read_bytes() for path in files}


def test_coco(results: Results) -> None:
    folder = save("coco", results)
    dataset = json.loads((folder / "coco.json").read_text())
    assert [(c["id"], c["name"]) for c in dataset["categories"]] == [(0, "car"), (9, BUS)]
    assert [i["file_name"] for i in dataset["images"]] == [source.name for source, _ in results]
    assert all((i["width"], i["height"]) == SIZE for i in dataset["images"])
    annotations = dataset["annotations"]
    assert [(a["image_id"], a["category_id"]) for a in annotations] == [
        (1, 0), (1, 9), (2, 0), (2, 9),
    ]  # fmt: skip
    assert annotations[0]["bbox"] == [20, 10, 40, 50]
    assert annotations[0]["area"] == 2000
    assert len({a["id"] for a in annotations}) == 4
    rows = json.loads((folder / "results.json").read_text())
    assert [r["score"] for r in rows] == [0.9, 0.4, 0.35, 0.9, 0.4, 0.35]  # all, as `evaluate`
    assert rows[2]["bbox"] == [200, 10, 20, 50]


def test_yolo(results: Results) -> None:
    folder = save("yolo", results)
    described = yaml.safe_load((folder / "data.yaml").read_text())
    assert described["names"] == {0: "car", 1: BUS}
    images = sorted((folder / "images").iterdir())
    assert [i.name for i in images] == ["2.jpg", "\u00fc_-2.png", "\u00fc_.png"]
    for image in images:
        with Image.open(image) as opened:
            assert opened.size == SIZE
    labels = {p.stem: p.read_text().splitlines() for p in (folder / "labels").iterdir()}
    assert set(labels) == {i.stem for i in images}
    assert labels["2"] == []
    rows = [[float(v) for v in line.split()] for line in labels["\u00fc_"]]
    assert rows == [[0, 0.2, 0.35, 0.2, 0.5], [1, 0.5, 0.5, 1, 1]]
    read = read_dataset(folder, Conversion("yolo"))["train"]
    assert [c.name for c in read.classes] == ["car", BUS]
    assert sorted(read.file_names) == [f"images/{image.name}" for image in images]
    WRITERS["yolo"](Path("twins"), {1: CLASSES[0], 2: ClassName(9, "car")}).close()
    names = yaml.safe_load(Path("twins/data.yaml").read_text())["names"]
    assert names == {0: "car (id 0)", 1: "car (id 9)"}
    with pytest.raises(UsageError, match="labels"):  # they may have been corrected
        WRITERS["yolo"](folder, {1: CLASSES[0]})
    first, second = (WRITERS["yolo"](Path("both"), {1: CLASSES[0], 3: CLASSES[2]}) for _ in "ab")
    first.add(*results[0])
    with pytest.raises(UsageError, match="both/labels"):  # at the same time
        second.add(*results[0])
    (folder.parent / "data.yaml").write_text("names: [a]")  # another dataset
    with pytest.raises(UsageError, match=r"data\.yaml"):
        WRITERS["yolo"](folder.parent, {1: CLASSES[0]})


def test_images_are_copied_where_links_do_not_exist(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links", "a", None, "b")

    monkeypatch.setattr(Path, "symlink_to", refused)
    monkeypatch.setattr(os, "link", refused)
    copies = [*(save("yolo", results) / "images").iterdir()]
    assert [path.is_symlink() for path in copies] == [False] * 3


def test_label_studio(results: Results) -> None:
    folder = save("labelstudio", results)
    tasks = json.loads((folder / "tasks.json").read_text())
    *local, url = (unquote(t["data"]["image"], errors="surrogateescape") for t in tasks)
    paths = [Path.cwd() / address.removeprefix("/data/local-files/?d=") for address in local]
    assert paths == [source.path.resolve() for source, _ in results[:2]]
    assert url == results[2][0].name
    interface = ET.fromstring((folder / "labels.xml").read_text())
    controls = {e.get("name"): e for e in interface.iter() if e.get("name")}
    car = tasks[0]["predictions"][0]["result"][0]
    assert {car["from_name"], car["to_name"]} == set(controls)
    assert controls["label"].get("toName") == "image"
    assert [e.get("value") for e in controls["label"]] == ["car", BUS]
    box = {"x": 10, "y": 10, "width": 20, "height": 50}
    assert car["value"] == {**box, "rotation": 0, "rectanglelabels": ["car"]}
    assert (car["original_width"], car["original_height"]) == SIZE
    assert [len(task["predictions"][0]["result"]) for task in tasks] == [2, 2, 0]
