"""Read large COCO annotation files in little memory.

    tables = decode_tables(open_content(path))

The arrays of images and annotations are decoded in slices of some MB, and each slice of annotations
becomes rows of numpy columns: 14.6 million annotations take 1 GB, as Python objects they would take
5. A slice is correct if `[` + slice + `]` is valid JSON, which is only possible if it ends between
two elements. The rest of the document is decoded with a placeholder for each array, which must then
be the value of that table. A document that cannot be sliced this way, such as a broken one, is
decoded as a whole, which also finds the place of every error.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ssdctl.data.formats._coco_json import (
    Annotation,
    AnnotationColumns,
    Category,
    Content,
    ImageEntry,
    LooseAnnotation,
    LooseCategory,
    LooseImage,
    NotWholeError,
    Tables,
    decode,
    decode_whole,
    release,
    to_columns,
    whole_annotations,
    whole_categories,
    whole_images,
    without_gc,
)
from ssdctl.files import open_regular

MAPPED_BYTES = 1 << 30  # larger files are mapped into memory instead of read
SLICE_BYTES = 8 << 20
SEARCH_BYTES = 4 * SLICE_BYTES  # in which the end of a slice is searched
MAX_SLICE_TRIES = 4  # ends of a slice that are tried
MAX_END_TRIES = 64  # ends of an array that are tried
FIRST_KEY = re.compile(rb'\{\s*("[^"\\]*")')
ARRAY_END = re.compile(rb"\}\s*\]")


class _NotSlicedError(Exception):
    """Raised if a document must be decoded as a whole."""


class _Table(NamedTuple):
    """How the elements of an array are decoded."""

    strict: Any  # decoders of a list
    loose: Any
    normalize: Callable[[Any], list[Any]]


class _Span(NamedTuple):
    """Where an array is in the document, brackets included."""

    start: int
    end: int


class _Rest(msgspec.Struct):
    """The document without its large arrays."""

    images: msgspec.Raw
    annotations: msgspec.Raw
    categories: msgspec.Raw


TABLES = {  # type checkers do not know list[] of a type that is a variable
    name: _Table(
        msgspec.json.Decoder(list[strict]),  # type: ignore[valid-type]
        msgspec.json.Decoder(list[loose]),  # type: ignore[valid-type]
        normalize,
    )
    for name, strict, loose, normalize in (
        ("images", ImageEntry, LooseImage, whole_images),
        ("annotations", Annotation, LooseAnnotation, whole_annotations),
        ("categories", Category, LooseCategory, whole_categories),
    )
}


def open_content(path: Path) -> Content:
    """Return the bytes of a file; a large file is mapped, so it must not be truncated meanwhile.

    Raises:
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size >= MAPPED_BYTES:
            with contextlib.suppress(OSError):  # a file system without memory maps
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def decode_tables(content: Content) -> Tables:
    """Decode an annotation file; see `decode_whole`."""
    if len(content) > SLICE_BYTES:
        errors = (_NotSlicedError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
        with without_gc(), contextlib.suppress(*errors):
            return _decode_sliced(content)
    return decode_whole(content)


def _decode_sliced(content: Content) -> Tables:
    """Decode the arrays of images and annotations slice by slice.

    Raises:
        _NotSlicedError, msgspec.DecodeError, UnicodeDecodeError, RecursionError: Only the whole
            document can be decoded, or shows the error.
    """
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
            take(_decode_elements(name, raw))
        elif raw != _placeholder(name):
            raise _NotSlicedError
    categories: list[Category] = _decode_elements("categories", bytes(rest.categories))
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
            rows = _decode_elements(name, b"[%b]" % content[start : match.start() + 1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # it ends within an element, or within a later array
        take(rows)
        return match.end()
    return None


def _decode_elements(name: str, text: bytes) -> list[Any]:
    """Decode an array of one of the tables.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: It is not JSON.
        _NotSlicedError: A field is absent or of the wrong type.
    """
    table = TABLES[name]
    try:
        rows: list[Any] = table.strict.decode(text)
    except msgspec.ValidationError:
        try:
            return table.normalize(table.loose.decode(text))
        except (msgspec.ValidationError, NotWholeError):
            raise _NotSlicedError from None
    return rows


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
