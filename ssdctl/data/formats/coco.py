"""Read COCO annotation files as labelling tools write them.

    annotations = read(path)            # typed; DataError names the place of what is broken
    boxes, findings = check(annotations, path)          # see coco_check.py

Only the fields that training and scoring need are typed; every other field may hold anything.
Whole numbers written as floats, `iscrowd: false`, null areas and a byte order mark are accepted.
`category_id` is COCO's; `label` is dense: the category's rank in the file plus one, 0 = background.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import DataError
from ssdctl.files import refuse_utf16

MAX_NAMED = 5  # offenders named in a message
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ImageEntry(msgspec.Struct, gc=False):
    """An image of an annotation file; width and height in pixels, 0 = not given."""

    id: Int64
    file_name: str = ""
    width: Int64 | None = 0
    height: Int64 | None = 0


class Bbox(msgspec.Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A box in pixels. A struct, not a tuple: half the time and two thirds of the memory.

    Numbers that the file does not give are NaN, which JSON cannot contain.
    """

    left: float = np.nan
    top: float = np.nan
    width: float = np.nan
    height: float = np.nan


NO_BBOX = Bbox()


class Annotation(msgspec.Struct, gc=False):
    """An object of an image. `bbox` and `area` are None if the file does not give them."""

    id: Int64
    image_id: Int64
    category_id: Int64
    bbox: Bbox | None = None
    area: float | None = None
    iscrowd: Int64 | bool | None = 0


class Category(msgspec.Struct, gc=False):
    """A class of an annotation file."""

    id: Int64
    name: str
    supercategory: Any = None


class Annotations(NamedTuple):
    """What training and scoring need of an annotation file."""

    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: list[Category]
    supercategories: Sequence[Category] = ()  # listed as categories, but not classes: left out


class _File(msgspec.Struct):
    """The JSON document, decoded strictly: the fast path."""

    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: list[Category]


# The same fields with every number type that tools write: the fallback.
Number = int | float


class _LooseImage(msgspec.Struct):
    id: Number
    file_name: str = ""
    width: Number | None = 0
    height: Number | None = 0


class _LooseAnnotation(msgspec.Struct):
    id: Number
    image_id: Number
    category_id: Number
    bbox: Bbox | None = None
    area: Any = None
    iscrowd: Number | bool | None = 0


class _LooseCategory(msgspec.Struct):
    id: Number
    name: str | int | float
    supercategory: Any = None


class _LooseFile(msgspec.Struct):
    images: list[_LooseImage]
    annotations: list[_LooseAnnotation]
    categories: list[_LooseCategory]


