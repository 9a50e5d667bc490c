"""Decode COCO annotation files, `decode_tables(open_content(path))`, in little memory.

The arrays of images and annotations of a large file are decoded in slices of some MB, which become
columns: 14.6 million annotations take 1 GB, as Python objects 5. A slice is right if `[slice]` is
valid JSON, which is only so if it ends between two elements. The rest of the document is decoded
with a placeholder for each array. What cannot be sliced, or is broken, is decoded as a whole.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.classes import Name
from ssdctl.files import open_regular, refuse_utf16

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAPPED_BYTES = 1 << 30  # larger files are mapped into memory instead of read
SLICE_BYTES = 8 << 20
SEARCH_BYTES = 4 * SLICE_BYTES  # in which the end of a slice is searched
MAX_SLICE_TRIES = 4  # ends of a slice that are tried
MAX_END_TRIES = 64  # ends of an array that are tried
WINDOW_BYTES = 64 << 20  # searched at a time in a mapped file
FIRST_KEY = re.compile(rb'\{\s*("[^"\\]*")')
ARRAY_END = re.compile(rb"\}\s*\]")
# What tells keys of the document from keys of its parts: braces, and strings as keys or as values.
STRUCTURE = re.compile(rb'[{}]|"(?:[^"\\]|\\.)*"(\s*:)?', re.DOTALL)

Content = bytes | mmap.mmap
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
    area: Any = None  # what is not a number counts as not given
    iscrowd: Int64 | bool | None = 0


class Category(msgspec.Struct, gc=False):
    id: Int64
    name: Name | int | float
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


class _File(msgspec.Struct):
    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: list[Category]


class _Rest(msgspec.Struct):
    """The document without its large arrays."""

    images: msgspec.Raw
    annotations: msgspec.Raw
    categories: msgspec.Raw


class _NotSlicedError(Exception):
    """Raised if a document must be decoded as a whole."""


class _Span(NamedTuple):
    """Where an array is in the document, brackets included."""

    start: int
    end: int


DECODERS: dict[str, Any] = {
    "images": msgspec.json.Decoder(list[ImageEntry], strict=False),
    "annotations": msgspec.json.Decoder(list[Annotation], strict=False),
    "categories": msgspec.json.Decoder(list[Category], strict=False),
}
# msgspec.ValidationError is a DecodeError: a field is absent or of the wrong type.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def open_content(path: Path) -> Content:
    """Return the bytes of a file; a large file is mapped, so it must not be truncated meanwhile."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size >= MAPPED_BYTES:
            with contextlib.suppress(OSError):  # a file system without memory maps
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def decode(content: Content, kind: type[T]) -> T:
    """Decode JSON, which may begin with a byte order mark and have integers as 5.0 or "5".

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: It is not JSON, or not of that type.
    """
    refuse_utf16(content[:2])
    start = len(BYTE_ORDER_MARK) if content[:3] == BYTE_ORDER_MARK else 0
    with without_gc():
        try:
            return msgspec.json.decode(memoryview(content)[start:], type=kind, strict=False)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None


def decode_tables(content: Content) -> Tables:
    if len(content) > SLICE_BYTES:
        with without_gc(), contextlib.suppress(_NotSlicedError, *NOT_JSON):
            return _decode_sliced(content)
    return decode_whole(content)


def decode_whole(content: Content) -> Tables:
    file = decode(content, _File)
    return Tables(file.images, to_columns(file.annotations), file.categories)


def _decode_sliced(content: Content) -> Tables:
    images: list[ImageEntry] = []
    parts: list[AnnotationColumns] = []

    def take_annotations(rows: list[Annotation]) -> None:
        parts.append(to_columns(rows))

    takers: dict[str, Callable[[list[Any]], None]]
    takers = {"images": images.extend, "annotations": take_annotations}
    spans: dict[str, _Span] = {}
    end = 0
    for name, take in takers.items():
        span = _decode_array(content, name, end, take) or _decode_array(content, name, 0, take)
        if span is not None:
            spans[name], end = span, span.end
    rest = _decode_rest(content, spans)
    for name, take in takers.items():
        raw = bytes(getattr(rest, name))
        if name not in spans:
            take(DECODERS[name].decode(raw))
        elif raw != _placeholder(name):
            raise _NotSlicedError
    categories: list[Category] = DECODERS["categories"].decode(bytes(rest.categories))
    columns = AnnotationColumns(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return Tables(images, columns, categories)


def _decode_array(
    content: Content, name: str, start: int, take: Callable[[list[Any]], None]
) -> _Span | None:
    """Decode an array of objects slice by slice; None if there is none after `start`."""
    key = b'"%s"' % name.encode()
    match = re.compile(key + rb"\s*:\s*(\[)\s*(?=\{)").search(content, start)
    if match is None:
        return None
    position = match.end()
    first_key = FIRST_KEY.match(content, position)
    if first_key is None:
        raise _NotSlicedError
    boundary = re.compile(rb"\}\s*,\s*(?=\{\s*%s)" % re.escape(first_key[1]))
    while True:
        limit = position + SEARCH_BYTES
        boundaries = boundary.finditer(content, position + SLICE_BYTES, limit)
        end = _decode_slice(content, name, position, boundaries, MAX_SLICE_TRIES, take)
        if end is None:
            ends = ARRAY_END.finditer(content, position, limit)
            end = _decode_slice(content, name, position, ends, MAX_END_TRIES, take)
            if end is None:
                raise _NotSlicedError
            return _Span(match.start(1), end)
        release(content, position, end)
        position = end


def _decode_slice(
    content: Content,
    name: str,
    start: int,
    ends: Iterable[re.Match[bytes]],
    max_tries: int,
    take: Callable[[list[Any]], None],
) -> int | None:
    """Decode the elements up to the first of `ends` that is one; return where it ends."""
    for match in itertools.islice(ends, max_tries):
        try:
            rows = DECODERS[name].decode(b"[%b]" % content[start : match.start() + 1])
        except msgspec.ValidationError:
            raise _NotSlicedError from None
        except NOT_JSON:
            continue  # it ends within an element, or within a later array
        take(rows)
        return match.end()
    return None


def _decode_rest(content: Content, spans: dict[str, _Span]) -> _Rest:
    """Decode the document with a placeholder for each array that was decoded already."""
    pieces = []
    position = 0
    for name, span in sorted(spans.items(), key=lambda item: item[1]):
        if span.start < position:
            raise _NotSlicedError  # one is inside of the other
        pieces += [content[position : span.start], _placeholder(name)]
        position = span.end
    pieces.append(content[position:])
    return decode(b"".join(pieces), _Rest)


def _placeholder(name: str) -> bytes:
    return b'"decoded %s"' % name.encode()


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


def to_columns(annotations: Sequence[Annotation]) -> AnnotationColumns:
    bbox = np.empty((len(annotations), 4))
    boxes = [entry.bbox or NO_BBOX for entry in annotations]
    for index, side in enumerate(Bbox.__struct_fields__):
        bbox[:, index] = column(boxes, side, np.float64)
    try:
        area = column(annotations, "area", np.float64)
    except (TypeError, ValueError, OverflowError):
        area = np.array([_number(entry.area) for entry in annotations])
    for values in (bbox, area):
        values[np.isinf(values)] = np.nan  # the text "inf"
    return AnnotationColumns(
        column(annotations, "id"),
        column(annotations, "image_id"),
        column(annotations, "category_id"),
        bbox,
        area,
        column(annotations, "iscrowd", np.bool_),
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


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
