"""Write COCO annotation files: from labelled images of another layout, or a part of a file.

    document([LabeledImage(...), ...], ["cat", "dog"]) -> content
    with_classes(content, ["cat"], path) -> content
    divided(content, 0.9, path) -> (train, val)

`with_classes` and `divided` work on any COCO file and keep every field of what they keep.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ssdctl.data.annotations import LabeledImage
from ssdctl.data.formats.coco import parse
from ssdctl.data.formats.coco_json import decode
from ssdctl.errors import DataError, UsageError


def document(images: Sequence[LabeledImage], classes: Sequence[str]) -> bytes:
    """Return an annotation file; ids count from 1 in the given order."""
    ids = {name: number for number, name in enumerate(classes, 1)}
    entries: list[dict[str, Any]] = []
    for number, image in enumerate(images, 1):
        for box in image.boxes:
            entries.append(
                {
                    "id": len(entries) + 1,
                    "image_id": number,
                    "category_id": ids[box.name],
                    "bbox": [round(v, 3) for v in (box.left, box.top, box.width, box.height)],
                    "area": round(box.width * box.height, 3),
                    "iscrowd": int(box.is_crowd),
                }
            )
    content = {
        "images": [
            {"id": n, "file_name": i.file_name, "width": i.width, "height": i.height}
            for n, i in enumerate(images, 1)
        ],
        "annotations": entries,
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
    }
    return msgspec.json.encode(content)


class _Tables(msgspec.Struct):
    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw]
    categories: list[msgspec.Raw]


def num_images(content: bytes, path: Path) -> int:
    """Return how many images an annotation file lists."""
    return len(_tables(content, path).images)


def with_classes(content: bytes, classes: Sequence[str], path: Path) -> bytes:
    """Return the annotation file with only these classes; images that lose all boxes stay.

    Raises:
        UsageError: The file has no such class.
        DataError: It is not in COCO's format.
    """
    tables, annotations = _tables(content, path), parse(content, path)
    categories = [*annotations.categories, *annotations.supercategories]
    names = [category.name for category in categories]
    for name in classes:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise UsageError(f"--classes: {path} has no class {name!r}", hint=hint)
    ids = {category.id for category in categories if category.name in classes}
    is_kept = np.isin(annotations.annotations.category_id, list(ids)).tolist()
    tables.annotations = _chosen(tables.annotations, is_kept)
    # The categories that `parse` left out are decoded with their id only.
    category_ids = [_category_id(raw) for raw in tables.categories]
    tables.categories = _chosen(tables.categories, [i in ids for i in category_ids])
    return msgspec.json.encode(tables)


def divided(content: bytes, share: float, path: Path) -> tuple[bytes, bytes]:
    """Divide an annotation file: `share` of the images to train on, the others to validate.

    Only an image's name decides where it goes: the same files are divided the same way everywhere,
    and a few more images move few others.

    Raises:
        DataError: It is not in COCO's format, or has too few images.
    """
    tables, annotations = _tables(content, path), parse(content, path)
    images = annotations.images
    if len(images) < 2:
        raise DataError(f"{path}: {len(images)} images cannot be divided by --split")
    order = sorted(images, key=lambda i: hashlib.sha256(i.file_name.encode()).digest())
    num_train = min(max(round(share * len(images)), 1), len(images) - 1)
    train_ids = {image.id for image in order[:num_train]}
    is_in_train = np.isin(annotations.annotations.image_id, list(train_ids))
    parts = [
        _Tables(
            _chosen(tables.images, [(i.id in train_ids) == is_train for i in images]),
            _chosen(tables.annotations, (is_in_train == is_train).tolist()),
            tables.categories,
        )
        for is_train in (True, False)
    ]
    return msgspec.json.encode(parts[0]), msgspec.json.encode(parts[1])


def _chosen(entries: list[msgspec.Raw], is_chosen: Sequence[bool]) -> list[msgspec.Raw]:
    return [entry for entry, chosen in zip(entries, is_chosen, strict=True) if chosen]


def _category_id(raw: msgspec.Raw) -> int:
    return int(msgspec.json.decode(raw)["id"])


def _tables(content: bytes, path: Path) -> _Tables:
    try:
        return decode(content, _Tables)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not in COCO's format: {error}".replace("`", "")) from None
