"""Read COCO annotation files as labelling tools write them.

    annotations = read(path)            # typed; DataError names the place of what is broken
    boxes, findings = check(annotations, path)          # see coco_check.py

Only the fields that training and scoring need are typed; every other field may hold anything.
Whole numbers written as floats, `iscrowd: false`, null areas and a byte order mark are accepted.
`category_id` is COCO's; `label` is dense: the category's rank in the file plus one, 0 = background.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.classes import ClassName
from ssdctl.data.formats.coco_json import (
    AnnotationColumns,
    Category,
    Content,
    ImageEntry,
    NotWholeError,
    Tables,
    column,
    repeated_table,
)
from ssdctl.data.formats.coco_slices import decode_tables, open_content
from ssdctl.errors import DataError
from ssdctl.files import read_errors
from ssdctl.runtime.printable import listed

MAX_NAMED = 5  # offenders named in a message


class Annotations(NamedTuple):
    """What training and scoring need of an annotation file."""

    images: list[ImageEntry]
    annotations: AnnotationColumns
    categories: list[Category]
    supercategories: Sequence[Category] = ()  # listed as categories, but not classes: left out
    merged: Sequence[ImageEntry] = ()  # of files that an earlier entry has, too: left out


class BoxColumns(NamedTuple):
    """The annotated boxes of a file as arrays, unclipped: what detections are scored against."""

    image_ids: NDArray[np.int64]  # M
    category_ids: NDArray[np.int64]  # M
    bbox: NDArray[np.float64]  # M x 4: left, top, width, height in pixels
    area: NDArray[np.float64]  # M, square pixels; width * height if the file gives none
    is_crowd: NDArray[np.bool_]  # M


def read(path: Path) -> Annotations:
    """Return an annotation file, typed.

    Raises:
        DataError: It cannot be read, is not JSON, has a table twice, or a field is absent or of the
            wrong type.
    """
    return parse(read_content(path), path)


def read_content(path: Path) -> Content:
    """Return the content of an annotation file; a large one is mapped into memory.

    Raises:
        DataError: It cannot be read.
    """
    with read_errors(path):
        return open_content(path)


def parse(content: Content, path: Path, other_splits: Sequence[Path] = ()) -> Annotations:
    """Return the content of an annotation file, typed; see `read`.

    Args:
        content: The file's.
        path: The file, for messages.
        other_splits: Files of the same dataset. A supercategory that has boxes in one of them is a
            class of all splits.
    """
    try:
        tables = decode_tables(content)
    except (msgspec.ValidationError, NotWholeError) as error:
        raise _not_coco(path, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: broken JSON: {error}", hint="export or copy the file again"
        ) from None
    if (repeated := repeated_table(content)) is not None:
        name, lines = repeated
        raise DataError(
            f"{path}:{lines[1]}: has {name} again, after line {lines[0]}",
            hint="merge both into one list",
        )
    categories, supercategories = _without_supercategories(tables, other_splits)
    images, columns, merged = _one_image_per_file(tables, path)
    return Annotations(images, columns, categories, supercategories, merged)


def _one_image_per_file(
    tables: Tables, path: Path
) -> tuple[list[ImageEntry], AnnotationColumns, list[ImageEntry]]:
    """Give the objects of several entries of one file, as in merged datasets, to the first.

    Otherwise each entry would have the other's objects as background.

    Returns:
        The images, the annotations, and the entries that were left out.

    Raises:
        DataError: The entries have different sizes.
    """
    first: dict[str, ImageEntry] = {}
    images, merged, new_ids = [], [], {}
    for image in tables.images:
        other = first.setdefault(image.file_name, image)
        if other is image or other.id == image.id:  # an id that occurs twice is refused later
            images.append(image)
            continue
        if (other.width, other.height) != (image.width, image.height):
            raise DataError(
                f"{path}: {image.file_name}: is listed twice, as image {other.id} of "
                f"{other.width} x {other.height} and as image {image.id} of "
                f"{image.width} x {image.height}",
                hint="correct the size, or rename one of the files",
            )
        merged.append(image)
        new_ids[image.id] = other.id
    columns = tables.annotations
    if merged:
        old = np.array(sorted(new_ids), np.int64)
        place = positions(old, columns.image_id)
        new = np.array([new_ids[i] for i in old.tolist()], np.int64)
        columns = columns._replace(image_id=np.where(place < 0, columns.image_id, new[place]))
    return images, columns, merged


def _not_coco(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: not in COCO's format: {error}".replace("`", ""),
        hint="expected images (id, file_name, width, height), annotations (id, image_id, "
        "category_id, bbox) and categories (id, name)",
    )


def _without_supercategories(
    tables: Tables, other_splits: Sequence[Path]
) -> tuple[list[Category], list[Category]]:
    """The classes, and the entries that only name other entries' supercategory (Roboflow's 0)."""
    parents = {c.supercategory for c in tables.categories if isinstance(c.supercategory, str)}
    candidates = [
        c
        for c in tables.categories
        if c.name in parents
        and c.supercategory in (None, "", "none")
        and len(tables.categories) > 1
    ]
    if not candidates:
        return tables.categories, []
    used = set(np.unique(tables.annotations.category_id).tolist())
    unused = [c for c in candidates if c.id not in used]
    for path in other_splits if unused else ():
        names = {c.name for c in read(path).categories}
        unused = [c for c in unused if c.name not in names]
    left_out = {c.id for c in unused}
    return [c for c in tables.categories if c.id not in left_out], unused


def class_names(annotations: Annotations) -> list[ClassName]:
    """Return the classes in the order of the file."""
    return [ClassName(c.id, c.name) for c in annotations.categories]


def box_columns(annotations: Annotations) -> BoxColumns:
    """Return the annotated boxes as arrays; annotations without a bbox are left out."""
    columns = annotations.annotations
    bbox = columns.bbox
    area = np.where(np.isnan(columns.area), bbox[:, 2] * bbox[:, 3], columns.area)
    has_bbox = ~np.isnan(bbox).any(axis=1)
    return BoxColumns(
        columns.image_id[has_bbox],
        columns.category_id[has_bbox],
        bbox[has_bbox],
        area[has_bbox],
        columns.is_crowd[has_bbox],
    )


def link(annotations: Annotations, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each annotation's image, and its label.

    Raises:
        DataError: Duplicate ids, ids that refer to nothing.
    """
    columns = annotations.annotations
    image_ids, category_ids = column(annotations.images, "id"), column(annotations.categories, "id")
    _refuse_duplicates(path, "image ids", image_ids)
    _refuse_duplicates(path, "annotation ids", columns.id)
    _refuse_duplicates(path, "category ids", category_ids)
    row = positions(image_ids, columns.image_id)
    _refuse_unlisted(path, "image", columns.id[row < 0], columns.image_id[row < 0])
    label = 1 + positions(category_ids, columns.category_id)
    _refuse_unlisted(path, "category", columns.id[label < 1], columns.category_id[label < 1])
    return row, label


