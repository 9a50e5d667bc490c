"""Read the CSV files of the TensorFlow tutorials: a line per box, in pixels from 0.

The header is `filename,width,height,class,xmin,ymin,xmax,ymax`, as xml_to_csv.py and Roboflow write
it. A word such as train or test in the name of the file or its folder gives the split.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage, from_images
from ssdctl.data.formats import csv_by_split, csv_files, numbers, whole_number
from ssdctl.data.image_files import dataset_folder, find_by_name
from ssdctl.errors import DataError
from ssdctl.files import read_errors, read_text

LOOKED_FOR = ("*_labels.csv",)
COLUMNS = ("filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax")
MAX_BYTES = 1 << 30


def recognize(path: Path) -> Path | None:
    return next(iter(csv_files(path, COLUMNS)), None)


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder, or of one of its CSV files; classes are sorted by name."""
    root, files, notes = dataset_folder(path), csv_by_split(path, COLUMNS), list[str]()
    splits = {split: _read_split(root, file, split, notes) for split, file in files.items()}
    return from_images(splits, None, root, next(iter(files.values())), notes)


def _read_split(root: Path, file: Path, split: str, notes: list[str]) -> list[LabeledImage]:
    with read_errors(file):
        text = read_text(file, MAX_BYTES)
    images: dict[str, LabeledImage] = {}
    num_unlabeled = 0
    for number, row in enumerate(csv.DictReader(io.StringIO(text), skipinitialspace=True), 2):
        location = f"{file}:{number}"
        try:
            values = {key: row[key].strip() for key in COLUMNS}
            width, height = (whole_number(values[key], location) for key in COLUMNS[1:3])
            left, top, right, bottom = numbers([values[key] for key in COLUMNS[4:]])
        except (ValueError, AttributeError):
            raise DataError(f"{location}: expected {', '.join(COLUMNS)}") from None
        name = values["filename"].replace("\\", "/")
        image = images.setdefault(name, LabeledImage(name, width, height, []))
        if (image.width, image.height) != (width, height):
            raise DataError(f"{location}: {name} has another size than before")
        if values["class"]:
            box = LabeledBox(values["class"], left, top, right - left, bottom - top)
            image.boxes.append(box)
        else:
            num_unlabeled += 1
    if num_unlabeled:
        notes.append(f"{file.name}: boxes without a class, left out: {num_unlabeled:,}")
    found = find_by_name(root, [(name, split) for name in images], file)
    return [
        image._replace(file_name=path) for path, image in zip(found, images.values(), strict=True)
    ]
