"""Datasets in each format: six images with a bright block per object, written as the generator does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data.generator.worlds import Picture, Thing, Tree, World
from data.generator.writers import LAYOUTS
from PIL import ExifTags, Image

from ssdctl.data.annotations import Annotations

SIZE = (96, 64)
NAMES = ("bolt", "nut")


class Sample(NamedTuple):
    """A generated image: its number, and its objects as (class number, left, top, w, h)."""

    number: int
    objects: list[tuple[int, int, int, int, int]]


def samples(count: int = 6, start: int = 0) -> list[Sample]:
    """Return images with one or two objects; the last one has none."""
    result = []
    for i in range(start, start + count):
        objects = [(i % 2, 8 + i, 6, 30, 24)]
        if i % 3 == 0:
            objects.append(((i + 1) % 2, 50, 30, 40, 30))
        result.append(Sample(i, objects if i < start + count - 1 else []))
    return result


def image_file(path: Path, size: tuple[int, int] = (100, 50), turn: int = 1) -> None:
    """Write a plain image, with an EXIF orientation other than 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {}
    if turn != 1:
        more["exif"] = Image.Exif()
        more["exif"][ExifTags.Base.Orientation] = turn
    Image.new("RGB", size, "teal").save(path, **more)


Boxes = dict[str, list[tuple[str, list[float], bool]]]


def boxes_of(splits: dict[str, Annotations], split: str = "train") -> Boxes:
    """Image -> (class, left, top, width, height, crowd), as a format read them."""
    part = splits[split]
    boxes: Boxes = {name: [] for name in part.file_names}
    columns = (part.rows, part.labels, part.boxes, part.is_crowd)
    for row, label, box, is_crowd in zip(*(c.tolist() for c in columns), strict=True):
        boxes[part.file_names[row]].append((part.classes[label - 1].name, box, is_crowd))
    return boxes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Any]:
    """Write a JSON file as the caller changes its content."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def tree(root: Path, files: Mapping[str, str | None]) -> Path:
    """Write text files by their paths, and an image of 100 x 50 where there is no text."""
    for name, text in files.items():
        if text is None:
            image_file(root / name)
        else:
            write(root / name, text)
    return root


def generated(root: Path, layout: str, count: int = 2) -> Path:
    """Write six images of each of the first `count` splits; return what `--data` is given."""
    made, _ = LAYOUTS[layout]
    pictures = []
    for split in made.splits[:count]:
        first = len(pictures)
        for sample in samples(start=first):
            color = {0: (230, 60, 40), 1: (230, 210, 40)}
            things = [Thing(NAMES[n], *box, False, color[n]) for n, *box in sample.objects]
            stem = str(sample.number if made.shared else sample.number - first)
            gray = 8 + 16 * (sample.number % 16)
            form = Picture(split, "", stem, ".jpg", *SIZE, 1, True, "RGB", gray, tuple(things))
            pictures.append(form)
    return write_world(root, layout, NAMES, pictures)


def write_world(root: Path, layout: str, names: tuple[str, ...], pictures: list[Picture]) -> Path:
    empty = frozenset[str]()
    world = World(layout, "", empty, names, tuple(pictures), (), False, False, "NFC", "", empty)
    written = Tree(root)
    LAYOUTS[layout][1](world, written)
    return written.data


coco = partial(generated, layout="coco: images")
flat_coco = partial(generated, layout="coco: flat")
roboflow_coco = partial(generated, layout="coco: roboflow", count=3)
voc_lists = partial(generated, layout="voc: lists")
voc_mirrored = partial(generated, layout="voc: mirrored")
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
