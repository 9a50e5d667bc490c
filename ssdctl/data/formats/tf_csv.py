"""Read the CSV files of the TensorFlow tutorials: a line per box, in pixels from 0.

The header is `filename,width,height,class,xmin,ymin,xmax,ymax`, as xml_to_csv.py and Roboflow write
it. A word such as train or test in the name of the file or its folder gives the split.
"""

from __future__ import annotations

from pathlib import Path

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage, from_images
from ssdctl.data.find_images import ImageFinder, located
from ssdctl.data.formats import by_split, csv_files, csv_rows, numbers, whole_number
from ssdctl.data.image_files import dataset_folder
from ssdctl.errors import DataError

LOOKED_FOR = ("*_labels.csv",)
COLUMNS = ("filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax")
MAX_BYTES = 1 << 30


def recognize(path: Path) -> Path | None:
    return next(iter(csv_files(path, COLUMNS)), None)


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of one of its CSV files; classes are sorted by name."""
    root, notes = dataset_folder(path), list[str]()
    files = csv_files(path, COLUMNS)
    if not files:
        raise DataError(f"{path}: no CSV file with the columns {', '.join(COLUMNS)}")
    images = {file: _images(file, notes) for file in files}
    chosen = by_split(root, files, images.__getitem__, notes)
    splits = {split: (file, [*images[file].values()]) for split, file in chosen.items()}
    finder = ImageFinder(root, image_dir=image_dir)
    return from_images(located(finder, splits, notes), None, root, chosen, notes)


def _images(file: Path, notes: list[str]) -> dict[str, LabeledImage]:
    rows = csv_rows(file, MAX_BYTES)
    header = next(rows)[1]
    images: dict[str, LabeledImage] = {}
    num_unlabeled = 0
    if unused := [name for name in header if name not in ("", *COLUMNS)]:
        notes.append(f"{file.name}: columns that are not read: {', '.join(unused)}")
    for location, row in rows:
        if not any(row):
            continue
        try:
            values = dict(zip(header, row, strict=True))
            width, height = (whole_number(values[key], location) for key in COLUMNS[1:3])
            sides = [values[key] for key in COLUMNS[4:]]  # all empty: an image without objects
            boxes = [numbers(sides)] if any((values["class"], *sides)) else []
        except (ValueError, KeyError):
            raise DataError(f"{location}: expected {', '.join(COLUMNS)}") from None
        name = values["filename"]
        image = images.setdefault(name, LabeledImage(name, width, height, []))
        if (image.width, image.height) != (width, height):
            raise DataError(f"{location}: {name} has another size than before")
        for left, top, right, bottom in boxes if values["class"] else ():
            box = LabeledBox(values["class"], left, top, right - left, bottom - top)
            image.boxes.append(box)
        if boxes and not values["class"]:
            images[name] = image._replace(is_complete=False)
            num_unlabeled += 1
    if num_unlabeled:
        notes.append(f"{file.name}: boxes without a class, left out: {num_unlabeled:,}")
    return images
