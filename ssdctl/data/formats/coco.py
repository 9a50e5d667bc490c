"""Read and check COCO annotations.

    annotations = read(path)            # typed; DataError names the place of what is broken
    boxes, findings = check(annotations, path)

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
from ssdctl.files import is_plain_name

SHOWN = 5  # offenders named in a message
LONGEST_SIDE = 65535  # what a JPEG can have

T = TypeVar("T")
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ImageEntry(msgspec.Struct, gc=False):
    id: Int64
    file_name: str
    width: Int64
    height: Int64


class Bbox(msgspec.Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A box in pixels. A struct, not a tuple: half the time and two thirds of the memory."""

    left: float
    top: float
    width: float
    height: float


class Annotation(msgspec.Struct, gc=False):
    id: Int64
    image_id: Int64
    category_id: Int64
    bbox: Bbox
    iscrowd: Int64 = 0
    area: float | None = None  # of the mask; None: the file does not give it


class Category(msgspec.Struct, gc=False):
    id: Int64
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
    return parse(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """The content of an annotation file.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def parse(content: bytes, path: Path) -> Annotations:
    """The content of an annotation file, typed; see `read`."""
    return _decoded(content, path, Annotations)


def _decoded(content: bytes, path: Path, kind: type[T]) -> T:
    try:
        with _without_gc():
            return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise DataError(
            f"{path}: not in COCO's format: {error}".replace("`", ""),
            hint="expected images (id, file_name, width, height), annotations (id, image_id, "
            "category_id, bbox) and categories (id, name)",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: broken JSON: {error}", hint="export or copy it again, whole"
        ) from None


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Millions of objects that all stay: looking for garbage among them takes longer than they."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    row, label = linked_rows(annotations, path)
    if not annotations.categories:
        raise DataError(f"{path}: no categories")
    sizes = _sizes(path, annotations.images)
    entries = annotations.annotations
    sides = (column(entries, f"bbox.{s}", np.float64) for s in Bbox.__struct_fields__)
    bbox = np.stack(list(sides), axis=1)
    ltrb, kind = _mended(bbox, sizes[row])
    findings = [_finding(annotations, int(i), int(row[i]), kind[i]) for i in np.nonzero(kind)[0]]
    kept = np.nonzero(kind <= CLIPPED)[0]
    kept = kept[np.argsort(row[kept], kind="stable")]  # image by image, in the file's order
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(np.bincount(row[kept], minlength=len(sizes)), out=starts[1:])
    is_crowd = column(entries, "iscrowd") != 0
    return Boxes(starts, ltrb[kept], label[kept].astype(np.int32), is_crowd[kept]), findings


def linked_rows(read: Annotations, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each annotation's image, and its label.

    Raises:
        DataError: Ids that are not unique, or that refer to entries that the file does not list.
    """
    image_ids, category_ids = column(read.images, "id"), column(read.categories, "id")
    entries = read.annotations
    _refuse_duplicates(path, "image ids", image_ids)
    _refuse_duplicates(path, "annotation ids", column(entries, "id"))
    _refuse_duplicates(path, "category ids", category_ids)
    row = _places(image_ids, column(entries, "image_id"))
    _refuse_strangers(path, "image", [entries[i] for i in np.nonzero(row < 0)[0]])
    label = 1 + _places(category_ids, column(entries, "category_id"))
    _refuse_strangers(path, "category", [entries[i] for i in np.nonzero(label < 1)[0]])
    return row, label


SPECK_PX = 1.5  # a fraction is 1 at most
NEARLY_ALL = 0.95
FEW_CLIPPED, MANY_CLIPPED = 5, 0.1  # fewer overshoots, as a number and a share, tell nothing


def format_warnings(
    annotations: Annotations, boxes: Boxes, findings: Sequence[Finding]
) -> list[str]:
    """What makes boxes look written otherwise than as left, top, width, height in pixels.

    Args:
        annotations: A split's.
        boxes: What `check` made of them.
        findings: Those of `check`.

    Returns:
        At most one sentence with its remedy. Nobody is refused for it: such boxes may be meant.
    """
    low, high = boxes.ltrb[:, :2], boxes.ltrb[:, 2:]
    number = len(boxes.ltrb)
    specks = int(((low <= 1) & (high - low < SPECK_PX)).all(axis=1).sum())
    if specks and specks >= NEARLY_ALL * number:
        return [
            f"{specks:,} of {number:,} boxes are smaller than {SPECK_PX} pixels and lie in the "
            "image's top left corner: they look like fractions of the image (0 to 1). Write bbox "
            "as left, top, width, height in pixels: multiply by the image's width and height"
        ]
    clipped = sum(f.kind == KINDS[CLIPPED] for f in findings)
    if clipped < max(FEW_CLIPPED, MANY_CLIPPED * number):
        return []
    bbox = np.array([msgspec.structs.astuple(a.bbox) for a in annotations.annotations])
    image = {i.id: (i.width, i.height) for i in annotations.images}
    size = np.array([image[a.image_id] for a in annotations.annotations])
    fit = (bbox[:, 2:] > bbox[:, :2]) & (bbox[:, 2:] <= size + 1)
    if fit.all(axis=1).mean() < NEARLY_ALL:
        return []
    return [
        f"{clipped:,} of {number:,} boxes leave their image, and would not if bbox were left, top, "
        "right, bottom. Write it as left, top, width, height: width = right - left, "
        "height = bottom - top"
    ]


FINE, CLIPPED, NO_SIZE, OUTSIDE = range(4)
KINDS = (
    "",
    "box clipped to its image",
    "box of no size, dropped",
    "box outside its image, dropped",
)


def _mended(
    bbox: NDArray[np.float64], size: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Boxes (M x 4: left, top, width, height) as ltrb inside their images (M x 2), and what had
    to be done to each: nothing, clipped, or dropped for a reason."""
    with np.errstate(all="ignore"):  # overflows are judged here by their results
        low, extent = bbox[:, :2], bbox[:, 2:]
        high = low + extent
        empty = ((extent <= 0) | (high == low)).any(axis=1)
        inside = np.maximum(low, 0), np.minimum(high, size)
        outside = (inside[1] <= inside[0]).any(axis=1)
        # COCO's own boxes overshoot by rounding: a hundredth of a pixel is no finding.
        overshoot = np.maximum(inside[0] - low, high - inside[1]).max(axis=1, initial=0)
        ltrb = np.concatenate(inside, axis=1).astype(np.float32)
        tiny = (ltrb[:, 2:] <= ltrb[:, :2]).any(axis=1)
    kind = np.where(overshoot > 0.01, CLIPPED, FINE).astype(np.uint8)
    kind[tiny] = NO_SIZE
    kind[outside] = OUTSIDE
    kind[empty] = NO_SIZE
    return ltrb, kind


def _finding(annotations: Annotations, index: int, row: int, kind: int) -> Finding:
    entry, image = annotations.annotations[index], annotations.images[row]
    bbox = list(msgspec.structs.astuple(entry.bbox))
    detail = f"bbox {bbox} in {image.width} x {image.height}"
    return Finding(KINDS[kind], entry.image_id, entry.id, detail)


def _sizes(path: Path, images: list[ImageEntry]) -> NDArray[np.int64]:
    """Widths and heights, N x 2, once names and sizes are found fit."""
    for image in images:
        if not is_plain_name(image.file_name):
            raise DataError(
                f"{path}: image {image.id}: {image.file_name!r} is no plain path below its folder",
                hint="file_name is relative to the split's image folder, as in 'a.jpg'",
            )
    sizes = np.stack([column(images, "width"), column(images, "height")], axis=1)
    for row in np.nonzero(((sizes < 1) | (sizes > LONGEST_SIDE)).any(axis=1))[0]:
        image = images[row]
        raise DataError(f"{path}: image {image.id}: size {image.width} x {image.height}")
    return sizes


def column(structs: Sequence[Any], name: str, kind: Any = np.int64) -> NDArray[Any]:
    """One field of many structs, without a step of the interpreter for each."""
    return np.fromiter(map(attrgetter(name), structs), kind, len(structs))


def _places(known: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each wanted id stands among the known ones; -1 where it does not."""
    if not len(known):
        return np.full(len(wanted), -1)
    order = np.argsort(known, kind="stable")
    ranked = known[order]
    rank = np.searchsorted(ranked, wanted).clip(max=len(known) - 1)
    return np.where(ranked[rank] == wanted, order[rank], -1)


def _refuse_duplicates(path: Path, what: str, ids: NDArray[np.int64]) -> None:
    ranked = np.sort(ids)  # np.unique takes many times as long
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    refuse(path, f"duplicate {what}", np.unique(twice).tolist(), "each must be there once")


def _refuse_strangers(path: Path, kind: str, found: Sequence[Annotation]) -> None:
    """Refuse annotations of images or categories that the file does not list."""
    many = {"image": "images", "category": "categories"}[kind]
    named = [f"{a.id} ({kind} {getattr(a, f'{kind}_id')})" for a in found]
    hint = f"each {kind}_id must be the id of an entry in {many}"
    refuse(path, f"annotations of {many} that the file does not list", named, hint)


def refuse(path: Path, what: str, offenders: Sequence[object], hint: str | None = None) -> None:
    """Raise a DataError that names the first few offenders, if there are any."""
    if offenders:
        named = ", ".join(map(str, offenders[:SHOWN]))
        more = f" and {len(offenders) - SHOWN} more" if len(offenders) > SHOWN else ""
        raise DataError(f"{path}: {what}: {named}{more}", hint=hint)
