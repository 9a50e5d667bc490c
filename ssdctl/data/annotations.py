"""The annotations of a dataset: what a format reads, `prepare` checks, and the index keeps.

    splits = from_images({"train": [LabeledImage("a.jpg", 640, 480, [LabeledBox(...)])]}, ["cat"],
                         folder=root, origin=root / "labels.csv")
    splits["train"].boxes, splits["train"].labels

`category_id` is the file's. `label` is dense: the position of the class in the list plus one.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import DataError, UsageError
from ssdctl.files import free_name
from ssdctl.runtime.safe_text import listed

SPLITS = ("train", "val", "test")
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
MAX_NAMED = 5  # offenders named in a message
MAX_CLASSES_NAMED = 8
UNLISTED = "annotation of a category that is not listed, dropped"
UNLABELED = "image without a box that may show objects"
NO_LABELS = "no label file"  # of an image; one with an empty file has no objects
DECIMALS = 3  # in the pixels of boxes that are computed from fractions or corners
# Far more than any name of a class; longer ones are refused.
Name = Annotated[str, msgspec.Meta(max_length=10_000)]


class ClassName(msgspec.Struct, frozen=True):
    """A class: COCO's category id and its name. Its label is its position in the list plus one."""

    id: int | None  # None if a third-party checkpoint gives only the name
    name: Name


def numbered_classes(count: int) -> list[ClassName]:
    """Return classes for a network whose classes have no names."""
    return [ClassName(None, f"class {label}") for label in range(1, count + 1)]


class SplitFiles(NamedTuple):
    images: Sequence[Path]  # folders that may have the images, the most likely first
    annotations: Path


class LabeledBox(NamedTuple):
    name: str  # its class
    left: float
    top: float
    width: float
    height: float
    is_crowd: bool = False
    area: float | None = None  # square pixels; None: width * height


class LabeledImage(NamedTuple):
    """An image with its boxes. Width and height are in pixels, 0 if they are not known."""

    file_name: str
    width: int
    height: int
    boxes: list[LabeledBox]
    has_labels: bool = True  # False: the dataset says nothing about it, not even that it is empty
    is_complete: bool = True  # False: it may show objects that have no box


class Finding(msgspec.Struct, frozen=True):
    """One thing that was dropped or changed."""

    kind: str
    image_id: int
    annotation_id: int | None
    detail: str


class Annotations(NamedTuple):
    """A split as its files describe it: N images, M objects, C classes.

    Objects are in the order of the files. Nothing is clipped, and nothing is dropped without a
    finding: `prepare` (check.py) does both.
    """

    folder: Path  # that has the images, or below which they are searched for
    origin: Path  # the file or folder of the labels, for messages
    image_ids: NDArray[np.int64]  # N
    file_names: list[str]  # N, relative to `folder`
    sizes: NDArray[np.int64]  # N x 2: width, height in pixels; 0 if not given
    classes: list[ClassName]  # C
    ids: NDArray[np.int64]  # M, for messages
    rows: NDArray[np.int32]  # M: the number of each object's image
    labels: NDArray[np.int32]  # M: 1 to C
    boxes: NDArray[np.float64]  # M x 4: left, top, width, height in pixels; NaN if not given
    areas: NDArray[np.float64]  # M, square pixels; NaN if not given
    is_crowd: NDArray[np.bool_]  # M
    findings: Sequence[Finding] = ()  # what the reader repaired, merged or dropped
    notes: Sequence[str] = ()  # how the files were read, for the user
    image_folders: Sequence[Path] = ()  # in or below `folder`, where the format has its images
    upright: bool = False  # boxes fit images turned by their EXIF orientation, whatever their size
    unsized: Collection[str] = ()  # file names of images whose size is the file's, not given
    without_image: Collection[str] = ()  # labels, if the format lists only images that are there
    contents: NDArray[np.uint64] | None = None  # N: see `index.image_contents`; of an index only

    @property
    def object_image_ids(self) -> NDArray[np.int64]:
        """The id of each object's image, (M,)."""
        return self.image_ids[self.rows]

    @property
    def object_category_ids(self) -> NDArray[np.int64]:
        """The category id of each object's class, (M,)."""
        return np.array([c.id for c in self.classes], np.int64)[self.labels - 1]

    def with_objects(self, is_kept: NDArray[np.bool_]) -> Annotations:
        """Return the annotations with only some of the objects; all images stay."""
        names = ("ids", "rows", "labels", "boxes", "areas", "is_crowd")
        return self._replace(**{name: getattr(self, name)[is_kept] for name in names})

    def with_images(self, is_kept: NDArray[np.bool_]) -> Annotations:
        """Return the annotations with only some of the images and their objects."""
        kept = self.with_objects(is_kept[self.rows])
        ids = set(self.image_ids[is_kept].tolist())
        return kept._replace(
            image_ids=self.image_ids[is_kept],
            file_names=list(itertools.compress(self.file_names, is_kept)),
            sizes=self.sizes[is_kept],
            contents=None if self.contents is None else self.contents[is_kept],
            rows=(np.cumsum(is_kept) - 1).astype(np.int32)[kept.rows],
            findings=[f for f in self.findings if f.image_id in ids],
        )


