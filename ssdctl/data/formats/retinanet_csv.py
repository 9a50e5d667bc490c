"""Read the CSV files of keras-retinanet and its ports: `path,x1,y1,x2,y2,class`, in pixels from 0.

There is a row per box, and a row with empty fields for an image without objects. A header is
optional; it may name the columns in another order. A file of class names and numbers, such as
`classes.csv`, gives the order of the classes. A word such as train in the name of the file or its
folder gives the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage, nfc
from ssdctl.data.formats import csv_files, csv_header, csv_rows, from_files, numbers
from ssdctl.data.image_files import dataset_folder, is_image
from ssdctl.errors import DataError

LOOKED_FOR = ("annotations.csv",)
ORDER = ("path", "x1", "y1", "x2", "y2", "class")
NAMES = (
    {"path", "filename", "file", "image", "image_path", "img_path", "image_name", "filepath"},
    {"x1", "xmin", "x_min", "left"},
    {"y1", "ymin", "y_min", "top"},
    {"x2", "xmax", "x_max", "right"},
    {"y2", "ymax", "y_max", "bottom"},
    {"class", "class_name", "label", "name", "category"},
)
MAX_BYTES = 1 << 30


def recognize(path: Path) -> Path | None:
    return next(iter(_files(path)), None)


def _files(path: Path) -> list[Path]:
    return [file for file in csv_files(path) if _columns(csv_header(file)) is not None]


def _columns(first: Sequence[str]) -> list[int] | None:
    """Return the positions of ORDER by the first row; None if the file is of another format."""
    if len(first) != len(ORDER):
        return None
    words = [word.lower() for word in first]
    positions = [[n for n, word in enumerate(words) if word in names] for names in NAMES]
    if all(len(found) == 1 for found in positions):
        return [found[0] for found in positions]
    return list(range(len(ORDER))) if _is_row(first) else None


def _is_row(row: Sequence[str]) -> bool:
    try:
        return is_image(PurePosixPath(row[0])) and (not any(row[1:]) or bool(numbers(row[1:5])))
    except ValueError:
        return False


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of its CSV file."""
    root, notes, files = dataset_folder(path), list[str](), _files(path)
    if not files:
        raise DataError(f"{path}: no CSV file with rows of {','.join(ORDER)}")
    images = {file: _images(file) for file in files}
    used = {nfc(box.name) for part in images.values() for i in part.values() for box in i.boxes}
    return from_files(root, images, image_dir, notes, _classes(root, used, notes))


def _images(file: Path) -> dict[str, LabeledImage]:
    columns = _columns(csv_header(file)) or []
    images: dict[str, LabeledImage] = {}
    for number, (location, row) in enumerate(csv_rows(file, MAX_BYTES)):
        if not any(row) or (number == 0 and not _is_row(row)):
            continue
        try:
            name, *edges, label = (row[column] for column in columns)
            boxes = []
            if any((*edges, label)):
                left, top, right, bottom = numbers(edges)
                boxes.append(LabeledBox(label, left, top, right - left, bottom - top))
        except (ValueError, IndexError):
            raise DataError(f"{location}: expected {','.join(ORDER)}") from None
        if not name or (boxes and not label):
            raise DataError(f"{location}: a row without {'a class' if name else 'an image'}")
        images.setdefault(name, LabeledImage(name, 0, 0, [])).boxes.extend(boxes)
    return images


def _classes(root: Path, used: set[str], notes: list[str]) -> list[str] | None:
    """Return the names of a file of names and numbers from 0 that has all used ones."""
    for file in csv_files(root):
        if len(csv_header(file)) != 2:
            continue
        rows = [row for _, row in csv_rows(file, MAX_BYTES) if len(row) == 2 and row[1].isdigit()]
        names = [nfc(name) for name, _ in sorted(rows, key=lambda row: int(row[1]))]
        if used and used <= set(names) and len(set(names)) == len(names):
            return names
        if absent := sorted(used - set(names)) if used & set(names) else []:
            notes.append(f"{file.name} lacks the class {absent[0]}: classes are sorted by name")
    return None