class ClassName(msgspec.Struct, frozen=True):
    """A class: COCO's category id and its name. Its label is its place in the list plus one."""

    id: int | None  # None if a third-party checkpoint gives only the name
    name: str


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
        DataError: It cannot be read, is not JSON, or a field is absent or of the wrong type.
    """
    return parse(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return the content of an annotation file.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def parse(content: bytes, path: Path) -> Annotations:
    """Return the content of an annotation file, typed; see `read`."""
    try:
        file = decode(content, _File)
    except msgspec.ValidationError as error:
        try:
            file = _normalized(decode(content, _LooseFile))
        except _NotWholeError as fraction:
            raise _not_coco(path, fraction) from None
        except msgspec.ValidationError as loose_error:
            # The strict error names the expected type if both fail at the same place.
            is_same = _place(error) == _place(loose_error)
            raise _not_coco(path, error if is_same else loose_error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: broken JSON: {error}", hint="export or copy the file again"
        ) from None
    categories, supercategories = _without_supercategories(file)
    return Annotations(file.images, file.annotations, categories, supercategories)


def decode(content: bytes, kind: type[T]) -> T:
    """Decode JSON, which may begin with a byte order mark.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: It is not JSON, or not of that type.
    """
    refuse_utf16(content)
    start = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    with _without_gc():
        try:
            return msgspec.json.decode(memoryview(content)[start:], type=kind)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None


def _not_coco(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: not in COCO's format: {error}".replace("`", ""),
        hint="expected images (id, file_name, width, height), annotations (id, image_id, "
        "category_id, bbox) and categories (id, name)",
    )


def _place(error: Exception) -> str:
    """The JSON path at the end of a msgspec message."""
    return str(error).rpartition(" - at ")[2]


class _NotWholeError(ValueError):
    """Raised for a fraction where a whole number belongs."""


def _normalized(file: _LooseFile) -> _File:
    images = [
        ImageEntry(
            _whole(image.id, "images", i, "id"),
            image.file_name,
            _whole(image.width or 0, "images", i, "width"),
            _whole(image.height or 0, "images", i, "height"),
        )
        for i, image in enumerate(file.images)
    ]
    annotations = [
        Annotation(
            _whole(entry.id, "annotations", i, "id"),
            _whole(entry.image_id, "annotations", i, "image_id"),
            _whole(entry.category_id, "annotations", i, "category_id"),
            entry.bbox,
            float(entry.area) if isinstance(entry.area, int | float) else None,
            _whole(entry.iscrowd or 0, "annotations", i, "iscrowd"),
        )
        for i, entry in enumerate(file.annotations)
    ]
    categories = [
        Category(_whole(c.id, "categories", i, "id"), str(c.name), c.supercategory)
        for i, c in enumerate(file.categories)
    ]
    return _File(images, annotations, categories)


def _whole(value: float, table: str, index: int, key: str) -> int:
    """A whole number of 64 bits, whatever JSON type it has."""
    number = int(value) if abs(value) < 2**63 else None
    if number is None or number != value:
        raise _NotWholeError(f"Expected int, got {value} - at $.{table}[{index}].{key}")
    return number


def _without_supercategories(file: _File) -> tuple[list[Category], list[Category]]:
    """The classes, and the entries that only name other entries' supercategory (Roboflow's 0)."""
    parents = {c.supercategory for c in file.categories if isinstance(c.supercategory, str)}
    candidates = [
        c
        for c in file.categories
        if c.name in parents and c.supercategory in (None, "", "none") and len(file.categories) > 1
    ]
    if not candidates:
        return file.categories, []
    used = {a.category_id for a in file.annotations}
    unused = [c for c in candidates if c.id not in used]
    return [c for c in file.categories if c not in unused], unused


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection: searching millions of live objects takes longer than decoding."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def class_names(annotations: Annotations) -> list[ClassName]:
    """Return the classes in the order of the file."""
    return [ClassName(c.id, c.name) for c in annotations.categories]


def box_columns(annotations: Annotations) -> BoxColumns:
    """Return the annotated boxes as arrays; annotations without a bbox are left out."""
    entries = annotations.annotations
    bbox = bboxes(entries)
    area = np.array([np.nan if a.area is None else a.area for a in entries], np.float64)
    area = np.where(np.isnan(area), bbox[:, 2] * bbox[:, 3], area)
    has_bbox = ~np.isnan(bbox).any(axis=1)
    return BoxColumns(
        column(entries, "image_id")[has_bbox],
        column(entries, "category_id")[has_bbox],
        bbox[has_bbox],
        area[has_bbox],
        crowd_flags(entries)[has_bbox],
    )


def bboxes(entries: Sequence[Annotation]) -> NDArray[np.float64]:
    """Return the boxes of annotations, M x 4: left, top, width, height; NaN if not given."""
    result = np.empty((len(entries), 4))
    boxes = [entry.bbox or NO_BBOX for entry in entries]
    for index, side in enumerate(Bbox.__struct_fields__):
        result[:, index] = column(boxes, side, np.float64)
    return result


def crowd_flags(entries: Sequence[Annotation]) -> NDArray[np.bool_]:
    """Return which annotations are crowds."""
    return column(entries, "iscrowd", np.bool_)


def link(annotations: Annotations, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each annotation's image, and its label.

    Raises:
        DataError: Duplicate ids, ids that refer to nothing.
    """
    entries = annotations.annotations
    image_ids, category_ids = column(annotations.images, "id"), column(annotations.categories, "id")
    _refuse_duplicates(path, "image ids", image_ids)
    _refuse_duplicates(path, "annotation ids", column(entries, "id"))
    _refuse_duplicates(path, "category ids", category_ids)
    row = _positions(image_ids, column(entries, "image_id"))
    _refuse_unlisted(path, "image", [entries[i] for i in np.nonzero(row < 0)[0]])
    label = 1 + _positions(category_ids, column(entries, "category_id"))
    _refuse_unlisted(path, "category", [entries[i] for i in np.nonzero(label < 1)[0]])
    return row, label


def column(structs: Sequence[Any], name: str, kind: Any = np.int64) -> NDArray[Any]:
    """Return one field of many structs as an array, without a Python step for each."""
    return np.fromiter(map(attrgetter(name), structs), kind, len(structs))


def _positions(listed: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each wanted id in `listed`; -1 if it is not listed."""
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


def _refuse_unlisted(path: Path, kind: str, entries: Sequence[Annotation]) -> None:
    """Refuse annotations of images or categories that the file does not list."""
    plural = {"image": "images", "category": "categories"}[kind]
    named = [f"{a.id} ({kind} {getattr(a, f'{kind}_id')})" for a in entries]
    hint = f"each {kind}_id must be the id of an entry in {plural}"
    refuse(path, f"annotations of {plural} that the file does not list", named, hint)


def refuse(path: Path, what: str, offenders: Sequence[object], hint: str | None = None) -> None:
    """Raise a DataError that names the first few offenders, if there are any."""
    if offenders:
        named = ", ".join(map(str, offenders[:MAX_NAMED]))
        more = f" and {len(offenders) - MAX_NAMED} more" if len(offenders) > MAX_NAMED else ""
        raise DataError(f"{path}: {what}: {named}{more}", hint=hint)
