"""Read COCO annotation files as labeling tools write them.

    splits = read(Path("export"))       # typed; DataError names the place of what is broken

Only the fields that training and scoring need are typed; every other field may hold anything.
Whole numbers written as floats, `iscrowd: false`, null areas and a byte order mark are accepted.
Classes are the file's categories in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import (
    UNLISTED,
    Annotations,
    Finding,
    one_image_per_file,
    refuse,
)
from ssdctl.data.classes import ClassName
from ssdctl.data.formats._coco_files import image_folder, own_splits, splits_of
from ssdctl.data.formats._coco_json import (
    Content,
    NotWholeError,
    Tables,
    column,
    repeated_table,
)
from ssdctl.data.formats._coco_slices import decode_tables, open_content
from ssdctl.data.image_files import ANNOTATION_FOLDERS, dataset_folder
from ssdctl.data.split_files import SplitFiles
from ssdctl.errors import DataError
from ssdctl.files import read_errors

__all__ = ["own_splits", "read", "read_content", "read_files", "recognise", "splits_of"]
LOOKED_FOR = ("annotations/*.json", "train/_annotations.coco.json", "result.json")
RENUMBERED = "duplicate annotation id, renumbered"


def recognise(path: Path) -> Path | None:
    """Return the first annotation file.

    Raises:
        DataError: There are several for one split.
    """
    return next((files.annotations for files in splits_of(path).values()), None)


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a dataset folder, or of an annotation file.

    Raises:
        DataError: There is no annotation file, or one cannot be read, is not JSON, has a table
            twice, a field that is absent or of the wrong type, or ids that refer to nothing.
    """
    if path.is_file():
        return read_files({"train": SplitFiles(image_folder(path, dataset_folder(path)), path)})
    splits = splits_of(path)
    if not splits:
        raise DataError(
            f"{path}: no annotation file in COCO's format (looked for *.json in it, in "
            f"{', '.join(ANNOTATION_FOLDERS)} and in the folders of splits)"
        )
    return read_files(splits)


def read_files(splits: Mapping[str, SplitFiles]) -> dict[str, Annotations]:
    """Return splits by their files; see `read`.

    A category that is only the supercategory of others (Roboflow's 0) is a class if it has boxes in
    one of the splits.
    """
    tables = {split: _decode(files.annotations) for split, files in splits.items()}
    unused = {split: _unused_supercategories(part) for split, part in tables.items()}
    kept = {
        split: {c.name for c in part.categories} - set(unused[split].values())
        for split, part in tables.items()
    }
    result = {}
    for split, files in splits.items():
        elsewhere = set[str]().union(*(names for other, names in kept.items() if other != split))
        left_out = {i: name for i, name in unused[split].items() if name not in elsewhere}
        result[split] = _columns(tables.pop(split), left_out, files)
    return result


def read_content(path: Path) -> Content:
    """Return the content of an annotation file; a large one is mapped into memory.

    Raises:
        DataError: It cannot be read.
    """
    with read_errors(path):
        return open_content(path)


