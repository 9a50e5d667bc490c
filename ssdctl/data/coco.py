"""Read and check COCO annotations.

    annotations = read(path)            # typed; DataError names the place of what is broken
    table, findings = check(annotations, path)

`category_id` is COCO's; `label` is dense: the category's rank in the file plus one, 0 = background.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import DataError, IntegrityError
from ssdctl.files import safe_join

SHOWN = 5  # offenders named in a message


class ImageEntry(msgspec.Struct, gc=False):
    id: int
    file_name: str
    width: int
    height: int


class Annotation(msgspec.Struct, gc=False):
    id: int
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]  # left, top, width, height in pixels
    iscrowd: int = 0


class Category(msgspec.Struct, gc=False):
    id: int
    name: str


class Annotations(msgspec.Struct):
    """What training needs of an annotation file; its other keys are not read."""

    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: list[Category]


class ClassName(msgspec.Struct, frozen=True):
    """A class: COCO's category id and its name. Its label is its place in the list plus one."""

    id: int | None  # None where a peer's checkpoint tells the name alone
    name: str


class Finding(msgspec.Struct, frozen=True):
    """One thing that was dropped or mended."""

    kind: str
    image_id: int
    annotation_id: int | None
    detail: str


class Boxes(NamedTuple):
    """The checked boxes of a split, image by image, as they are trained on.

    `starts[i]:starts[i + 1]` are image i's rows of `ltrb` (pixels) and `labels`.
    """

    starts: NDArray[np.int64]  # N + 1
    ltrb: NDArray[np.float32]  # M x 4
    labels: NDArray[np.int32]  # M
    is_crowd: NDArray[np.bool_]  # M


def read(path: Path) -> Annotations:
    """An annotation file, typed.

    Raises:
        DataError: It cannot be read, is no JSON, or a field is absent or of the wrong type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Annotations)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise DataError(
            f"{path}: not in COCO's format: {error}".replace("`", ""),
            hint="expected images (id, file_name, width, height), annotations (id, image_id, "
            "category_id, bbox) and categories (id, name)",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: broken JSON: {error}") from None


def class_names(annotations: Annotations) -> list[ClassName]:
    """The classes in the order of the file."""
    return [ClassName(c.id, c.name) for c in annotations.categories]


def check(annotations: Annotations, path: Path) -> tuple[Boxes, list[Finding]]:
    """Refuse what cannot be trusted, drop or mend what cannot be trained on.

    Returns:
        The boxes clipped to their images, and a finding for each one dropped or clipped.

    Raises:
        DataError: Duplicate ids, ids that point nowhere, unsafe file names, absurd sizes.
    """
    _refuse_duplicates(path, "image id", [i.id for i in annotations.images])
    _refuse_duplicates(path, "annotation id", [a.id for a in annotations.annotations])
    _refuse_duplicates(path, "category id", [c.id for c in annotations.categories])
    if not annotations.categories:
        raise DataError(f"{path}: no categories")
    rows = {image.id: row for row, image in enumerate(annotations.images)}
    labels = {category.id: label for label, category in enumerate(annotations.categories, 1)}
    for image in annotations.images:
        _check_image(path, image)
    strangers = [a.id for a in annotations.annotations if a.image_id not in rows]
    _refuse(path, "annotations of images that the file does not list", strangers)
    strangers = [a.id for a in annotations.annotations if a.category_id not in labels]
    _refuse(path, "annotations of categories that the file does not list", strangers)

    findings: list[Finding] = []
    per_image: list[list[tuple[tuple[float, float, float, float], int, bool]]] = [
        [] for _ in annotations.images
    ]
    for annotation in annotations.annotations:
        row = rows[annotation.image_id]
        box = _usable_box(annotation, annotations.images[row], findings)
        if box is not None:
            entry = (box, labels[annotation.category_id], annotation.iscrowd != 0)
            per_image[row].append(entry)
    flat = [entry for entries in per_image for entry in entries]
    starts = np.zeros(len(per_image) + 1, np.int64)
    np.cumsum([len(entries) for entries in per_image], out=starts[1:])
    return Boxes(
        starts,
        np.array([e[0] for e in flat], np.float32).reshape(-1, 4),
        np.array([e[1] for e in flat], np.int32),
        np.array([e[2] for e in flat], np.bool_),
    ), findings


def _check_image(path: Path, image: ImageEntry) -> None:
    try:
        safe_join(Path(), image.file_name)
    except IntegrityError as error:
        raise DataError(f"{path}: image {image.id}: {error}") from None
    if not (0 < image.width <= 65535 and 0 < image.height <= 65535):
        raise DataError(f"{path}: image {image.id}: size {image.width} x {image.height}")


def _usable_box(
    annotation: Annotation, image: ImageEntry, findings: list[Finding]
) -> tuple[float, float, float, float] | None:
    """The box as ltrb inside its image, or None where nothing can be learned from it."""

    def note(kind: str) -> None:
        detail = f"bbox {list(annotation.bbox)} in {image.width} x {image.height}"
        findings.append(Finding(kind, annotation.image_id, annotation.id, detail))

    x, y, w, h = annotation.bbox
    if not all(map(math.isfinite, annotation.bbox)):
        note("box not finite, dropped")
        return None
    if w <= 0 or h <= 0 or x + w == x or y + h == y:
        note("box of no size, dropped")
        return None
    left, top = max(x, 0.0), max(y, 0.0)
    right, bottom = min(x + w, float(image.width)), min(y + h, float(image.height))
    if right <= left or bottom <= top:
        note("box outside its image, dropped")
        return None
    # COCO's own boxes overshoot by rounding: a hundredth of a pixel is no finding.
    if max(left - x, top - y, x + w - right, y + h - bottom) > 0.01:
        note("box clipped to its image")
    if np.float32(right) <= np.float32(left) or np.float32(bottom) <= np.float32(top):
        note("box of no size, dropped")
        return None
    return left, top, right, bottom


def _refuse_duplicates(path: Path, what: str, ids: list[int]) -> None:
    if len(set(ids)) != len(ids):
        twice = [i for i, n in Counter(ids).items() if n > 1]
        _refuse(path, f"duplicate {what}s", twice)


def _refuse(path: Path, what: str, offenders: list[Any]) -> None:
    if offenders:
        named = ", ".join(map(str, offenders[:SHOWN]))
        more = f" and {len(offenders) - SHOWN} more" if len(offenders) > SHOWN else ""
        raise DataError(f"{path}: {what}: {named}{more}")