Resolved = tuple[Annotations, list[int | None]]  # with the size of each image file in bytes


class Conversion(msgspec.Struct, frozen=True):
    """How annotations are read: options of `prepare`, which the index remembers."""

    source: str | None = None  # voc, yolo, ...; None: recognize it
    split: float | None = None  # share of the images to train on
    classes: tuple[str, ...] = ()  # to keep; none: all
    image_dir: str | None = None  # of the images, below the dataset folder; None: find them
    group: str | None = None  # regular expression; names with equal matches stay in one split

    def __bool__(self) -> bool:
        return self != AUTOMATIC

    def __str__(self) -> str:
        options = {"from": self.source, "split": self.split}
        options["classes"] = _as_option(self.classes)
        options["group"] = self.group
        options["image-dir"] = self.image_dir
        return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in options.items() if v)


AUTOMATIC = Conversion()


def nfc(name: str) -> str:
    """Return a name with umlauts as one character; macOS writes file names with two."""
    return unicodedata.normalize("NFC", name)


def root_folder(root: Path) -> Path:
    """Return the dataset folder, or the folder of the dataset's file."""
    return root.parent if root.is_file() else root


def paths_below(folder: str, names: Sequence[str]) -> list[str]:
    """Return the paths of images below the dataset folder, in Unicode form NFC.

    Images outside of the dataset folder have only their names.
    """
    prefix = "" if folder == "." or folder.startswith("/") else f"{folder}/"
    return [nfc(f"{prefix}{name}") for name in names]


@lru_cache
def split_of(path: str) -> str | None:
    """Return the split that a path below the dataset folder names, as `b/train/instances_val.json`.

    The innermost name that contains the word of one split decides. Only whole words count:
    `trainer` is not a split.
    """
    for name in reversed(path.split("/")):
        words = re.split(r"[^a-z]+", name.lower())
        splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
        if len(splits) == 1:
            return splits.pop()
    return None


def place(
    splits: Sequence[str | None], names: Sequence[object], notes: list[str]
) -> list[str | None]:
    """Return the split of each file or image; None: it is left out, with a note.

    Without any split word, all are for training; without `train`, those without a word are.
    """
    open_rows = [row for row, split in enumerate(splits) if split is None]
    if not open_rows or len(open_rows) == len(splits):
        return [split or "train" for split in splits]
    such_as = f"{len(open_rows):,}, such as {names[open_rows[0]]}"
    if "train" in splits:
        notes.append(f"not in the folder or file of a split, left out: {such_as}")
        return list(splits)
    notes.append(f"not in the folder or file of a split, used for training: {such_as}")
    return [split or "train" for split in splits]


def from_images(
    splits: Mapping[str, list[LabeledImage]],
    classes: Sequence[str] | None,
    folder: Path,
    origin: Path | Mapping[str, Path],
    notes: Sequence[str] = (),
) -> dict[str, Annotations]:
    """Return the annotations of labeled images, by split; ids count from 1 in the given order.

    `classes` are in the order of the labels; None: those of the boxes, sorted. File names are
    relative to `folder`; `origin` is the file or folder of the labels, of all splits or of each;
    `notes` tell the user how they were read.
    """
    of_split = dict(origin) if isinstance(origin, Mapping) else dict.fromkeys(splits, origin)
    first = next(iter(of_split.values()), folder)
    if classes is None:
        boxes = (b for images in splits.values() for i in images for b in i.boxes)
        classes = sorted({nfc(b.name) for b in boxes})
    classes = list(dict.fromkeys(map(nfc, classes)))
    if not classes:
        raise DataError(f"{first}: no object is labeled in it")
    usable = {split: splits[split] for split in SPLITS if splits.get(split)}
    if "train" not in usable:
        only = f", only of the split {' and '.join(usable)}" if usable else ""
        hint = "rename the file or folder that names the split, to train on it" if usable else None
        raise DataError(f"{first}: no images to train on{only}", hint=hint)
    empty = [f"the split {s} lists no images" for s, images in splits.items() if not images]
    result = {
        split: annotations_of_split(images, classes, folder, of_split.get(split, first))
        for split, images in usable.items()
    }
    return {**result, "train": result["train"]._replace(notes=[*notes, *empty])}