def _decode(path: Path) -> Tables:
    content = read_content(path)
    try:
        tables = decode_tables(content)
    except (msgspec.ValidationError, NotWholeError) as error:
        raise DataError(
            f"{path}: not in COCO's format: {error}".replace("`", ""),
            hint="expected images (id, file_name, width, height), annotations (id, image_id, "
            "category_id, bbox) and categories (id, name)",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "export or copy the file again"
        raise DataError(f"{path}: broken JSON: {error}", hint=hint) from None
    if (repeated := repeated_table(content)) is not None:
        name, lines = repeated
        raise DataError(
            f"{path}:{lines[1]}: has {name} again, after line {lines[0]}",
            hint="merge both into one list",
        )
    return tables


def _unused_supercategories(tables: Tables) -> dict[int, str]:
    """Return the categories without boxes that only name the supercategory of others, by id."""
    parents = {c.supercategory for c in tables.categories if isinstance(c.supercategory, str)}
    used = set(np.unique(tables.annotations.category_id).tolist())
    return {
        c.id: c.name
        for c in tables.categories
        if c.name in parents
        and c.supercategory in (None, "", "none")
        and len(tables.categories) > 1
        and c.id not in used
    }


def _columns(tables: Tables, left_out: Mapping[int, str], files: SplitFiles) -> Annotations:
    """Return a file as columns.

    Raises:
        DataError: Duplicate ids of images or categories, objects of images that it does not list.
    """
    path, columns = files.annotations, tables.annotations
    classes = [ClassName(c.id, c.name) for c in tables.categories if c.id not in left_out]
    image_ids = column(tables.images, "id")
    category_ids = np.array([c.id for c in classes], np.int64)
    _refuse_duplicates(path, "image ids", image_ids)
    _refuse_duplicates(path, "category ids", column(tables.categories, "id"))
    rows = _positions(image_ids, columns.image_id)
    absent = rows < 0
    pairs = zip(columns.id[absent].tolist(), columns.image_id[absent].tolist(), strict=True)
    refuse(
        path,
        "annotations of images that the file does not list",
        [f"{i} (image {image})" for i, image in pairs],
        "each image_id must be the id of an entry in images",
    )
    labels = 1 + _positions(category_ids, columns.category_id)
    ids, findings = _unique_ids(columns.id, columns.image_id)
    for n in np.nonzero(labels < 1)[0]:
        detail = f"category {columns.category_id[n]}"
        findings.append(Finding(UNLISTED, int(columns.image_id[n]), int(ids[n]), detail))
    # Most files list all: an index that copies nothing.
    listed = slice(None) if labels.all() else labels > 0
    names = ", ".join(f"{name} (id {i})" for i, name in left_out.items())
    note = f"category {names} is the supercategory of others and has no boxes: not a class"
    images = tables.images
    sizes = [
        np.fromiter((getattr(image, side) or 0 for image in images), np.int64, len(images))
        for side in ("width", "height")
    ]
    return one_image_per_file(
        Annotations(
            folder=files.images,
            origin=path,
            image_ids=image_ids,
            file_names=[image.file_name for image in images],
            sizes=np.stack(sizes, axis=1),
            classes=classes,
            ids=ids[listed],
            rows=rows[listed].astype(np.int32),
            labels=labels[listed].astype(np.int32),
            boxes=columns.bbox[listed],
            areas=columns.area[listed],
            is_crowd=columns.is_crowd[listed],
            findings=findings,
            notes=[note] if left_out else [],
        )
    )


def _unique_ids(
    ids: NDArray[np.int64], image_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[Finding]]:
    """Give annotations that repeat an id, as merging tools write them, ids that are free."""
    order = np.argsort(ids, kind="stable")  # np.unique takes many times as long
    repeated = np.sort(order[1:][ids[order[1:]] == ids[order[:-1]]])
    if not len(repeated):
        return ids, []
    taken = set(ids.tolist())
    free = (n for n in range(1, 2 * len(ids) + 1) if n not in taken)
    new = ids.copy()
    findings = []
    for row in repeated.tolist():
        new[row] = next(free)
        detail = f"id {ids[row]} occurs again, is now {new[row]}"
        findings.append(Finding(RENUMBERED, int(image_ids[row]), int(ids[row]), detail))
    return new, findings


def _positions(listed: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each wanted id in `listed`; -1 if it is not listed."""
    if not len(listed):
        return np.full(len(wanted), -1)
    order = np.argsort(listed, kind="stable")
    ranked = listed[order]
    rank = np.searchsorted(ranked, wanted).clip(max=len(listed) - 1)
    return np.where(ranked[rank] == wanted, order[rank], -1)


def _refuse_duplicates(path: Path, what: str, ids: NDArray[np.int64]) -> None:
    ranked = np.sort(ids)
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    refuse(path, f"duplicate {what}", np.unique(twice).tolist(), "each must occur once")
