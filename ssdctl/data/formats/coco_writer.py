"""A COCO annotation file in the making: what the converters fill, and what may be cut out of one.

    document([FoundImage(...), ...], ["cat", "dog"]) -> content
    with_classes(content, ["cat"], path) -> content
    divided(content, 0.9, path) -> (train, val)

`with_classes` and `divided` work on any COCO file and keep every field of what they keep.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ssdctl.errors import DataError, UsageError


class FoundBox(NamedTuple):
    """A box of an image, in pixels."""

    name: str  # of its class
    left: float
    top: float
    width: float
    height: float
    is_crowd: bool = False


class FoundImage(NamedTuple):
    """An image of another layout, with its boxes."""

    file_name: str
    width: int
    height: int
    boxes: list[FoundBox]


def document(images: Sequence[FoundImage], classes: Sequence[str]) -> bytes:
    """An annotation file; ids count from 1 in the given order."""
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
    whole = {
        "images": [
            {"id": n, "file_name": i.file_name, "width": i.width, "height": i.height}
            for n, i in enumerate(images, 1)
        ],
        "annotations": entries,
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
    }
    return msgspec.json.encode(whole)


class _Raw(msgspec.Struct):
    images: list[msgspec.Raw]
    annotations: list[msgspec.Raw]
    categories: list[msgspec.Raw]


class _Image(msgspec.Struct):
    id: int
    file_name: str


class _Box(msgspec.Struct):
    image_id: int
    category_id: int


class _Category(msgspec.Struct):
    id: int
    name: str


def num_images(content: bytes, path: Path) -> int:
    """How many images an annotation file lists."""
    return len(_opened(content, path).images)


def with_classes(content: bytes, classes: Sequence[str], path: Path) -> bytes:
    """The annotation file with these classes alone; images that lose all boxes stay.

    Raises:
        UsageError: The file has no such class.
        DataError: It is not in COCO's format.
    """
    whole = _opened(content, path)
    known = [_typed(raw, _Category, path) for raw in whole.categories]
    names = [category.name for category in known]
    for name in classes:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            raise UsageError(f"--classes: {path} has no class {name!r}", hint=hint)
    ids = {category.id for category in known if category.name in classes}
    pairs = zip(whole.categories, known, strict=True)
    kept = _Raw(
        whole.images,
        [raw for raw in whole.annotations if _typed(raw, _Box, path).category_id in ids],
        [raw for raw, category in pairs if category.id in ids],
    )
    return msgspec.json.encode(kept)


def divided(content: bytes, share: float, path: Path) -> tuple[bytes, bytes]:
    """The annotation file in two: `share` of the images to train on, the others to validate.

    Which image goes where hangs on its name alone: the same files are divided the same way
    everywhere, and a few images more move few others.

    Raises:
        DataError: It is not in COCO's format, or has too few images.
    """
    whole = _opened(content, path)
    images = [_typed(raw, _Image, path) for raw in whole.images]
    if len(images) < 2:
        raise DataError(f"{path}: {len(images)} images cannot be divided by --split")
    order = sorted(images, key=lambda i: hashlib.sha256(i.file_name.encode()).digest())
    num_train = min(max(round(share * len(images)), 1), len(images) - 1)
    trained = {image.id for image in order[:num_train]}
    parts: list[bytes] = []
    for wanted in (True, False):
        pairs = zip(whole.images, images, strict=True)
        boxes = whole.annotations
        part = _Raw(
            [raw for raw, image in pairs if (image.id in trained) == wanted],
            [raw for raw in boxes if (_typed(raw, _Box, path).image_id in trained) == wanted],
            whole.categories,
        )
        parts.append(msgspec.json.encode(part))
    return parts[0], parts[1]


def _opened(content: bytes, path: Path) -> _Raw:
    try:
        return msgspec.json.decode(content, type=_Raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not in COCO's format: {error}".replace("`", "")) from None


def _typed(raw: msgspec.Raw, kind: Any, path: Path) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not in COCO's format: {error}".replace("`", "")) from None


def without_test(
    found: dict[str, list[FoundImage]], say: Callable[[str], None]
) -> dict[str, list[FoundImage]]:
    """The splits train and val: test images validate where nothing else does, else stay unused."""
    test = found.pop("test", [])
    if test and not found.get("val"):
        say("no validation images are named; the test images validate")
        found["val"] = test
    return {split: found[split] for split in ("train", "val") if found.get(split)}