def annotations_of_split(
    images: Sequence[LabeledImage], classes: Sequence[str], folder: Path, origin: Path
) -> Annotations:
    label_of = {name: label for label, name in enumerate(classes, 1)}
    objects = [box for image in images for box in image.boxes]
    boxes = [[round(v, DECIMALS) for v in (b.left, b.top, b.width, b.height)] for b in objects]
    areas = [b.width * b.height if b.area is None else b.area for b in objects]
    rows = [row for row, image in enumerate(images) for _ in image.boxes]
    annotations = Annotations(
        folder=folder,
        origin=origin,
        image_ids=np.arange(1, len(images) + 1),
        file_names=[image.file_name for image in images],
        sizes=np.array([(i.width, i.height) for i in images], np.int64).reshape(-1, 2),
        classes=[ClassName(label, name) for name, label in label_of.items()],
        ids=np.arange(1, len(objects) + 1),
        rows=np.array(rows, np.int32),
        labels=np.array([label_of.get(b.name) or label_of[nfc(b.name)] for b in objects], np.int32),
        boxes=np.array(boxes, np.float64).reshape(-1, 4),
        areas=np.array([round(area, DECIMALS) for area in areas], np.float64),
        is_crowd=np.array([box.is_crowd for box in objects], np.bool_),
        findings=[
            Finding(UNLABELED if image.has_labels else NO_LABELS, image_id, None, image.file_name)
            for image_id, image in enumerate(images, 1)
            if not (image.has_labels and (image.is_complete or image.boxes))
        ],
    )
    return one_image_per_file(annotations)


def refuse(path: Path, what: str, offenders: Sequence[object], hint: str | None = None) -> None:
    """Raise a DataError that names the first few offenders, if there are any."""
    if offenders:
        raise DataError(f"{path}: {what}: {listed(offenders, MAX_NAMED)}", hint=hint)


def without_copies(
    origin: Path,
    files: Sequence[object],
    splits: Sequence[str | None],
    images: Sequence[LabeledImage],
    notes: list[str],
) -> list[int]:
    """Return the rows of label files, one per image and split; a copy is left out with a note.

    Raises:
        DataError: An image has label files with different boxes.
    """
    first: dict[str, int] = {}
    rows: dict[tuple[str, str | None], int] = {}
    copies, different = list[str](), list[str]()
    for row, (file, split, image) in enumerate(zip(files, splits, images, strict=True)):
        other = first.setdefault(image.file_name, row)
        if images[other].boxes != image.boxes:
            different.append(f"{files[other]} and {file} ({image.file_name})")
        elif rows.setdefault((image.file_name, split), row) != row:
            copies.append(str(file))
    hint = "remove one of them, or give the folder of the right ones: --data DIR"
    refuse(origin, "different label files of one image", different, hint)
    note_copies(copies, notes)
    return [*rows.values()]


def note_copies(files: Sequence[object], notes: list[str]) -> None:
    if files:
        number = f"{len(files):,}, such as {files[0]}"
        notes.append(f"label files of images that have another one, left out: {number}")


def one_image_per_file(annotations: Annotations) -> Annotations:
    """Give the objects of several entries of one file, as in merged datasets, to the first.

    Otherwise each entry would have the other's objects as background.
    """
    names, ids, sizes = annotations.file_names, annotations.image_ids, annotations.sizes.copy()
    first: dict[str, int] = {}
    rows = np.array([first.setdefault(name, row) for row, name in enumerate(names)], np.int32)
    if len(first) == len(names):
        return annotations
    is_first = rows == np.arange(len(names))
    findings = list(annotations.findings)
    for row in np.flatnonzero(~is_first):
        if not sizes[rows[row]].all():
            sizes[rows[row]] = sizes[row]
        elif sizes[row].all() and (sizes[row] != sizes[rows[row]]).any():
            both = [f"image {ids[r]} of {sizes[r][0]} x {sizes[r][1]}" for r in (rows[row], row)]
            raise DataError(
                f"{annotations.origin}: {names[row]}: is listed twice, as {' and as '.join(both)}",
                hint="correct the size, or rename one of the files",
            )
        kind = "image listed twice, merged with the first entry"
        findings.append(Finding(kind, int(ids[row]), None, names[row]))
    firsts = {int(ids[row]): int(ids[rows[row]]) for row in np.flatnonzero(~is_first)}
    findings = [
        msgspec.structs.replace(f, image_id=firsts.get(f.image_id, f.image_id)) for f in findings
    ]
    merged = annotations._replace(rows=rows[annotations.rows], sizes=sizes, findings=())
    return merged.with_images(is_first)._replace(findings=findings)


