"""Read Open Images' CSV files: boxes in fractions of the upright image, classes by their MID.

The boxes are in files with the columns ImageID, LabelName, XMin, XMax, YMin, YMax and perhaps
IsGroupOf (becomes a crowd); names are in class-descriptions*.csv. Images are ID.jpg anywhere below
the folder, masks are not images; boxes of images that were not downloaded are left out and counted.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ssdctl.data.annotations import (
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    nfc,
    split_of,
)
from ssdctl.data.find_images import ImageFinder, Wanted, label_folder
from ssdctl.data.formats import (
    HEAD_BYTES,
    by_split,
    csv_files,
    csv_header,
    csv_rows,
    delimiter_of,
    in_pixels,
)
from ssdctl.data.image_files import dataset_folder, files_below, in_threads, size_or_none
from ssdctl.errors import DataError
from ssdctl.files import open_regular, unreadable
from ssdctl.runtime.safe_text import counted

LOOKED_FOR = ("*-annotations-bbox.csv",)
# ImageID_LabelName_BoxID.png of the segmentations
MASK = re.compile(r"(^|/)masks?/|(^|/)[0-9a-f]{16}_m[^/]*_[0-9a-f]{8}\.png$")
COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
CROWD = "IsGroupOf"
MAX_NAMES_BYTES = 16 << 20


def recognize(path: Path) -> Path | None:
    return next(iter(csv_files(path, COLUMNS)), None)


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of one of its CSV files; classes are sorted by name."""
    root, notes = dataset_folder(path), list[str]()
    found = csv_files(path, COLUMNS)
    if not found:
        raise DataError(f"{path}: no CSV file with the columns {', '.join(COLUMNS)}")
    files = by_split(root, found, lambda file: {row[0] for row in _rows(file)}, notes)
    names = _class_names(root)
    files_of_images = (f for f in files_below(root) if not MASK.search(f))
    finder = ImageFinder(root, image_dir=image_dir, files=files_of_images)
    boxes = {split: _boxes(file, names, notes) for split, file in files.items()}
    wanted = [
        Wanted(
            image_id,
            label_folder(file, root),
            split if len(files) > 1 else split_of(file.name),
            is_stem=True,
        )
        for split, file in files.items()
        for image_id in boxes[split]
    ]
    items = iter(finder.find(wanted, root))
    images = {
        split: {i: item.file for i in boxes[split] if (item := next(items))} for split in files
    }
    unlabeled = _without_boxes(finder, images)
    splits = {
        split: _images(root, file, images[split], boxes[split], unlabeled[split], notes)
        for split, file in files.items()
    }
    annotations = from_images(splits, None, root, files, notes)
    absent = {s: [*(boxes[s].keys() - images[s].keys())] for s in annotations}
    return {  # an ImageID may have a suffix
        split: part._replace(
            upright=True, without_image=[*absent[split], *(f"{i}.jpg" for i in absent[split])]
        )
        for split, part in annotations.items()
    }


def _class_names(root: Path) -> dict[str, str]:
    """Return the display names by MID; the MID is appended to names that occur twice."""
    names: dict[str, str] = {}
    for path in csv_files(root):
        header = csv_header(path)
        if len(header) == 2 and (header[0] == "LabelName" or header[0].startswith(("/m/", "/g/"))):
            rows = (row for _, row in csv_rows(path, MAX_NAMES_BYTES) if len(row) == 2)
            names |= {label: nfc(name) for label, name in rows if label.startswith("/") and name}
    counts = Counter(names.values())
    return {k: f"{v} ({k})" if counts[v] > 1 else v for k, v in names.items()}


def _boxes(file: Path, names: dict[str, str], notes: list[str]) -> dict[str, list[LabeledBox]]:
    """Return the boxes of each image by its id, in fractions of the image."""
    boxes: dict[str, list[LabeledBox]] = {}
    num_unlabeled = 0
    for image_id, label, (x0, x1, y0, y1), is_group in _rows(file):
        if label:
            box = LabeledBox(names.get(label, label), x0, y0, x1 - x0, y1 - y0, is_group)
            boxes.setdefault(image_id, []).append(box)
        else:
            num_unlabeled += 1
    if num_unlabeled:
        notes.append(f"{file.name}: boxes without LabelName, left out: {num_unlabeled:,}")
    return boxes


def _folder_of_split(files: Iterable[str]) -> PurePosixPath:
    """Return the folder of these files, up to the first one with the name of a split."""
    common = PurePosixPath(os.path.commonpath([f"./{Path(file).parent}" for file in files]))
    named = [folder for folder in (common, *common.parents) if split_of(folder.name)]
    return named[-1] if named else common


def _without_boxes(
    finder: ImageFinder, images: Mapping[str, Mapping[str, str]]
) -> dict[str, list[str]]:
    """Return the other images, in folders with images of only one split, or with its name.

    A file beside the folder of a split, with the name of one of its images, is a drawing of it.
    """
    owners: dict[str, set[str]] = {}
    for split, files in images.items():
        for file in files.values():
            owners.setdefault(file.rpartition("/")[0], set()).add(split)
    labeled = {file for files in images.values() for file in files.values()}
    names = {
        (split, PurePosixPath(file).stem) for split in images for file in images[split].values()
    }
    tops = {split: _folder_of_split(files.values()) for split, files in images.items() if files}
    result: dict[str, list[str]] = {split: [] for split in images}
    for file in finder.files:
        path, folder = PurePosixPath(file), file.rpartition("/")[0]
        splits = owners[folder] if folder in owners else {*images} & {split_of(folder)}
        if len(splits) != 1 or file in labeled:
            continue
        (split,) = splits
        top = tops.get(split, path.parent)
        is_below = path.is_relative_to(top) or top.is_relative_to(path.parent)
        if is_below or (split, path.stem) not in names:
            result[split].append(file)
    return result


def _images(
    root: Path,
    file: Path,
    images: Mapping[str, str],
    boxes: Mapping[str, list[LabeledBox]],
    unlabeled: Sequence[str],
    notes: list[str],
) -> list[LabeledImage]:
    absent = [len(boxes[image_id]) for image_id in boxes if image_id not in images]
    if absent:
        notes.append(
            f"{file.name}: boxes of images that are not below {root}, left out: "
            f"{sum(absent):,} (of {counted(len(absent), 'image')})"
        )
    if boxes and not images:
        raise DataError(
            f"{file}: none of its images is below {root}",
            hint="the images are named after their ImageID, as in train/000002b66c9c498e.jpg",
        )
    ids = {name: image_id for image_id, name in images.items()}

    def read_image(name: str) -> LabeledImage:
        width, height = size_or_none(root / name, upright=True)
        own = boxes[ids[name]] if name in ids and width else []
        placed = [in_pixels(box, width, height) for box in own]
        # Most images of Open Images have no boxes because nobody drew any.
        return LabeledImage(name, width, height, placed, is_complete=bool(placed))

    return in_threads(
        read_image, sorted([*ids, *unlabeled], key=lambda name: PurePosixPath(name).stem)
    )


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
        with open_regular(file) as content:
            delimiter = delimiter_of(content.readline(HEAD_BYTES).decode("utf-8", "replace"))
        parsing = csv.ParseOptions(delimiter=delimiter)
        with csv.open_csv(file, parse_options=parsing, convert_options=options) as reader:
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
