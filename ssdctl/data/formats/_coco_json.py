"""Decode the JSON of COCO annotation files into images, columns of annotations, and categories.

    tables = decode_whole(content)          # see _coco_slices.py for large files

Only the fields that training and scoring need are typed; every other field may hold anything. A
document is decoded strictly first, and again with every number type that tools write if that fails.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.classes import Name
from ssdctl.files import refuse_utf16

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# What tells keys of the document from keys of its parts: braces, and strings as keys or as values.
STRUCTURE = re.compile(rb'[{}]|"(?:[^"\\]|\\.)*"(\s*:)?', re.DOTALL)

Content = bytes | mmap.mmap
WINDOW_BYTES = 64 << 20  # of a mapped file that is searched
T = TypeVar("T")
FileName = Annotated[str, msgspec.Meta(max_length=4096)]  # the longest path on Linux
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ImageEntry(msgspec.Struct, gc=False):
    """An image of an annotation file; width and height in pixels, 0 = not given."""

    id: Int64
    file_name: FileName = ""
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
    name: Name
    supercategory: Any = None


class AnnotationColumns(NamedTuple):
    """The M annotations of a file as arrays, in its order."""

    id: NDArray[np.int64]  # M
    image_id: NDArray[np.int64]  # M
    category_id: NDArray[np.int64]  # M
    bbox: NDArray[np.float64]  # M x 4: left, top, width, height in pixels; NaN if not given
    area: NDArray[np.float64]  # M, square pixels; NaN if not given
    is_crowd: NDArray[np.bool_]  # M


class Tables(NamedTuple):
    """What training and scoring need of an annotation file."""

    images: list[ImageEntry]
    annotations: AnnotationColumns
    categories: list[Category]


class NotWholeError(ValueError):
    """Raised for a fraction where a whole number belongs."""


class _File(msgspec.Struct):
    """The JSON document, decoded strictly: the fast path."""

    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: list[Category]


# The same fields with every number type that tools write: the fallback.
Number = int | float


class LooseImage(msgspec.Struct):
    id: Number
    file_name: FileName = ""
    width: Number | None = 0
    height: Number | None = 0


class LooseAnnotation(msgspec.Struct):
    id: Number
    image_id: Number
    category_id: Number
    bbox: Bbox | None = None
    area: Any = None
    iscrowd: Number | bool | None = 0


class LooseCategory(msgspec.Struct):
    id: Number
    name: Name | int | float
    supercategory: Any = None


class _LooseFile(msgspec.Struct):
    images: list[LooseImage]
    annotations: list[LooseAnnotation]
    categories: list[LooseCategory]


def decode(content: Content, kind: type[T]) -> T:
    """Decode JSON, which may begin with a byte order mark.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: It is not JSON, or not of that type.
    """
    refuse_utf16(content[:2])
    start = len(BYTE_ORDER_MARK) if content[:3] == BYTE_ORDER_MARK else 0
    with without_gc():
        try:
            return msgspec.json.decode(memoryview(content)[start:], type=kind)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None


def repeated_table(content: Content) -> tuple[str, list[int]] | None:
    """Return a table that a valid document has more than once, and its lines; None if none.

    Decoding takes the last of equal keys and drops the others without a word.
    """
    keys = [b'"%s"' % name.encode() for name in Tables._fields]
    if all(_occurs_once(content, key) for key in keys):
        return None  # the usual file: the parts have no such keys
    places: dict[bytes, list[int]] = {key: [] for key in keys}
    depth = 0
    for token in STRUCTURE.finditer(content):
        if token[1]:
            key = token[0][: -len(token[1])]
            if depth == 1 and key in places:
                places[key].append(token.start())
        else:
            depth += {b"{": 1, b"}": -1}.get(token[0], 0)
    for key, starts in places.items():
        if len(starts) > 1:
            return key.decode().strip('"'), [content[:n].count(b"\n") + 1 for n in starts]
    return None


def _occurs_once(content: Content, key: bytes) -> bool:
    """Return whether a file has a key at most once, with few pages in memory at a time."""
    count = 0
    for start in range(0, len(content), WINDOW_BYTES):
        end = min(start + WINDOW_BYTES, len(content))
        place = content.find(key, start, end + len(key) - 1)
        while place >= 0:
            count += 1
            place = content.find(key, place + 1, end + len(key) - 1)
        release(content, start, end)
        if count > 1:
            return False
    return True


def release(content: Content, start: int, end: int) -> None:
    """Unmap the pages of a mapped file: if they are read again, they come from the page cache."""
    if isinstance(content, mmap.mmap):
        first = start - start % mmap.PAGESIZE
        content.madvise(mmap.MADV_DONTNEED, first, end - first)


def decode_whole(content: Content) -> Tables:
    """Decode an annotation file at once.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: It is not JSON.
        msgspec.ValidationError: A field is absent or of the wrong type.
        NotWholeError: A fraction where a whole number belongs.
    """
    try:
        file = decode(content, _File)
    except msgspec.ValidationError as error:
        try:
            loose = decode(content, _LooseFile)
        except msgspec.ValidationError as loose_error:
            # The strict error says what was expected if both fail at the same place.
            is_same = _place(error) == _place(loose_error)
            raise (error if is_same else loose_error) from None
        file = _File(
            whole_images(loose.images),
            whole_annotations(loose.annotations),
            whole_categories(loose.categories),
        )
    return Tables(file.images, to_columns(file.annotations), file.categories)


def _place(error: Exception) -> str:
    """Return the JSON path at the end of a msgspec message."""
    return str(error).rpartition(" - at ")[2]


def whole_images(images: Sequence[LooseImage]) -> list[ImageEntry]:
    return [
        ImageEntry(
            _whole(image.id, "images", i, "id"),
            image.file_name,
            _whole(image.width or 0, "images", i, "width"),
            _whole(image.height or 0, "images", i, "height"),
        )
        for i, image in enumerate(images)
    ]


def whole_annotations(annotations: Sequence[LooseAnnotation]) -> list[Annotation]:
    return [
        Annotation(
            _whole(entry.id, "annotations", i, "id"),
            _whole(entry.image_id, "annotations", i, "image_id"),
            _whole(entry.category_id, "annotations", i, "category_id"),
            entry.bbox,
            _area(entry.area),
            _whole(entry.iscrowd or 0, "annotations", i, "iscrowd"),
        )
        for i, entry in enumerate(annotations)
    ]


def _area(value: object) -> float | None:
    """Return an area, None if it is not a number that a float can hold."""
    if isinstance(value, int | float) and abs(value) < 2**1000:
        return float(value)
    return None


def whole_categories(categories: Sequence[LooseCategory]) -> list[Category]:
    return [
        Category(_whole(c.id, "categories", i, "id"), str(c.name), c.supercategory)
        for i, c in enumerate(categories)
    ]


def _whole(value: float, table: str, index: int, key: str) -> int:
    """Return a whole number of 64 bits, of any JSON type."""
    number = int(value) if abs(value) < 2**63 else None
    if number is None or number != value:
        raise NotWholeError(f"Expected int, got {value} - at $.{table}[{index}].{key}")
    return number


def to_columns(annotations: Sequence[Annotation]) -> AnnotationColumns:
    """Return annotations as arrays."""
    bbox = np.empty((len(annotations), 4))
    boxes = [entry.bbox or NO_BBOX for entry in annotations]
    for index, side in enumerate(Bbox.__struct_fields__):
        bbox[:, index] = column(boxes, side, np.float64)
    return AnnotationColumns(
        column(annotations, "id"),
        column(annotations, "image_id"),
        column(annotations, "category_id"),
        bbox,
        np.array([np.nan if a.area is None else a.area for a in annotations], np.float64),
        column(annotations, "iscrowd", np.bool_),
    )


def column(structs: Sequence[Any], name: str, kind: Any = np.int64) -> NDArray[Any]:
    """Return one field of many structs as an array, without a Python step for each."""
    return np.fromiter(map(attrgetter(name), structs), kind, len(structs))


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection: searching millions of live objects takes longer than decoding."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
