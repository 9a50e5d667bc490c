"""Datasets as labeling tools export them, with the peculiarities of each tool.

Each function writes six images with a bright block per object and returns what `--data` is given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


def _yolo_split(folder: Path, images: str, labels: str, start: int) -> None:
    for sample in samples(start=start):
        save(folder / images / f"{sample.number}.jpg", sample)
        lines = [
            f"{label} {(x + w / 2) / SIZE[0]} {(y + h / 2) / SIZE[1]} {w / SIZE[0]} {h / SIZE[1]}"
            for label, x, y, w, h in sample.objects
        ]
        write(folder / labels / f"{sample.number}.txt", "\n".join(lines))


def roboflow_yolo(root: Path) -> Path:
    """Roboflow, "YOLOv8": paths that start with `../`, a test split that was not exported."""
    _yolo_split(root, "train/images", "train/labels", 0)
    _yolo_split(root, "valid/images", "valid/labels", 10)
    (root / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\n"
        f"nc: 2\nnames: {list(NAMES)}\n\nroboflow:\n  workspace: w\n  version: 3\n"
    )
    return root


def ultralytics_yolo(root: Path) -> Path:
    """Ultralytics: `path:` of another machine, names as a table; given by its data.yaml."""
    _yolo_split(root, "images/train", "labels/train", 0)
    _yolo_split(root, "images/val", "labels/val", 10)
    (root / "data.yaml").write_text(
        "path: ../datasets/parts  # dataset root dir\ntrain: images/train\nval: images/val\n"
        "test:  # test images (optional)\n\nnames:\n  0: bolt\n  1: nut\n"
    )
    return root / "data.yaml"


def _voc(root: Path, images: str, labels: str, start: int = 0) -> Path:
    """Write images and XML files, by their number in these two paths."""
    for sample in samples(start=start):
        image, path = (root / place.format(sample.number) for place in (images, labels))
        objects = "".join(
            f"<object><name>{NAMES[label]}</name><truncated>0</truncated><difficult>0</difficult>"
            f"<bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax>"
            f"<ymax>{y + h}</ymax></bndbox></object>"
            for label, x, y, w, h in sample.objects
        )
        save(image, sample)
        write(
            path,
            f"<annotation><folder></folder><filename>{image.name}</filename><size>"
            f"<width>{SIZE[0]}</width><height>{SIZE[1]}</height><depth>3</depth></size>{objects}"
            "</annotation>",
        )
    return root


# As labelImg and Label Studio write it; as the tutorials' repositories do.
voc_plain = partial(_voc, images="images/{}.jpg", labels="Annotations/{}.xml")
voc_other_names = partial(_voc, images="images/{}.jpg", labels="annots/{}.xml")


def voc_lists(root: Path) -> Path:
    """Pascal VOC with ImageSets."""
    for split, start in (("train", 0), ("val", 10)):
        _voc(root, "JPEGImages/{:06d}.jpg", "Annotations/{:06d}.xml", start)
        stems = "".join(f"{sample.number:06d}\n" for sample in samples(start=start))
        write(root / f"ImageSets/Main/{split}.txt", stems)
    return root


def voc_mirrored(root: Path) -> Path:
    """A folder of XML files and one of images for each split, with the same names in both."""
    for split in ("train", "test"):
        _voc(root, f"images/{split}/{{}}.jpg", f"annotations/{split}/{{}}.xml")
    return root


def darknet(root: Path) -> Path:
    """Darknet: a `.data` that names lists and class names, with the paths of its own folder."""
    for split, start in (("train", 0), ("test", 10)):
        _yolo_split(root, "data/img", "data/img", start)
        lines = [f"build/data/img/{p.number}.jpg\n" for p in samples(start=start)]
        (root / f"data/{split}.txt").write_text("".join(lines))
    (root / "data/parts.names").write_text("\n".join(NAMES) + "\n")
    (root / "data/parts.data").write_text(
        "classes= 2\ntrain  = build/data/train.txt\nvalid = build/data/test.txt\n"
        "names = build/data/parts.names\nbackup = backup/\n"
    )
    return root


def _tf_csv(root: Path, file: str, folder: str, splits: tuple[str, str]) -> Path:
    for split, start in zip(splits, (0, 10), strict=True):
        lines = ["filename,width,height,class,xmin,ymin,xmax,ymax\n"]
        for sample in samples(start=start):
            name = f"{sample.number}.jpg"
            save(root / folder.format(split) / name, sample)
            for label, x, y, w, h in sample.objects:
                values = name, *SIZE, NAMES[label], x, y, x + w, y + h
                lines.append(",".join(map(str, values)) + "\n")
        write(root / file.format(split), "".join(lines))
    return root


# xml_to_csv.py of the TensorFlow tutorials; Roboflow, "Tensorflow Object Detection CSV".
tf_csv = partial(_tf_csv, file="data/{}_labels.csv", folder="images/{}", splits=("train", "test"))
roboflow_tf_csv = partial(
    _tf_csv, file="{}/_annotations.csv", folder="{}", splits=("train", "valid")
)


def kitti(root: Path) -> Path:
    """KITTI's object detection benchmark: no labels for `testing`, regions that do not count."""
    for sample in samples():
        save(root / f"training/image_2/{sample.number:06d}.png", sample)
        save(root / f"testing/image_2/{sample.number:06d}.png", sample)
        lines = [
            f"{NAMES[label]} 0.00 0 -1.58 {x}.00 {y}.00 {x + w}.00 {y + h}.00 "
            "1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"
            for label, x, y, w, h in sample.objects
        ]
        lines += ["DontCare -1 -1 -10 3.00 3.00 9.50 9.50 -1 -1 -1 -1000 -1000 -1000 -10\n"]
        write(root / f"training/label_2/{sample.number:06d}.txt", "".join(lines))
    return root


