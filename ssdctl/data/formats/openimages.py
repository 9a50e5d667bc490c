"""Read Open Images' CSV files: boxes in fractions of the image, classes by their MID.

The boxes are in files with the columns ImageID, LabelName, XMin, XMax, YMin, YMax and perhaps
IsGroupOf (becomes a crowd); names are in class-descriptions*.csv. Images are ID.jpg anywhere below
the folder, masks are not images; boxes of images that were not downloaded are left out and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage, from_images, split_of
from ssdctl.data.formats import csv_by_split, csv_files, csv_header, in_pixels
from ssdctl.data.image_files import dataset_folder, files_below, in_threads, is_image, size_or_none
from ssdctl.errors import DataError
from ssdctl.files import read_errors, read_limited, unreadable
from ssdctl.runtime.safe_text import counted

LOOKED_FOR = ("*-annotations-bbox.csv",)
# ImageID_LabelName_BoxID.png of the segmentations
MASK = re.compile(r"(^|/)masks?/|(^|/)[0-9a-f]{16}_m[^/]*_[0-9a-f]{8}\.png$")
COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
CROWD = "IsGroupOf"
MAX_NAMES_BYTES = 16 << 20


def recognize(path: Path) -> Path | None:
    return next(iter(csv_files(path, COLUMNS)), None)


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder, or of one of its CSV files; classes are sorted by name."""
    root, files, notes = dataset_folder(path), csv_by_split(path, COLUMNS), list[str]()
    names = _class_names(root)
    images: dict[str | None, list[str]] = {}  # by the split that their folder names
    for image in files_below(root):
        if is_image(Path(image)) and not MASK.search(image):
            images.setdefault(split_of(image.rpartition("/")[0]), []).append(image)
    splits = {
        split: _read_split(root, file, images.get(split) or images.get(None, []), names, notes)
        for split, file in files.items()
    }
    return from_images(splits, None, root, next(iter(files.values())), notes)


def _class_names(root: Path) -> dict[str, str]:
    """Return the display names by MID; the MID is appended to names that occur twice."""
    names: dict[str, str] = {}
    for path in csv_files(root):
        header = csv_header(path)
        if len(header) != 2 or not (header[0] == "LabelName" or header[0].startswith("/m/")):
            continue
        with read_errors(path):
            text = read_limited(path, MAX_NAMES_BYTES).decode("utf-8-sig", "replace")
        for line in text.splitlines():
            label, _, name = line.partition(",")
            if label.startswith("/") and name.strip():
                names[label.strip()] = name.strip().strip('"')
    counts = Counter(names.values())
    return {k: f"{v} ({k})" if counts[v] > 1 else v for k, v in names.items()}


def _read_split(
    root: Path, file: Path, images: list[str], names: dict[str, str], notes: list[str]
) -> list[LabeledImage]:
    ids = {Path(image).stem: image for image in images}
    boxes: dict[str, list[LabeledBox]] = {}
    absent: Counter[str] = Counter()
    num_unlabeled = 0
    for image_id, label, (x0, x1, y0, y1), is_group in _rows(file):
        if not label:
            num_unlabeled += 1
        elif image_id not in ids:
            absent[image_id] += 1
        else:
            box = LabeledBox(names.get(label, label), x0, y0, x1 - x0, y1 - y0, is_group)
            boxes.setdefault(image_id, []).append(box)
    if num_unlabeled:
        notes.append(f"{file.name}: boxes without LabelName, left out: {num_unlabeled:,}")
    if absent:
        notes.append(
            f"{file.name}: boxes of images that are not below {root}, left out: "
            f"{absent.total():,} (of {counted(len(absent), 'image')})"
        )
    if not boxes:
        raise DataError(
            f"{file}: none of its images is below {root}",
            hint="the images are named after their ImageID, as in train/000002b66c9c498e.jpg",
        )

    def read_image(image_id: str) -> LabeledImage:
        width, height = size_or_none(root / ids[image_id])
        own = boxes.get(image_id, []) if width else []
        return LabeledImage(
            ids[image_id], width, height, [in_pixels(box, width, height) for box in own]
        )

    return in_threads(read_image, sorted(ids))


def _rows(file: Path) -> Iterator[tuple[str, str, Any, bool]]:
    """ImageID, LabelName, (XMin, XMax, YMin, YMax) and IsGroupOf of each box."""
    import pyarrow as pa
    from pyarrow import csv

    has_groups = CROWD in csv_header(file)
    columns = [*COLUMNS, *([CROWD] if has_groups else [])]
    types = {name: pa.float64() for name in COLUMNS[2:]}
    types |= {"ImageID": pa.string(), "LabelName": pa.string(), CROWD: pa.string()}
    options = csv.ConvertOptions(include_columns=columns, column_types=types)
    try:
        with csv.open_csv(file, convert_options=options) as reader:
            for batch in reader:
                edges = np.stack([batch.column(n).to_numpy(False) for n in COLUMNS[2:]], axis=1)
                if not np.isfinite(edges).all() or (edges < -0.01).any() or (edges > 1.01).any():
                    raise DataError(f"{file}: boxes that are not fractions of the image (0 to 1)")
                labels = (batch.column(name).to_pylist() for name in COLUMNS[:2])
                groups = batch.column(CROWD).to_pylist() if has_groups else ["0"] * len(edges)
                is_group = [group.strip().lower() in ("1", "1.0", "true") for group in groups]
                yield from zip(*labels, edges.tolist(), is_group, strict=True)
    except OSError as error:
        raise unreadable(file, error) from None
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise DataError(f"{file}: not a readable CSV file: {error}") from None
