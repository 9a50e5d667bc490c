"""Datasets as labeling tools export them, with the peculiarities of each tool.

Each function writes six images with a bright block per object and returns what `--data` is given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


def save(path: Path, sample: Sample) -> None:
    """Write an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sample.number).integers(0, 80, (*SIZE[::-1], 3), np.uint8)
    for label, left, top, width, height in sample.objects:
        pixels[top : top + height, left : left + width] = (230, 60 + 150 * label, 40)
    Image.fromarray(pixels).save(path)


def write(path: Path, text: str) -> None:
    """Write a text file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content))


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


def _coco(
    images: Sequence[tuple[str, Sample]], *, first: int, category: int, **more: Any
) -> dict[str, list[dict[str, Any]]]:
    """COCO's images and annotations, with ids from `first` on; class 0 has the id `category`."""
    objects = [(n, *o) for n, (_, sample) in enumerate(images, first) for o in sample.objects]
    return {
        "images": [
            {"id": n, "file_name": name, "width": SIZE[0], "height": SIZE[1]}
            for n, (name, _) in enumerate(images, first)
        ],
        "annotations": [
            {"id": n, "image_id": image, "category_id": label + category, "bbox": bbox}
            | {"area": bbox[2] * bbox[3], "segmentation": [], "iscrowd": 0, **more}
            for n, (image, label, *bbox) in enumerate(objects, first)
        ],
    }


def cvat_coco(root: Path, splits: tuple[str, ...] = ("default",)) -> Path:
    """CVAT, "COCO 1.0": text and zero for missing header fields, attributes, ids from 1."""
    for k, split in enumerate(splits):
        images = [(f"frame {sample.number:03d}.png", sample) for sample in samples(start=10 * k)]
        for name, sample in images:
            save(root / "images" / ("" if split == "default" else split) / name, sample)
        attributes = {"occluded": False, "rotation": 0.0}
        content: dict[str, Any] = _coco(images, first=1, category=1, attributes=attributes)
        for image in content["images"]:
            image |= {"license": 0, "flickr_url": "", "coco_url": "", "date_captured": 0}
        for entry in content["annotations"]:
            entry |= {"bbox": [float(v) for v in entry["bbox"]], "area": float(entry["area"])}
        content["info"] = dict.fromkeys(
            ("contributor", "description", "url", "version", "year"), ""
        )
        content["categories"] = [
            {"id": i, "name": name, "supercategory": ""} for i, name in enumerate(NAMES, 1)
        ]
        write_json(root / f"annotations/instances_{split}.json", content)
    return root


def roboflow_coco(root: Path) -> Path:
    """Roboflow, "COCO": a folder per split, category 0 is the project, the year is text."""
    for k, split in enumerate(("train", "valid", "test")):
        images = [
            (f"shot_{sample.number}_jpg.rf.{sample.number:032x}.jpg", sample)
            for sample in samples(start=10 * k)
        ]
        content: dict[str, Any] = _coco(images, first=0, category=1)
        for name, sample in images:
            save(root / split / name, sample)
        for image in content["images"]:
            image |= {"date_captured": "2026-01-12T09:00:00+00:00", "extra": {"name": "shot.jpg"}}
        content |= {
            "info": {"year": "2026", "version": "3", "contributor": "", "date_created": ""},
            "licenses": [{"id": 1, "url": "https://example.org/", "name": "CC BY 4.0"}],
            "categories": [
                {"id": 0, "name": "parts", "supercategory": "none"},
                *({"id": i, "name": n, "supercategory": "parts"} for i, n in enumerate(NAMES, 1)),
            ],
        }
        write_json(root / split / "_annotations.coco.json", content)
    write(root / "README.roboflow.txt", "exported\n")
    return root


def label_studio_coco(root: Path) -> Path:
    """Label Studio, "COCO": all ids from 0, paths of its server."""
    prefixes = (
        "..\\..\\label-studio\\label-studio\\media\\upload\\4\\",
        "/data/upload/3/",
        "images\\",
        "images/",
        "../../label-studio/data/media/upload/4/",
        "",
    )
    images = []
    for sample, prefix in zip(samples(), prefixes, strict=True):
        name = f"{sample.number:08x}-shot_{sample.number}.jpg"
        save(root / "images" / name, sample)
        images.append((prefix + name, sample))
    write_json(
        root / "result.json",
        {
            **_coco(images, first=0, category=0, ignore=0),
            "categories": [{"id": i, "name": name} for i, name in enumerate(NAMES)],
            "info": {"year": 2026, "version": "1.0", "contributor": "Label Studio"},
        },
    )
    return root


def generated(root: Path, layout: str, count: int = 2) -> Path:
    """Write six images of each of the first `count` splits, as the generator of datasets does."""
    made, write_world = LAYOUTS[layout]
    pictures = []
    for split in made.splits[:count]:
        first = len(pictures)
        for sample in samples(start=first):
            color = {0: (230, 60, 40), 1: (230, 210, 40)}
            things = [Thing(NAMES[n], *box, False, color[n]) for n, *box in sample.objects]
            stem = str(sample.number if made.shared else sample.number - first)
            gray = 8 + 16 * sample.number
            form = Picture(split, "", stem, ".jpg", *SIZE, 1, True, "RGB", gray, tuple(things))
            pictures.append(form)
    empty = frozenset[str]()
    world = World(layout, "", empty, NAMES, tuple(pictures), (), False, False, "NFC", "", empty)
    written = Tree(root)
    write_world(world, written)
    return written.data


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