def hint_of_classes(name: str, names: Sequence[str], chosen: Sequence[str]) -> str:
    """Return a hint for a chosen name that no class has: the nearest name, or all names."""
    lower = {n.lower(): n for n in names}
    near = [lower[n] for n in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)]
    near = [n for n in names if name in map(str.strip, n.split(","))] or near
    if near and _as_option(near[:1]) != near[0]:
        cut = {part.strip() for part in near[0].split(",")} - {name}
        right = dict.fromkeys(near[0] if n == name else n for n in chosen if n not in cut)
        return f"write --classes {shlex.quote(_as_option([*right]))} for {near[0]!r}"
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}it has: {listed([*map(repr, names)], MAX_CLASSES_NAMED)}"


def _as_option(names: Sequence[str]) -> str:
    """Return the value of --classes: a JSON list if a name has commas, brackets or outer blanks."""
    is_plain = all("," not in n and n == n.strip() and n[:1] not in ("[", '"') for n in names)
    return ",".join(names) if is_plain else json.dumps(names, ensure_ascii=False)


def with_classes(annotations: Annotations, chosen: Sequence[str]) -> Annotations:
    """Return the annotations with only these classes; images that lose all boxes stay."""
    names, chosen = [c.name for c in annotations.classes], [*map(nfc, chosen)]
    for name in chosen:
        if name not in names:
            problem = f"--classes: {annotations.origin} has no class {name!r}"
            raise UsageError(problem, hint=hint_of_classes(name, names, chosen))
    is_chosen = np.array([False, *(name in chosen for name in names)])
    new_labels = np.cumsum(is_chosen).astype(np.int32)
    num_others, notes = int((~is_chosen[annotations.labels]).sum()), [*annotations.notes]
    if num_others:
        notes.append(f"objects of classes that --classes does not name, left out: {num_others:,}")
    annotations = annotations.with_objects(is_chosen[annotations.labels])
    return annotations._replace(
        notes=notes,
        classes=[c for c in annotations.classes if c.name in chosen],
        labels=new_labels[annotations.labels],
    )


def unique_names(names: Sequence[str], ids: Sequence[int | None], pattern: str) -> list[str]:
    """Return distinct names in form NFC: duplicates are written with their ids."""
    names = [nfc(name) for name in names]
    counts = Counter(names)
    taken = {name: 1 for name in names if counts[name] == 1}
    pairs = zip(names, ids, strict=True)
    return [s if counts[s] == 1 else free_name(pattern.format(s, n), taken) for s, n in pairs]


def class_texts(classes: Sequence[ClassName]) -> list[str]:
    """Return a distinct name for each class, such as `cat (id 2)` if two are named `cat`."""
    return unique_names([c.name for c in classes], [c.id for c in classes], "{} (id {})")


def match_classes(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> list[int] | None:
    """Return the position in `actual` of each class of `expected`, -1 if `actual` lacks it.

    Return None if `actual` has other classes, too. Category ids and the order do not matter: a
    labeling tool may renumber them at each export. Classes with equal names are matched in the
    order in which they come.
    """
    positions: dict[str, list[int]] = {}
    for position, entry in enumerate(actual):
        positions.setdefault(nfc(entry.name), []).append(position)
    found = [(positions.get(nfc(entry.name)) or [-1]).pop(0) for entry in expected]
    return None if any(positions.values()) else found


def class_differences(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> str:
    """Return which names only one of the two has, for messages; empty if there are none."""
    missing, extra = (
        Counter(nfc(c.name) for c in a) - Counter(nfc(c.name) for c in b)
        for a, b in ((expected, actual), (actual, expected))
    )
    parts = [("missing", missing), ("not in the checkpoint", extra)]
    return "; ".join(
        f"{what}: {listed(list(names), MAX_CLASSES_NAMED)}" for what, names in parts if names
    )