def open_images(root: Path) -> Path:
    """Open Images: fractions, MIDs, masks, boxes of images that were not downloaded."""
    mids = ("/m/0bolt", "/m/0nut")
    for split, start in (("train", 0), ("validation", 10)):
        lines = ["ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf"]
        for sample in samples(start=start):
            image_id = f"{sample.number:016x}"
            save(root / split / f"{image_id}.jpg", sample)
            save(root / f"{split}-masks-0" / f"{image_id}_m0k5j_4fa9d4f5.png", sample)
            for n, (label, x, y, w, h) in enumerate(sample.objects):
                edges = f"{x / SIZE[0]},{(x + w) / SIZE[0]},{y / SIZE[1]},{(y + h) / SIZE[1]}"
                # The second object of an image is a group.
                lines.append(f"{image_id},xclick,{mids[label]},1,{edges},0,{n}")
        lines.append(f"ffffffffffffffff,xclick,{mids[0]},1,0,0.5,0,0.5,0,0")
        write(root / f"oidv6-{split}-annotations-bbox.csv", "\n".join(lines) + "\n")
    text = "".join(f"{mid},{name}\n" for mid, name in zip(mids, NAMES, strict=True))
    write(root / "class-descriptions-boxable.csv", text)
    return root


def cvat_xml(root: Path) -> Path:
    """CVAT, "CVAT for images 1.1": rotated boxes, polygons, points, tags."""
    images = []
    for sample in samples():
        name = f"day 1/{sample.number}.png"
        save(root / "images" / name, sample)
        shapes = [
            f'<box label="{NAMES[label]}" source="manual" occluded="0" xtl="{x}.00" ytl="{y}.00" '
            f'xbr="{x + w}.00" ybr="{y + h}.00" z_order="0"><attribute name="a">b</attribute></box>'
            for label, x, y, w, h in sample.objects
        ]
        shapes += ['<points label="nut" points="5.0,6.0" z_order="0"></points><tag label="nut"/>']
        images.append(
            f'<image id="{sample.number}" name="{name}" width="{SIZE[0]}" height="{SIZE[1]}">'
            f"{''.join(shapes)}</image>"
        )
    labels = "".join(f"<label><name>{name}</name><type>any</type></label>" for name in NAMES)
    (root / "annotations.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><meta><task>'
        f"<name>parts</name><labels>{labels}</labels></task></meta>{''.join(images)}</annotations>"
    )
    return root


def retinanet_csv(root: Path) -> Path:
    """keras-retinanet: no header, paths of another machine, empty fields, numbers of the classes."""
    for split, start in (("train", 0), ("val", 10)):
        lines = []
        for sample in samples(start=start):
            save(root / f"images/{sample.number}.jpg", sample)
            path = f"/data/parts/images/{sample.number}.jpg"
            boxes = [f"{x},{y},{x + w},{y + h},{NAMES[n]}" for n, x, y, w, h in sample.objects]
            lines += [f"{path},{text}\n" for text in boxes or [",,,,"]]
        write(root / f"{split}_annotations.csv", "".join(lines))
    write(root / "classes.csv", "bolt,0\nnut,1\n")
    return root


def roboflow_retinanet_csv(root: Path) -> Path:
    """Roboflow: a file without a header in the folder of each split."""
    for split, start in (("train", 0), ("valid", 10)):
        lines = []
        for sample in samples(start=start):
            save(root / split / f"{sample.number}.jpg", sample)
            for n, x, y, w, h in sample.objects:
                lines.append(f"{sample.number}.jpg,{x},{y},{x + w},{y + h},{NAMES[n]}\n")
        write(root / split / "_annotations.csv", "".join(lines))
    return root


def _via_region(label: int, x: int, y: int, w: int, h: int) -> dict[str, Any]:
    """A rectangle, or every second one as a polygon, as the VGG Image Annotator writes it."""
    shape: dict[str, Any] = {"name": "rect", "x": x, "y": y, "width": w, "height": h}
    if label:
        xs, ys = [x, x + w, x + w, x], [y, y, y + h, y + h]
        shape = {"name": "polygon", "all_points_x": xs, "all_points_y": ys}
    attributes = {"type": NAMES[label], "occluded": {"yes": True}, "note": ""}
    return {"shape_attributes": shape, "region_attributes": attributes}


