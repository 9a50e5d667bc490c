"""Read KITTI's labels: `label_2/*.txt`, with the images of the same names in `image_2`.

A line is `type truncated occluded alpha left top right bottom` (pixels from 0) and seven numbers in
space. Regions of the type DontCare are counted and left out.
"""

from __future__ import annotations

from pathlib import Path

from ssdctl.data.annotations import (
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    refuse,
    split_of,
)
from ssdctl.data.formats import numbers, read_lines
from ssdctl.data.image_files import in_threads, is_image, size_or_none
from ssdctl.errors import DataError

LOOKED_FOR = ("label_2/*.txt",)
LABELS, IMAGES = "label_2", "image_2"
NUM_WORDS = 15
DONT_CARE = "DontCare"
MAX_BYTES = 16 << 20


def recognise(path: Path) -> Path | None:
    return next(iter(_folders(path)), None)


def _folders(root: Path) -> list[Path]:
    found = (p for pattern in (LABELS, f"*/{LABELS}", f"*/*/{LABELS}") for p in root.glob(pattern))
    return sorted(p for p in found if next(p.glob("*.txt"), None) is not None)


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder; classes are sorted by name."""
    folders = _folders(path)
    if not folders:
        raise DataError(f"{path}: not KITTI's format: no folder {LABELS} with text files")
    splits: dict[str, list[LabeledImage]] = {}
    notes: list[str] = []
    for folder in folders:
        split = split_of(folder.parent.relative_to(path).as_posix()) or "train"
        splits.setdefault(split, []).extend(_read_folder(path, folder, notes))
    return from_images(splits, None, path, folders[0], notes)


def _read_folder(root: Path, folder: Path, notes: list[str]) -> list[LabeledImage]:
    images = {p.stem: p for p in (folder.parent / IMAGES).glob("*") if is_image(p)}
    labels = sorted(p for p in folder.glob("*.txt") if not p.name.startswith("._"))
    absent = [file.name for file in labels if file.stem not in images]
    refuse(folder.parent / IMAGES, "images of labels are missing", absent)

    def read_image(file: Path) -> LabeledImage:
        image = images[file.stem]
        return LabeledImage(image.relative_to(root).as_posix(), *size_or_none(image), _boxes(file))

    labeled = in_threads(read_image, labels)
    count = sum(box.name == DONT_CARE for image in labeled for box in image.boxes)
    if count:
        notes.append(f"{folder.relative_to(root)}: regions {DONT_CARE}, left out: {count:,}")
    return [
        image._replace(boxes=kept, is_complete=len(kept) == len(image.boxes))
        for image in labeled
        for kept in [[box for box in image.boxes if box.name != DONT_CARE]]
    ]


def _boxes(path: Path) -> list[LabeledBox]:
    boxes = []
    for location, line in read_lines(path, MAX_BYTES):
        name, *words = line.split()
        try:
            if len(words) + 1 < NUM_WORDS:
                raise ValueError("too short")
            left, top, right, bottom = numbers(words[3:7])
        except ValueError:
            raise DataError(
                f"{location}: {line[:60]!r}: expected a class and {NUM_WORDS - 1} numbers"
            ) from None
        boxes.append(LabeledBox(name, left, top, right - left, bottom - top))
    return boxes
