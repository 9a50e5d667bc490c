"""Write a prepared dataset to a folder in another format: `ssdctl dataset export`.

Images are written with the bytes that the store has (a shrunk store's are smaller), and boxes in
their pixels. No EXIF orientation remains, so every reader shows the pixels that the boxes fit.
Images that `prepare` dropped are left out, and training images that may show objects but have no
box: as images without objects they would train as background.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec
import numpy as np
import pyarrow as pa

from ssdctl.data.annotations import (
    ClassName,
    LabeledBox,
    LabeledImage,
    annotations_of_split,
    class_texts,
    unique_names,
)
from ssdctl.data.check import CLIPPED, clip
from ssdctl.data.coco_json import document_of
from ssdctl.data.image_check import JPEG_FORMATS
from ssdctl.data.image_decode import Header, encode, open_image, read_header
from ssdctl.data.image_files import IMAGE_SUFFIXES
from ssdctl.data.index import read_annotations
from ssdctl.data.store import Split
from ssdctl.errors import UsageError
from ssdctl.files import disk_errors, make_dir
from ssdctl.runtime.progress import Progress, without_progress

log = logging.getLogger(__name__)
Target = Literal["coco", "yolo", "voc", "hf"]
SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "JPEG2000": ".jp2"}  # others: the format's name
HF_SPLITS = {"train": "train", "val": "validation", "test": "test"}
ORIENTATION = 0x112  # EXIF's tag; its value is one (1) 16-bit number (3)
HF_SHARD_BYTES = 400_000_000
Classes = dict[str, ClassName]  # by name, with the id if another class has the same
_Exported = tuple[int, LabeledImage, bytes]  # image id, boxes in the pixels of the store, content


def export_dataset(
    splits: Mapping[str, Split],
    out: Path,
    target: Target,
    progress: Progress = without_progress,
) -> dict[str, int]:
    """Write a dataset; return the number of images written for each split."""
    name = f".{out.resolve().name}.partial"
    if out.exists() and not (out.is_dir() and all(path.name == name for path in out.iterdir())):
        raise UsageError(f"--out {out}: exists already", hint="give a new folder")
    out = out.resolve()
    partial = (out if out.exists() else out.parent) / name  # on the same file system
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed export
    make_dir(partial)
    try:
        _write(splits, partial, target, progress)
        os.sync()  # once: each file on its own takes ten times as long
        with disk_errors(out, "writing"):
            if out.exists():  # it may be the current folder
                for path in partial.iterdir():
                    path.rename(out / path.name)
            else:
                partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {name: len(_rows(name, split)) for name, split in splits.items()}


def _write(splits: Mapping[str, Split], out: Path, target: Target, progress: Progress) -> None:
    entries = next(iter(splits.values())).classes
    names = class_texts(entries)
    classes = dict(zip(names, entries, strict=True))
    renamed = [name for name, entry in classes.items() if name != entry.name]
    if renamed and target != "coco":
        text = "classes with the same name are written with their ids, such as %s"
        log.warning(text, renamed[0])
    write = {"coco": _write_coco, "yolo": _write_yolo, "voc": _write_voc, "hf": _write_hf}[target]
    used = set[str]()
    for name, split in splits.items():
        rows = _rows(name, split)
        labeled = np.union1d(split.trainable, split.background)
        if unlabeled := int(split.usable.sum()) - len(labeled):
            fate = "left out" if name == "train" else "written as images without objects"
            text = "%s: images that may show objects but have no box, %s: %d"
            log.info(text, name, fate, unlabeled)
        if (split.pixel_sizes[rows] < split.sizes[rows]).any():
            log.info(
                "%s: images and boxes are those of the store, which --shrink made smaller", name
            )
        shown = progress(rows, total=len(rows), label=name, unit="images")
        write(out, name, _noted(_images(split, shown, names), used), classes)
    if target == "voc" and (unused := [name for name in names if name not in used]):
        log.warning("classes without a box, which VOC has no place for: %s", ", ".join(unused))
    if target == "yolo":
        content: dict[str, Any] = {split: f"images/{split}" for split in splits}
        content["names"] = dict(enumerate(classes))
        _put(out / "data.yaml", _yaml(content))
    elif target == "hf":
        _put(out / "README.md", _hf_card(splits, classes))


def _put(path: Path, content: bytes | memoryview | str) -> None:
    """Write a file of the temporary folder."""
    with disk_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _rows(name: str, split: Split) -> list[int]:
    rows = np.union1d(split.trainable, split.background)
    return (rows if name == "train" else np.flatnonzero(split.usable)).tolist()


def _yaml(content: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def _noted(images: Iterator[_Exported], names: set[str]) -> Iterator[_Exported]:
    """Pass images on; add the names of the classes that they show."""
    for exported in images:
        names.update(box.name for box in exported[1].boxes)
        yield exported


def _images(split: Split, rows: Iterable[int], classes: list[str]) -> Iterator[_Exported]:
    annotations = read_annotations(split.index_file)
    stems = [PurePosixPath(name).stem for name in annotations.file_names]
    names = unique_names(stems, split.image_ids.tolist(), "{}-{}")
    ltrb, _, kinds = clip(annotations.boxes, annotations.sizes[annotations.rows])
    starts = np.searchsorted(annotations.rows, np.arange(len(names) + 1))
    for row in rows:
        content, suffix = _image_file(split, row)
        width, height = (int(n) for n in split.pixel_sizes[row])
        scale = np.tile(split.pixel_sizes[row] / split.sizes[row], 2)  # below 1 for a shrunk image
        boxes = []
        for n in range(starts[row], starts[row + 1]):
            if kinds[n] <= CLIPPED:
                left, top, right, bottom = (ltrb[n] * scale).tolist()
                name = classes[annotations.labels[n] - 1]
                sides = left, top, right - left, bottom - top
                area = annotations.areas[n] * scale[0] * scale[1]
                is_known = kinds[n] != CLIPPED and not np.isnan(area)
                is_crowd = bool(annotations.is_crowd[n])
                boxes.append(LabeledBox(name, *sides, is_crowd, area if is_known else None))
        labels = LabeledImage(names[row] + suffix, width, height, boxes)
        yield int(split.image_ids[row]), labels, content


def _image_file(split: Split, row: int) -> tuple[bytes, str]:
    """Return an image without an EXIF orientation, and its suffix; PNG if no suffix is usual."""
    content = bytes(split.read(row))
    header = _header(content)
    if header.orientation != 1:
        width, height = split.pixel_sizes[row].tolist()
        is_read_as_stored = header.orientation_for((width, height), split.upright) == 1
        if is_read_as_stored and header.format in JPEG_FORMATS:
            for entry in (struct.Struct("<HHIH"), struct.Struct(">HHIH")):  # in either byte order
                old, new = (entry.pack(ORIENTATION, 3, 1, n) for n in (header.orientation, 1))
                content = content.replace(old, new)
        header = _header(content)
    suffix = SUFFIXES.get(header.format, f".{header.format.lower()}")
    if suffix not in IMAGE_SUFFIXES or header.orientation != 1:
        return encode(split.decode(row), "PNG"), ".png"
    return content, suffix


def _header(content: bytes) -> Header:
    with open_image(io.BytesIO(content)) as image:
        return read_header(image)


def _write_coco(out: Path, split: str, images: Iterator[_Exported], classes: Classes) -> None:
    listed, ids = [], []
    for image_id, image, content in images:
        _put(make_dir(out / f"{split}2017") / image.file_name, content)
        listed.append(image)
        ids.append(image_id)
    file = make_dir(out / "annotations") / f"instances_{split}2017.json"
    annotations = annotations_of_split(listed, list(classes), out, file)
    annotations = annotations._replace(
        image_ids=np.array(ids, np.int64), classes=list(classes.values())
    )
    _put(file, msgspec.json.encode(document_of(annotations)))


def _write_yolo(out: Path, split: str, images: Iterator[_Exported], classes: Classes) -> None:
    numbers = {name: number for number, name in enumerate(classes)}
    folder, labels = make_dir(out / "images" / split), make_dir(out / "labels" / split)
    crowds = 0
    for _, image, content in images:
        _put(folder / image.file_name, content)
        crowds += sum(box.is_crowd for box in image.boxes)
        lines = ""
        for box in image.boxes:
            x, y = box.left + box.width / 2, box.top + box.height / 2
            sides = (
                x / image.width,
                y / image.height,
                box.width / image.width,
                box.height / image.height,
            )
            lines += f"{numbers[box.name]} {' '.join(f'{side:.7f}' for side in sides)}\n"
        _put(labels / PurePosixPath(image.file_name).with_suffix(".txt"), lines)
    if crowds:
        log.warning("%s: crowd regions, which YOLO lacks, written as boxes: %d", split, crowds)


def _write_voc(out: Path, split: str, images: Iterator[_Exported], classes: Classes) -> None:
    folder, annotations = make_dir(out / "JPEGImages"), make_dir(out / "Annotations")
    stems = []
    for image_id, image, content in images:
        # A list has one word for each image, and all splits have one folder.
        stem = "_".join(PurePosixPath(image.file_name).stem.split())
        while (annotations / f"{stem}.xml").exists():
            stem = f"{split}_{stem}-{image_id}"
        name = stem + PurePosixPath(image.file_name).suffix
        _put(folder / name, content)
        _put(annotations / f"{stem}.xml", _voc_xml(name, image))
        stems.append(stem)
    lists = make_dir(out / "ImageSets" / "Main")
    _put(lists / f"{split}.txt", "".join(f"{stem}\n" for stem in stems))


def _voc_xml(name: str, image: LabeledImage) -> bytes:
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = name
    _add(root, "size", width=image.width, height=image.height, depth=3)
    for box in image.boxes:
        item = _add(root, "object", name=box.name, difficult=int(box.is_crowd))
        # VOC counts pixels from 1 and includes the last one.
        corners = {"xmin": box.left + 1, "ymin": box.top + 1}
        corners |= {"xmax": box.left + box.width, "ymax": box.top + box.height}
        _add(item, "bndbox", **{key: f"{value:.3f}" for key, value in corners.items()})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8")


def _add(parent: ElementTree.Element, tag: str, **texts: object) -> ElementTree.Element:
    element = ElementTree.SubElement(parent, tag)
    for key, text in texts.items():
        ElementTree.SubElement(element, key).text = str(text)
    return element


def _hf_features(classes: Classes) -> dict[str, Any]:
    """Return the features of the `datasets` library, in the form of its metadata."""

    def value(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "_type": "Value"}

    def listed(feature: dict[str, Any], length: int = -1) -> dict[str, Any]:
        return {"feature": feature, "length": length, "_type": "Sequence"}

    objects = {
        "bbox": listed(listed(value("float32"), 4)),
        "category": listed({"names": list(classes), "_type": "ClassLabel"}),
        "is_crowd": listed(value("bool")),
    }
    numbers = {"image_id": value("int64"), "width": value("int32"), "height": value("int32")}
    return {"image": {"_type": "Image"}, **numbers, "objects": objects}


def _write_hf(out: Path, split: str, images: Iterator[_Exported], classes: Classes) -> None:
    from pyarrow import parquet

    objects = {
        "bbox": pa.list_(pa.list_(pa.float32(), 4)),
        "category": pa.list_(pa.int64()),
        "is_crowd": pa.list_(pa.bool_()),
    }
    image_file = pa.struct({"bytes": pa.binary(), "path": pa.string()}.items())
    columns = {"image": image_file, "image_id": pa.int64(), "width": pa.int32()}
    columns |= {"height": pa.int32(), "objects": pa.struct(objects.items())}
    info = msgspec.json.encode({"info": {"features": _hf_features(classes)}})
    schema = pa.schema(columns.items(), metadata={"huggingface": info})
    numbers = {name: number for number, name in enumerate(classes)}
    folder = make_dir(out / "data")
    for shard, part in enumerate(_shards(images)):
        rows = [
            {
                "image": {"bytes": content, "path": image.file_name},
                "image_id": image_id,
                "width": image.width,
                "height": image.height,
                "objects": {
                    "bbox": [[b.left, b.top, b.width, b.height] for b in image.boxes],
                    "category": [numbers[b.name] for b in image.boxes],
                    "is_crowd": [b.is_crowd for b in image.boxes],
                },
            }
            for image_id, image, content in part
        ]
        file = io.BytesIO()
        # The options with which `datasets` itself writes images: small row groups.
        parquet.write_table(pa.Table.from_pylist(rows, schema), file, row_group_size=100)
        _put(folder / f"{HF_SPLITS[split]}-{shard:05d}.parquet", file.getbuffer())


def _shards(images: Iterator[_Exported]) -> Iterator[list[_Exported]]:
    shard, size = list[_Exported](), 0
    for exported in images:
        shard.append(exported)
        size += len(exported[2])
        if size >= HF_SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _hf_card(splits: Iterable[str], classes: Classes) -> str:
    names = [HF_SPLITS[split] for split in splits]
    files = [{"split": name, "path": f"data/{name}-*.parquet"} for name in names]
    header = {
        "task_categories": ["object-detection"],
        "configs": [{"config_name": "default", "data_files": files}],
    }
    return (
        f"---\n{_yaml(header)}---\n\n# Object detection dataset\n\n"
        f"{len(classes)} classes: {', '.join(classes)}. `objects.bbox` is left, top, width, height "
        "in pixels.\n\n```python\nfrom datasets import load_dataset\n\n"
        'dataset = load_dataset("PATH/OF/THIS/FOLDER")\n```\n'
    )
