"""Read KITTI's labels: `label_2/*.txt`, with the images of the same names in `image_2`.

A line is `type truncated occluded alpha left top right bottom` (pixels from 0) and seven numbers in
space. A type may have spaces. Regions of the type DontCare are counted and left out.
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

from ssdctl.data.annotations import (
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    place,
    refuse,
    split_of,
)
from ssdctl.data.find_images import ImageFinder, Wanted
from ssdctl.data.formats import numbers, read_lines
from ssdctl.data.image_files import files_below, in_threads
from ssdctl.errors import DataError

LOOKED_FOR = ("label_2/*.txt",)
LABELS, IMAGES = "label_2", "image_2"
NUM_NUMBERS = 14  # after the class; results have a score, too
DONT_CARE = "DontCare"
MAX_BYTES = 16 << 20


def recognize(path: Path) -> Path | None:
    return next(iter(_folders(path)), None)


def _folders(root: Path) -> list[Path]:
    found = (p for pattern in (LABELS, f"*/{LABELS}", f"*/*/{LABELS}") for p in root.glob(pattern))
    return sorted(p for p in found if next(p.rglob("*.[tT][xX][tT]"), None) is not None)


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder; classes are sorted by name."""
    folders = _folders(path)
    if not folders:
        raise DataError(f"{path}: not KITTI's format: no folder {LABELS} with text files")
    notes: list[str] = []
    finder = ImageFinder(path, (IMAGES, "images", ""), image_dir)
    words = [split_of(folder.parent.relative_to(path).as_posix()) for folder in folders]
    splits: dict[str, list[LabeledImage]] = {}
    for folder, split in zip(folders, place(words, folders, notes), strict=True):
        if split is not None:
            splits.setdefault(split, []).extend(_read_folder(finder, folder, split, notes))
    return from_images(splits, None, path, folders[0], notes)


def _read_folder(
    finder: ImageFinder, folder: Path, split: str, notes: list[str]
) -> list[LabeledImage]:
    labels = folder.relative_to(finder.root).as_posix()
    texts = (PurePosixPath(name) for name in files_below(folder))
    files = sorted(file for file in texts if file.suffix.lower() == ".txt")
    wanted = [
        Wanted(file.with_suffix("").as_posix(), labels, split, is_label_file=True) for file in files
    ]
    found = finder.find(wanted, folder)
    absent = [file for file, item in zip(files, found, strict=True) if item is None]
    refuse(folder.parent / IMAGES, "images of labels are missing", absent)

    def read_image(row: int) -> LabeledImage:
        item = found[row]
        assert item is not None  # refused above
        return LabeledImage(item.file, 0, 0, _boxes(folder / files[row]))

    labeled = in_threads(read_image, range(len(files)))
    count = sum(box.name == DONT_CARE for image in labeled for box in image.boxes)
    if count:
        notes.append(f"{labels}: regions {DONT_CARE}, left out: {count:,}")
    return [
        image._replace(boxes=kept, is_complete=len(kept) == len(image.boxes))
        for image in labeled
        for kept in [[box for box in image.boxes if box.name != DONT_CARE]]
    ]


def _boxes(path: Path) -> list[LabeledBox]:
    boxes = []
    for location, line in read_lines(path, MAX_BYTES):
        words = line.split()
        try:
            start = _num_name_words(words)
            left, top, right, bottom = numbers(words[start + 3 : start + 7])
        except ValueError:
            raise DataError(
                f"{location}: {line[:60]!r}: expected a class and {NUM_NUMBERS} numbers"
            ) from None
        name = " ".join(words[:start])
        boxes.append(LabeledBox(name, left, top, right - left, bottom - top))
    return boxes


def _num_name_words(words: list[str]) -> int:
    """Return how many words are the class: those before the 14 numbers, or 15 with a score."""
    count = len(words) - NUM_NUMBERS
    numbers(words[max(count, 0) :])
    if count > 1:
        with contextlib.suppress(ValueError):
            truncated, _occluded = numbers(words[count - 1 : count + 1])
            if (0 <= truncated <= 1 or truncated == -1) and words[count].lstrip("-").isdigit():
                return count - 1
    if count < 1:
        raise ValueError("too short")
    return count
