"""Decode COCO annotation files, `decode_tables(read_content(path))`, in little memory.

Large files are decoded in slices of some MB, which become columns: 14.6 million annotations take
1 GB, as Python objects 5. A slice is right if `[slice]` is valid JSON, which is only so if it ends
between two elements.
"""

from __future__ import annotations

import codecs
import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations, Name
from ssdctl.files import DECODE_ERRORS, msgspec_type, open_regular, read_errors, refuse_utf16

# The 80 classes of COCO 2017 in the order of its files: ids 1 to 90 with gaps.
_COCO_NAMES = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire "
    "hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, "
    "bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, "
    "snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, "
    "tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, "
    "sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted "
    "plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, "
    "microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, "
    "hair drier, toothbrush"
)
_COCO_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
_COCO_IDS = (number for number in range(1, 91) if number not in _COCO_GAPS)
COCO_CLASSES = tuple(zip(_COCO_IDS, _COCO_NAMES.split(", "), strict=True))
UNUSED = "(unused)"  # the name of an output for an id that COCO left out
COCO_NUM_CLASSES = len(COCO_CLASSES)
COCO_NUM_IMAGES = 117_266  # training images of COCO 2017 with boxes
IMAGE_FIELDS = ("id", "file_name", "width", "height")
OBJECT_FIELDS = ("image_id", "category_id", "bbox", "area", "iscrowd", "score")
MAPPED_BYTES = 1 << 30  # larger files are mapped into memory instead of read
SLICE_BYTES = 8 << 20
MAX_SLICE_TRIES = 4  # ends of a slice that are tried
FIRST_KEY = re.compile(rb'\[\s*\{\s*("[^"\\]*")')
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


class _Url(msgspec.Struct, gc=False):
    coco_url: FileName = ""


class _Named(msgspec.Struct):
    images: list[_Url]


