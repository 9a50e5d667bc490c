"""Datasets in each format: six images with a bright block per object, written as the generator does."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data.generator.worlds import Picture, Thing, Tree, World
from data.generator.writers import LAYOUTS
from PIL import Image

from ssdctl.data.annotations import Annotations

SIZE = (96, 64)
NAMES = ("bolt", "nut")
COLORS = ((230, 60, 40), (230, 210, 40))


def objects_of(number: int) -> list[tuple[int, int, int, int, int]]:
    """Return the objects of an image as (class number, left, top, width, height)."""
    first = (number % 2, 8 + number, 6, 30, 24)
    return [first, ((number + 1) % 2, 50, 30, 40, 30)] if number % 3 == 0 else [first]


def boxes_of(splits: dict[str, Annotations], split: str = "train") -> dict[str, list[Any]]:
    """Image -> (class, left, top, width, height, crowd), as a format read them."""
    part = splits[split]
    boxes: dict[str, list[Any]] = {name: [] for name in part.file_names}
    columns = (part.rows, part.labels, part.boxes, part.is_crowd)
    for row, label, box, is_crowd in zip(*(c.tolist() for c in columns), strict=True):
        boxes[part.file_names[row]].append((part.classes[label - 1].name, box, is_crowd))
    return boxes


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Any]:
    """Write a JSON file as the caller changes its content."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def tree(root: Path, files: Mapping[str, str | None]) -> Path:
    """Write text files by their paths, and an image of 100 x 50 where there is no text."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            Image.new("RGB", (100, 50), "teal").save(path)
        else:
            path.write_text(text, encoding="utf-8")
    return root


def generated(root: Path, layout: str, count: int = 2) -> Path:
    """Write six images of each of the first `count` splits, the last one without objects."""
    made, _ = LAYOUTS[layout]
    pictures = []
    for split in made.splits[:count]:
        first = len(pictures)
        for number in range(first, first + 6):
            objects = objects_of(number) if number < first + 5 else []
            things = (Thing(NAMES[n], *box, False, COLORS[n]) for n, *box in objects)
            stem = str(number if made.shared else number - first)
            form = (1, True, "RGB", 8 + 16 * (number % 16))
            pictures.append(Picture(split, "", stem, ".jpg", *SIZE, *form, tuple(things)))
    return write_world(root, layout, NAMES, pictures)


def write_world(root: Path, layout: str, names: tuple[str, ...], pictures: list[Picture]) -> Path:
    empty = frozenset[str]()
    world = World(layout, "", empty, names, tuple(pictures), (), False, False, "NFC", "", empty)
    written = Tree(root)
    LAYOUTS[layout][1](world, written)
    return written.data


coco = partial(generated, layout="coco: images")
coco_toml = partial(generated, layout="coco: toml")
flat_coco = partial(generated, layout="coco: flat")
roboflow_coco = partial(generated, layout="coco: roboflow", count=3)
voc_lists = partial(generated, layout="voc: lists")
roboflow_yolo = partial(generated, layout="yolo: roboflow")
darknet = partial(generated, layout="yolo: darknet")
cvat_xml = partial(generated, layout="cvat-xml", count=1)
kitti = partial(generated, layout="kitti: training")
open_images = partial(generated, layout="openimages")
tf_csv = partial(generated, layout="tf-csv: data")
retinanet_csv = partial(generated, layout="retinanet-csv")
via_json = partial(generated, layout="via-json")
labelme_json = partial(generated, layout="labelme-json: apart")
createml_json = partial(generated, layout="createml-json")