def positions(listed: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each wanted id in `listed`; -1 if it is not listed."""
    if not len(listed):
        return np.full(len(wanted), -1)
    order = np.argsort(listed, kind="stable")
    ranked = listed[order]
    rank = np.searchsorted(ranked, wanted).clip(max=len(listed) - 1)
    return np.where(ranked[rank] == wanted, order[rank], -1)


def _refuse_duplicates(path: Path, what: str, ids: NDArray[np.int64]) -> None:
    ranked = np.sort(ids)  # np.unique takes many times as long
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    refuse(path, f"duplicate {what}", np.unique(twice).tolist(), "each must occur once")


def _refuse_unlisted(
    path: Path, kind: str, ids: NDArray[np.int64], references: NDArray[np.int64]
) -> None:
    """Refuse annotations of images or categories that the file does not list."""
    plural = {"image": "images", "category": "categories"}[kind]
    named = [f"{i} ({kind} {reference})" for i, reference in zip(ids, references, strict=True)]
    hint = f"each {kind}_id must be the id of an entry in {plural}"
    refuse(path, f"annotations of {plural} that the file does not list", named, hint)


def refuse(path: Path, what: str, offenders: Sequence[object], hint: str | None = None) -> None:
    """Raise a DataError that names the first few offenders, if there are any."""
    if offenders:
        raise DataError(f"{path}: {what}: {listed(offenders, MAX_NAMED)}", hint=hint)