class Bbox(msgspec.Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A box in pixels. A struct, not a tuple: half the time and two thirds of the memory.

    Numbers that the file does not give are NaN, which JSON cannot contain.
    """

    left: float = np.nan
    top: float = np.nan
    width: float = np.nan
    height: float = np.nan


NO_BBOX = Bbox()
NO_SEGMENTATION = msgspec.Raw()


class Annotation(msgspec.Struct, gc=False):
    """An object of an image. `bbox` and `area` are None if the file does not give them."""

    id: Int64
    image_id: Int64
    category_id: Int64
    bbox: Bbox | None = None
    area: Any = None  # what is not a number counts as not given
    iscrowd: Int64 | bool | None = 0
    attributes: Any = None  # of CVAT and datumaro
    segmentation: msgspec.Raw = NO_SEGMENTATION


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
    degrees: NDArray[np.float64]  # M, by which CVAT's boxes are turned


class Tables(msgspec.Struct, Generic[T]):
    """What training and scoring need of an annotation file."""

    images: list[ImageEntry]
    annotations: T
    categories: list[Category]


def read_content(path: Path) -> Content:
    """Return the bytes of a file; a large file is mapped, so it must not be truncated meanwhile."""
    with read_errors(path), open_regular(path) as file:
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
    start = len(codecs.BOM_UTF8) if content[:3] == codecs.BOM_UTF8 else 0
    try:
        return msgspec.json.decode(
            memoryview(content)[start:], type=msgspec_type(kind), strict=False
        )
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def decode_tables(content: Content) -> Tables[AnnotationColumns]:
    """Decode an annotation file; the exceptions are those of `decode`."""
    file = decode(content, Tables[msgspec.Raw])
    release(content)
    slices = []
    try:
        for annotations in _annotation_slices(memoryview(file.annotations)):
            slices.append(to_columns(annotations))
            release(content)
    except DECODE_ERRORS:
        decode(content, Tables[list[Annotation]])  # names the position in the file
        raise
    if not all(map(attrgetter("file_name"), file.images)):  # LVIS has URLs only
        for image, named in zip(file.images, decode(content, _Named).images, strict=True):
            image.file_name = image.file_name or "/".join(named.coco_url.split("/")[-2:])
    columns = AnnotationColumns(*(np.concatenate(column) for column in zip(*slices, strict=True)))
    return Tables(file.images, columns, file.categories)


def _annotation_slices(array: memoryview) -> Iterator[list[Annotation]]:
    """Decode an array slice by slice; the last slice is all that cannot be divided."""
    decoder = msgspec.json.Decoder(msgspec_type(list[Annotation]), strict=False)
    first_key = FIRST_KEY.match(array)
    if first_key is None:
        yield decoder.decode(array)
        return
    boundary = re.compile(rb"\}\s*(,)\s*\{\s*%s" % re.escape(first_key[1]))
    start, search, tries = 1, SLICE_BYTES, 0
    while tries < MAX_SLICE_TRIES and (match := boundary.search(array, search)):
        try:
            rows = decoder.decode(b"[" + array[start : match.start(1)] + b"]")
        except msgspec.ValidationError:
            raise
        except DECODE_ERRORS:  # it ends within an element
            tries, search = tries + 1, match.end()
        else:
            yield rows
            start, search, tries = match.end(1), match.end(1) + SLICE_BYTES, 0
    yield decoder.decode(b"[" + array[start:])


def repeated_table(content: Content) -> tuple[str, list[int]] | None:
    """Return a table that a valid document has more than once, and its lines; None if none.

    Decoding takes the last of equal keys and drops the others without a word.
    """
    starts = {b'"%s"' % name.encode(): list[int]() for name in Tables.__struct_fields__}
    occurs_once = [content.find(key, content.find(key) + 1) < 0 for key in starts]
    release(content)
    if all(occurs_once):
        return None  # the usual file: the tables have no such keys
    depth = 0
    for token in STRUCTURE.finditer(content):
        key = token[0][: -len(token[1])] if token[1] else b""
        if depth == 1 and key in starts:
            starts[key].append(token.start())
        depth += {b"{": 1, b"}": -1}.get(token[0], 0)
    for key, found in starts.items():
        if len(found) > 1:
            return key.decode().strip('"'), [content[:n].count(b"\n") + 1 for n in found]
    return None


def release(content: Content) -> None:
    """Unmap the pages of a mapped file: if they are read again, they come from the page cache."""
    if isinstance(content, mmap.mmap):
        content.madvise(mmap.MADV_DONTNEED)


def to_columns(annotations: Sequence[Annotation]) -> AnnotationColumns:
    boxes = [entry.bbox or NO_BBOX for entry in annotations]
    bbox = np.stack([column(boxes, side, np.float64) for side in Bbox.__struct_fields__], axis=1)
    try:
        area = column(annotations, "area", np.float64)
    except (TypeError, ValueError, OverflowError):
        area = np.array([_number(entry.area) for entry in annotations])
    for values in (bbox, area):
        values[np.isinf(values)] = np.nan  # the text "inf"
    ids, image_ids, category_ids = (
        column(annotations, name) for name in ("id", "image_id", "category_id")
    )
    is_crowd = column(annotations, "iscrowd", np.bool_)
    degrees = np.zeros(len(annotations))
    if any(map(attrgetter("attributes"), annotations)):
        degrees += [0 if _is_polygon(entry) else _degrees(entry) for entry in annotations]
    return AnnotationColumns(ids, image_ids, category_ids, bbox, area, is_crowd, degrees)


def _is_polygon(entry: Annotation) -> bool:
    return bytes(entry.segmentation).strip() not in (b"", b"[]", b"null")


def _degrees(entry: Annotation) -> float:
    """Return the rotation that CVAT writes; it writes `occluded`, too, other programs do not."""
    attributes = entry.attributes
    if not isinstance(attributes, dict) or "occluded" not in attributes:
        return 0
    rotation = attributes.get("rotation")
    return rotation if isinstance(rotation, int | float) else 0


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def column(structs: Sequence[Any], name: str, kind: Any = np.int64) -> NDArray[Any]:
    """Return one field of many structs as an array, without a Python step for each."""
    return np.fromiter(map(attrgetter(name), structs), kind, len(structs))


def coco_document(
    images: Iterable[Sequence[Any]],
    categories: Iterable[tuple[int | None, str]],
    objects: Iterable[Sequence[Any]],
    info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an annotation file in COCO's format; annotation ids count from 1.

    `images` have the values of IMAGE_FIELDS, `categories` id and name, and `objects` the values of
    OBJECT_FIELDS, those of a dataset without score.
    """
    return {
        **({"info": info} if info else {}),
        "images": [dict(zip(IMAGE_FIELDS, values, strict=True)) for values in images],
        "annotations": [  # labeling tools require a segmentation, even an empty one
            {"id": number, **dict(zip(OBJECT_FIELDS, values, strict=False)), "segmentation": []}
            for number, values in enumerate(objects, 1)
        ],
        "categories": [{"id": i, "name": name, "supercategory": ""} for i, name in categories],
    }


def document_of(annotations: Annotations, info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return annotations as a document; an area that is not known is the box's."""
    boxes, areas = annotations.boxes, annotations.areas
    objects = zip(
        annotations.object_image_ids.tolist(),
        annotations.object_category_ids.tolist(),
        boxes.tolist(),
        np.where(np.isnan(areas), boxes[:, 2] * boxes[:, 3], areas).tolist(),
        annotations.is_crowd.astype(int).tolist(),
        strict=True,
    )
    images = zip(
        annotations.image_ids.tolist(),
        annotations.file_names,
        *annotations.sizes.T.tolist(),
        strict=True,
    )
    return coco_document(images, [(c.id, c.name) for c in annotations.classes], objects, info)
