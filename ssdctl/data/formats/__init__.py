"""Dataset formats, one per file. A format has the name of its file: `cvat_xml.py` is `cvat-xml`.

    splits = load("voc").read(Path("export"))

A format is a module with the functions of `Format`, and LOOKED_FOR, the names of its files for
messages. An entry point of `ssdctl.datasets` adds one. This file also has what several formats
share: numbers, lines, XML without document types, CSV and JSON files.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import logging
import math
import mmap
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from xml.etree import ElementTree

import msgspec
import numpy as np

from ssdctl.data.annotations import (
    SPLITS,
    Annotations,
    ClassName,
    LabeledBox,
    LabeledImage,
    from_images,
    nfc,
    split_of,
)
from ssdctl.data.coco_json import decode, read_content
from ssdctl.data.find_images import ImageFinder, located
from ssdctl.data.image_files import files_below, in_threads, size_or_none
from ssdctl.errors import DataError, DiskError, SsdctlError, UsageError
from ssdctl.files import open_regular, read_errors, read_limited, read_text
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import FORMATS, Plugin

log = logging.getLogger(__name__)
T = TypeVar("T")
ROTATED = "rotated boxes, read as the upright box around them"
MAX_XML_BYTES = 10 << 20
FORBIDDEN = (b"<!DOCTYPE", b"<!ENTITY", b"\0")
HEAD_BYTES = 4096
MIN_COMMAS = 5  # in a line of boxes; a path may have more semicolons
MAX_TRIED_FILES = 50  # of a dataset, that are looked at to recognize a format
ENDS_BYTES = 1 << 16  # at both ends: an image in base64 may be between them
MAX_SEARCHED_BYTES = 1 << 26  # of a file with a word elsewhere, such as after many points
COMMENT = re.compile("<!--.*?-->", re.DOTALL)
ROOT_ELEMENT = re.compile(r"<(?:[\w.-]+:)?([A-Za-z][\w.-]*)")
# The encodings that the parser lacks, by Python's names, and what Windows writes under these names.
EAST_ASIAN = {
    **dict.fromkeys(("gb2312", "gbk", "gb18030"), "gb18030"),
    **dict.fromkeys(("big5", "big5hkscs", "cp950"), "big5hkscs"),
    **dict.fromkeys(("shift_jis", "cp932"), "cp932"),
    **dict.fromkeys(("euc_kr", "cp949"), "cp949"),
    "euc_jp": "euc_jp",
}
DECLARATION = re.compile(rb"""\A<\?xml\s[^>]*?\bencoding\s*=\s*["']([\w.-]+)["']""")
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Format(Protocol):
    """A module of this folder, or a plugin. `path` is a folder, or a file such as data.yaml."""

    def recognize(self, path: Path) -> Path | bool | None:
        """Return by which file or folder of labels a dataset is of this format, if it is.

        It is fast and writes nothing.
        """

    def read(self, path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
        """Return the splits, in the order train, val, test.

        `image_dir` is the folder of the images below the dataset folder, if the user names it.

        Raises:
            DataError: It is not of this format, or broken.
        """


class _PluginFormat(NamedTuple):
    module: Any
    plugin: Plugin

    def recognize(self, path: Path) -> Path | bool | None:
        with self.plugin.errors(f"{path}: recognize()", DataError):
            by = getattr(self.module, "recognize", lambda path: None)(path)
            is_right = by is None or isinstance(by, bool | Path)
            self.plugin.require(is_right, "recognize() to return a path, True, False or None")
            return cast("Path | bool | None", by)

    def read(self, path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
        if image_dir is not None:
            raise UsageError(f"--image-dir: --from {self.plugin.name} finds the images itself")
        with self.plugin.errors(f"{path}: read()", DataError):
            splits: dict[str, Annotations] = self.module.read(path)
            are_splits = isinstance(splits, dict) and splits and {*splits} <= {*SPLITS}
            if not (are_splits and all(map(_is_right, splits.values()))):
                raise TypeError("expected Annotations, by train, val or test")
            return splits


def _is_right(annotations: object) -> bool:
    """Return whether the arrays of a plugin's annotations have the types that they should have."""
    if not isinstance(annotations, Annotations):
        return False
    names, images, objects = annotations.file_names, annotations.sizes, annotations.ids
    fields = ("image_ids", "sizes", "ids", "rows", "labels", "boxes", "areas", "is_crowd")
    arrays = [getattr(annotations, field) for field in fields]
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return False
    n, m = len(names), len(objects)
    shapes = [(n,), (n, 2), (m,), (m,), (m,), (m, 4), (m,), (m,)]
    rows, labels, classes = annotations.rows, annotations.labels, annotations.classes
    texts = *names, *annotations.notes, *annotations.unsized
    paths = annotations.folder, annotations.origin, *annotations.image_folders
    return (
        [array.shape for array in arrays] == shapes
        and "".join(array.dtype.kind for array in arrays) == "iiiiiffb"
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(path, Path) for path in paths)
        and all(isinstance(c, ClassName) and isinstance(c.name, str) for c in classes)
        and all(isinstance(c.id, int) for c in classes)
        and len(images) == n
        and bool(((rows >= 0) & (rows < n) & (labels > 0) & (labels <= len(classes))).all())
    )


def built_in() -> list[str]:
    return sorted(plugins.built_in(FORMATS))


def load(name: str) -> Format:
    """Return a dataset format; raise UsageError if there is none, or its plugin cannot be used."""
    module, plugin = plugins.load(FORMATS, name)
    if plugin is None:
        ours: Format = module
        return ours
    plugin.require(callable(getattr(module, "read", None)), "a function read")
    return _PluginFormat(module, plugin)


def recognized(path: Path) -> Iterator[tuple[str, Format, Path | bool]]:
    """Yield the formats of a folder or file, and by which file each is recognized."""
    for name in built_in():
        module: Format = plugins.built_in_module(FORMATS, name)
        by: Path | bool | None = None
        with contextlib.suppress(DiskError):  # a folder that cannot be listed: its reader says so
            by = module.recognize(path)
        if by:
            yield name, module, by
    for name in dict.fromkeys(plugin.name for plugin in plugins.plugins(FORMATS)):
        try:
            module = load(name)
            by = module.recognize(path)
        except SsdctlError as error:
            log.warning("%s", error)  # a broken plugin must not stop the others
            continue
        if by:
            yield name, module, by


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield where each line of a text file is, for messages, and the line; blank ones are not."""
    with read_errors(path):
        lines = read_text(path, max_bytes).splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", line


def numbers(values: Sequence[str]) -> list[float]:
    """Return finite numbers.

    Raises:
        ValueError: One is not a number, or not finite.
    """
    result = [float(value) for value in values]
    if not all(map(math.isfinite, result)):
        raise ValueError("not finite")
    return result


def whole_number(text: str, location: str) -> int:
    """Return a whole number, which may be written as `12.0`.

    Raises:
        DataError: It is not one; the message begins with `location`.
    """
    try:
        number = int(float(text))
        if number == float(text):
            return number
    except (ValueError, OverflowError):
        pass
    raise DataError(f"{location}: {text!r} is not a whole number")


def in_pixels(box: LabeledBox, width: int, height: int) -> LabeledBox:
    """Convert a box in fractions of its image."""
    left, top = box.left * width, box.top * height
    return LabeledBox(box.name, left, top, box.width * width, box.height * height, box.is_crowd)


def read_xml(path: Path, max_bytes: int = MAX_XML_BYTES) -> ElementTree.Element:
    """Return the root element of an XML file, with the names of elements without namespaces."""
    with read_errors(path):
        content = read_limited(path, max_bytes)
        if encoding := _encoding_to_decode(content):
            content = _decoded(path, content, encoding).encode()
    # Nested entities grow without bound, and annotations declare none. Text that does not begin
    # with "<" is in an encoding that could hide them.
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"<") or any(mark in text for mark in FORBIDDEN):
        raise DataError(f"{path}: not plain XML, or it declares a document type")
    try:
        root = ElementTree.fromstring(content.decode() if encoding else content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        hint = None if isinstance(error, ElementTree.ParseError) else "convert it to UTF-8"
        raise DataError(f"{path}: broken XML: {error}", hint=hint) from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    text = content.decode(errors="ignore")
    if text.encode() == content and max(text) > "\u07ff":  # no accident: three bytes each
        problem = "it declares another encoding, but is UTF-8"
        raise DataError(f"{path}: {problem}", hint="correct its first line")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: broken XML: {error}", hint="convert it to UTF-8") from None


def _encoding_to_decode(content: bytes) -> str | None:
    """Return the encoding of XML that the parser, or the search for declarations, cannot read."""
    if content.startswith(UTF16_MARKS):
        return "utf-16"
    declared = DECLARATION.match(content)
    try:
        return EAST_ASIAN.get(codecs.lookup(declared[1].decode()).name) if declared else None
    except LookupError:  # the parser says so
        return None


def root_element(path: Path) -> str:
    """Return the name of an XML file's root element, by its first bytes; "" if it shows none."""
    match = ROOT_ELEMENT.search(COMMENT.sub("", head_of(path)))
    return match[1] if match else ""


def head_of(path: Path) -> str:
    """Return the beginning of a text; empty if it cannot be read.

    It may be UTF-16, which most files must not be: the error that says so needs their format.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        head = file.read(HEAD_BYTES)
        encoding = "utf-16" if head.startswith(UTF16_MARKS) else "utf-8-sig"
        return "\n".join(head.decode(encoding, "replace").replace("\r\n", "\n").split("\r"))
    return ""


def csv_files(path: Path, columns: Sequence[str] = ()) -> list[Path]:
    """Return a file, or the CSV files in a folder and two levels below, that have these columns."""
    return [f for f in files_near(path, ".csv") if set(columns) <= set(csv_header(f))]


def files_near(
    path: Path, suffix: str = ".json", depth: int = 2, *, skips_unreadable: bool = False
) -> list[Path]:
    """Return a file, or the files in a folder and in folders below, with this suffix."""
    below = files_below(path, depth, skips_unreadable=skips_unreadable)
    names = below if path.is_dir() else ()
    files = [path / name for name in names if name.lower().endswith(suffix)]
    return sorted(files) if path.is_dir() else [path] * (path.suffix.lower() == suffix)


def some_files_near(
    path: Path, usual: Sequence[str], suffix: str = ".json", depth: int = 2
) -> list[Path]:
    """Return some of those files: with usual names, then the first ones of each folder."""
    seen = Counter[Path]()
    order = list[tuple[bool, int, Path]]()
    for file in files_near(path, suffix, depth, skips_unreadable=True):
        seen[file.parent] += 1
        order.append((file.name not in usual, seen[file.parent], file))
    return [file for *_, file in sorted(order)[:MAX_TRIED_FILES]]


def with_words(files: Iterable[Path], *words: bytes) -> list[Path]:
    """Return the files that have all words."""
    return [file for file in files if _has(file, words)]


def _has(path: Path, words: Sequence[bytes]) -> bool:
    """Return whether a file has all words: at its ends, or anywhere if it is not large."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(ENDS_BYTES)
        file.seek(max(size - ENDS_BYTES, len(head)))
        ends = head + file.read(ENDS_BYTES)
        rest = [word for word in words if word not in ends]
        if not rest or not ENDS_BYTES < size <= MAX_SEARCHED_BYTES:
            return not rest
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return all(content.find(word) >= 0 for word in rest)
    return False


def is_list(path: Path) -> bool:
    """Return whether a JSON file is a list, by its first character."""
    return head_of(path).lstrip().startswith("[")


def read_json(path: Path, kind: type[T], format_name: str) -> T:
    """Return the content of a JSON file as a type.

    Raises:
        DataError: It is not JSON, or not of this type.
    """
    try:
        return decode(read_content(path), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"not in the format {format_name}: {error}".replace("`", "")
        raise DataError(f"{path}: {problem}") from None


def turned(box: Sequence[Any], degrees: Any, norm: Callable[[Any, Any], Any] = operator.add) -> Any:
    """Return the upright box around one that is turned about its center.

    Args:
        box: Left, top, width and height: numbers or arrays.
        norm: `np.hypot` for an ellipse.
    """
    left, top, width, height = box
    sine, cosine = np.abs(np.sin(np.radians(degrees))), np.abs(np.cos(np.radians(degrees)))
    across, down = norm(width * cosine, height * sine), norm(width * sine, height * cosine)
    return left + (width - across) / 2, top + (height - down) / 2, across, down


def around(label: str, xs: Sequence[float], ys: Sequence[float]) -> LabeledBox:
    """Return the box around points.

    Raises:
        ValueError: There are none, or not as many x as y, or one is not finite.
    """
    if len(xs) != len(ys) or not all(map(math.isfinite, (*xs, *ys))):
        raise ValueError("not points")
    left, top = min(xs), min(ys)
    return LabeledBox(label, left, top, max(xs) - left, max(ys) - top)


def from_upright_images(
    root: Path,
    splits: Mapping[str, Sequence[LabeledImage]],
    classes: Sequence[str] | None,
    origin: Path | Mapping[str, Path],
    notes: Sequence[str],
) -> dict[str, Annotations]:
    """Return annotations of files that give no sizes, as `from_images` does.

    The boxes fit images as labeling tools show them: turned by their EXIF orientation.
    """

    def sized(image: LabeledImage) -> LabeledImage:
        width, height = size_or_none(root / image.file_name, upright=True)
        return image._replace(width=width, height=height)

    with_sizes = {split: in_threads(sized, images) for split, images in splits.items()}
    annotations = from_images(with_sizes, classes, root, origin, notes)
    return {split: part._replace(upright=True) for split, part in annotations.items()}


def from_files(
    root: Path,
    images: Mapping[Path, Mapping[str, LabeledImage]],
    image_dir: str | None,
    notes: list[str],
    classes: Sequence[str] | None = None,
) -> dict[str, Annotations]:
    """Return annotations of label files, each of a split, that list images by name, without sizes.

    The classes are sorted by name if none are given.

    Raises:
        DataError: See `by_split` and `located`.
    """
    chosen = by_split(root, [*images], images.__getitem__, notes)
    splits = {split: (file, [*images[file].values()]) for split, file in chosen.items()}
    found = located(ImageFinder(root, image_dir=image_dir), splits, notes)
    return from_upright_images(root, found, classes, chosen, notes)


def csv_header(path: Path) -> list[str]:
    line = head_of(path).partition("\n")[0]
    with contextlib.suppress(csv.Error):  # not text
        reader = csv.reader([line], delimiter=delimiter_of(line), skipinitialspace=True)
        return [word.strip() for word in next(reader, [])]
    return []


def delimiter_of(line: str) -> str:
    """Return the delimiter of a CSV file's first line; in some languages Excel writes `;`.

    A comma in a name needs no quotes there: `a,b;0`, or `/m/01;a,b` of Open Images.
    """
    plain = re.sub('"[^"]*"', "", line)
    if plain.count(",") >= MIN_COMMAS:
        return ","
    place = plain.rfind if not plain.startswith("/") else lambda mark: -plain.find(mark)
    found = [mark for mark in ",;\t" if mark in plain]
    return max(found, key=lambda mark: (plain.count(mark), place(mark)), default=",")


def csv_rows(path: Path, max_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """Yield where each row of a CSV file is, for messages, and its values without spaces around."""
    with read_errors(path):
        text = read_text(path, max_bytes)
    delimiter = delimiter_of(text[:HEAD_BYTES].partition("\n")[0])
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", [value.strip() for value in row]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not a readable CSV file: {error}") from None


def by_split(
    root: Path,
    files: Sequence[Path],
    images_of: Callable[[Path], Collection[str]],
    notes: list[str],
) -> dict[str, Path]:
    """Return the label file of each split, by a split word in its path.

    A file without such a word is left out if its images are those of the others. It is the training
    split if none of its images is, and no file is called so.

    Raises:
        DataError: A file belongs to no split, or two files to one.
    """
    splits = {file: split_of(file.relative_to(root).as_posix()) for file in files}
    if len(files) == 1 or None not in splits.values():
        names_of = dict[Path, Collection[str]]()  # which are not needed
    else:
        names_of = {file: {*map(nfc, images_of(file))} for file in files}
    placed = {name for file, split in splits.items() if split for name in names_of.get(file, ())}
    chosen = dict[str, Path]()
    for file, split in splits.items():
        names = names_of.get(file, ("",))
        if split is None and placed.issuperset(names):
            notes.append(f"{file.name}: its images are those of the other files: left out")
            continue
        if split is None and "train" not in splits.values() and placed.isdisjoint(names):
            split = "train"
        if split is None or chosen.setdefault(split, file) != file:
            kind = f"two files for the split {split}" if split else "a file that names no split"
            others = ", ".join(str(other) for other in splits if other != file)
            raise DataError(
                f"{file}: {kind}, beside {others}",
                hint="keep one file per split, with train, val or test in its name",
            )
    return chosen
