"""What several formats share: lines, numbers, XML without document types, headers of CSV files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

from ssdctl.data.annotations import LabeledBox, split_of
from ssdctl.data.image_files import dataset_folder, files_below
from ssdctl.errors import DataError
from ssdctl.files import open_regular, read_errors, read_limited, read_text

THREADS = 8
MAX_BYTES = 10 << 20
FORBIDDEN = (b"<!DOCTYPE", b"<!ENTITY", b"\0")
HEAD_BYTES = 4096
COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
ROOT_ELEMENT = re.compile(rb"<(?:[\w.-]+:)?([A-Za-z][\w.-]*)")
T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Apply `work` to each item, in order; in threads, because it waits for the file system."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))


def read_lines(path: Path, max_bytes: int) -> list[str]:
    with read_errors(path):
        return read_text(path, max_bytes).splitlines()


def read_xml(path: Path, max_bytes: int = MAX_BYTES) -> ElementTree.Element:
    """Return the root element of an XML file, with the names of elements without namespaces."""
    with read_errors(path):
        content = read_limited(path, max_bytes)
    # Nested entities grow without bound, and annotations declare none. Text that does not begin
    # with "<" is in an encoding that could hide them.
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith(b"<") or any(mark in text for mark in FORBIDDEN):
        raise DataError(f"{path}: not plain XML, or it declares a document type")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path}: broken XML: {error}") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def root_element(path: Path) -> str:
    """Return the name of an XML file's root element, by its first bytes; "" if it shows none."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return ""
    match = ROOT_ELEMENT.search(COMMENT.sub(b"", head))
    return match[1].decode() if match else ""


def in_pixels(box: LabeledBox, width: int, height: int) -> LabeledBox:
    """Convert a box in fractions of its image."""
    left, top = box.left * width, box.top * height
    return LabeledBox(box.name, left, top, box.width * width, box.height * height, box.is_crowd)


def numbers(values: list[str]) -> list[float]:
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


def csv_files(path: Path, columns: Sequence[str] = ()) -> list[Path]:
    """Return a file, or the CSV files in a folder and two levels below, that have these columns."""
    files = sorted(path / name for name in files_below(path, 2)) if path.is_dir() else [path]
    return [f for f in files if f.suffix == ".csv" and set(columns) <= set(csv_header(f))]


def csv_by_split(path: Path, columns: Sequence[str]) -> dict[str, Path]:
    """Return the CSV file of each split, by a word in its name or its folder's."""
    root, by_split = dataset_folder(path), dict[str, Path]()
    for file in csv_files(path, columns):
        split = split_of(file.name) or split_of(file.parent.relative_to(root).as_posix()) or "train"
        if by_split.setdefault(split, file) != file:
            problem = f"{root}: two CSV files for the split {split}, the second is {file}"
            raise DataError(problem, hint="keep one, or give one: --data FILE.csv")
    if not by_split:
        raise DataError(f"{path}: no CSV file with the columns {', '.join(columns)}")
    return by_split


def csv_header(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            line = file.readline(HEAD_BYTES)
    except OSError:
        return []
    return [word.strip() for word in line.decode("utf-8-sig", "replace").split(",")]