def _via_images(root: Path, folder: str, start: int = 0) -> dict[str, Any]:
    images = {}
    for sample in samples(start=start):
        file = root / folder / f"{sample.number}.jpg"
        save(file, sample)
        size = file.stat().st_size
        images[f"{file.name}{size}"] = {
            "filename": file.name,
            "size": size,
            "regions": [_via_region(*o) for o in sample.objects],
            "file_attributes": {},
        }
    return images


def via_json(root: Path) -> Path:
    """VIA 2, "Export Annotations (as json)", of each split."""
    for split, start in (("train", 0), ("val", 10)):
        write_json(root / split / "via_region_data.json", _via_images(root, split, start))
    return root


def via_project(root: Path) -> Path:
    """VIA's project file; regions as a table, as VIA 1 had them."""
    images = _via_images(root, "photos")
    for image in images.values():
        image["regions"] = {str(n): region for n, region in enumerate(image["regions"])}
    attributes = {"region": {"type": {"type": "dropdown", "options": dict.fromkeys(NAMES, "")}}}
    settings = {"project": {"name": "parts"}, "core": {"default_filepath": "C:\\photos\\"}}
    project = {"_via_settings": settings, "_via_img_metadata": images}
    write_json(root / "via_project.json", {**project, "_via_attributes": attributes})
    return root


def labelme_json(root: Path) -> Path:
    """labelme: corners in any order, polygons, the image in base64, Windows' paths."""
    for sample in samples():
        name = f"{sample.number}.jpg"
        save(root / "images" / name, sample)
        shapes = []
        for label, x, y, w, h in sample.objects:
            corners, kind = [[x + w, y + h], [x, y]], "rectangle"
            if label:
                corners, kind = [[x, y], [x + w, y], [x + w, y + h], [x, y + h]], "polygon"
            shape = {"label": NAMES[label], "points": corners, "group_id": None, "flags": {}}
            shapes.append({**shape, "description": "", "shape_type": kind, "mask": None})
        content = {"version": "5.5.0", "flags": {}, "shapes": shapes}
        content |= {"imagePath": f"..\\images\\{name}", "imageData": "A" * 300_000}
        content |= {"imageHeight": SIZE[1], "imageWidth": SIZE[0]}
        write_json(root / f"labels/{sample.number}.json", content)
    return root


def _createml(root: Path, folder: str, file: str, keys: tuple[str, str], start: int) -> None:
    entries = []
    for sample in samples(start=start):
        save(root / folder / f"{sample.number}.jpg", sample)
        boxes = [
            {
                "label": NAMES[label],
                "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h},
            }
            for label, x, y, w, h in sample.objects
        ]
        entries.append({keys[0]: f"{sample.number}.jpg", keys[1]: boxes})
    write_json(root / folder / file, entries)


def createml_json(root: Path) -> Path:
    """Roboflow, "Create ML JSON"."""
    for split, start in (("train", 0), ("valid", 10), ("test", 20)):
        keys = ("image", "annotations")
        _createml(root, split, "_annotations.createml.json", keys, start)
    return root


def apple_createml_json(root: Path) -> Path:
    """The names of the keys in Apple's documentation."""
    _createml(root, ".", "annotations.json", ("imagefilename", "annotation"), 0)
    return root


EXPORTS: dict[str, tuple[Callable[[Path], Path], str, set[str]]] = {
    "cvat_coco": (cvat_coco, "coco", {"train"}),
    "roboflow_coco": (roboflow_coco, "coco", {"train", "val", "test"}),
    "label_studio_coco": (label_studio_coco, "coco", {"train"}),
    "roboflow_yolo": (roboflow_yolo, "yolo", {"train", "val"}),
    "ultralytics_yolo": (ultralytics_yolo, "yolo", {"train", "val"}),
    "voc_lists": (voc_lists, "voc", {"train", "val"}),
    "voc_plain": (voc_plain, "voc", {"train"}),
    "voc_other_names": (voc_other_names, "voc", {"train"}),
    "darknet": (darknet, "yolo", {"train", "val"}),
    "tf_csv": (tf_csv, "tf-csv", {"train", "val"}),
    "roboflow_tf_csv": (roboflow_tf_csv, "tf-csv", {"train", "val"}),
    "retinanet_csv": (retinanet_csv, "retinanet-csv", {"train", "val"}),
    "roboflow_retinanet_csv": (roboflow_retinanet_csv, "retinanet-csv", {"train", "val"}),
    "via_json": (via_json, "via-json", {"train", "val"}),
    "via_project": (via_project, "via-json", {"train"}),
    "labelme_json": (labelme_json, "labelme-json", {"train"}),
    "createml_json": (createml_json, "createml-json", {"train", "val", "test"}),
    "apple_createml_json": (apple_createml_json, "createml-json", {"train"}),
    "kitti": (kitti, "kitti", {"train"}),
    "open_images": (open_images, "openimages", {"train", "val"}),
    "cvat_xml": (cvat_xml, "cvat-xml", {"train"}),
}
