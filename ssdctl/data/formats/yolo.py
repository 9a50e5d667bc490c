"""Read YOLO's layout: a text file per image, `class cx cy width height` in fractions of it.

    splits, classes = read_yolo(root)

The names come from data.yaml (a list or a table), or from classes.txt or obj.names. Images are
taken from the folders that data.yaml names, if they are below the dataset folder, or from the usual
folders. A line may also be a polygon, or have keypoints after the box.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from ssdctl.data.annotations import LabeledBox, LabeledImage
from ssdctl.data.formats.coco import refuse
from ssdctl.data.formats.file_names import files_below, is_image
from ssdctl.data.image_check import header_size
from ssdctl.data.split_files import SPLIT_WORDS, usable_splits
from ssdctl.errors import DataError
from ssdctl.files import read_errors, read_limited, read_text, unreadable

log = logging.getLogger(__name__)
NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt", "labels/train/classes.txt")
USUAL = {
    "train": ("images/train", "train/images", "images/train2017", "train"),
    "val": ("images/val", "val/images", "valid/images", "images/val2017", "val", "valid"),
    "test": ("images/test", "test/images", "test"),
}
UNDIVIDED = ("images", ".")
SLACK = 0.01  # boxes overshoot their image by rounding; the check clips them
MAX_YAML_BYTES = 1 << 20
MAX_LABEL_BYTES = 16 << 20  # labels of an image, or class names
MAX_LIST_BYTES = 1 << 28  # paths of images
THREADS = 8


class _DistinctKeys(yaml.BaseLoader):
    """Loads every value as text: a class may have the name `no`. Refuses keys that occur twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                problem = f"{name} occurs again, after line {seen[name]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Description(NamedTuple):
    """The content of a data.yaml; every value is text, a list or a table."""

    path: Path
    content: dict[str, Any]


def read_yolo(
    root: Path, file: Path | None = None
) -> tuple[dict[str, list[LabeledImage]], list[str]]:
    """Return the images of each split by their names, and the classes by their numbers.

    Args:
        root: The dataset folder.
        file: The data.yaml; None searches for it in `root`.

    Raises:
        DataError: No class names, no images, a broken line (named with its place).
    """
    description = read_description(root, file)
    names = _class_names(root, description)
    by_split = _image_files(root, description)
    _report_unused_labels(root, [path for files in by_split.values() for path in files])
    has_keypoints = description is not None and "kpt_shape" in description.content
    splits = {
        split: _read_split(root, files, names, has_keypoints) for split, files in by_split.items()
    }
    return usable_splits(splits), names


def is_yolo(root: Path) -> bool:
    """Return whether a folder has YOLO's class names and, if they are not in YAML, a label file."""
    if read_description(root) is not None:
        return True
    if not any((root / name).is_file() for name in NAME_FILES):
        return False
    folders = ("labels", *(f for usual in USUAL.values() for f in usual), *UNDIVIDED)
    names = (Path(name) for folder in folders for name in files_below(root / folder))
    return any(path.suffix == ".txt" and path.name != "classes.txt" for path in names)


def read_description(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of the YAML file that has `names`; None if there is none.

    Raises:
        DataError: It cannot be read.
    """
    candidates = [file] if file else [root / "data.yaml", root / "dataset.yaml"]
    candidates += [] if file else sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    for path in candidates:
        if not path.is_file():
            continue
        try:
            content = yaml.load(read_text(path, MAX_YAML_BYTES), Loader=_DistinctKeys)
        except OSError as error:
            raise unreadable(path, error) from None
        except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if isinstance(content, dict) and "names" in content:
            return _Description(path, content)
    return None


def _class_names(root: Path, description: _Description | None) -> list[str]:
    if description is None:
        for name in NAME_FILES:
            if (root / name).is_file():
                text = _read_names(root / name)
                return _distinct(
                    root / name, [s for line in text.splitlines() if (s := line.strip())]
                )
        raise DataError(
            f"{root}: not YOLO's layout: neither a data.yaml with names nor a classes.txt",
            hint="write data.yaml with `names: [cat, dog]`, in the order of the class numbers",
        )
    path, names = description.path, description.content["names"]
    if isinstance(names, dict):
        numbers = [str(n) for n in range(len(names))]
        if set(names) != set(numbers):
            raise DataError(f"{path}: names must be numbered from 0 without a gap")
        names = [names[n] for n in numbers]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError(f"{path}: names must be a list or a table of class names")
    count = description.content.get("nc", str(len(names)))
    if count != str(len(names)):
        raise DataError(f"{path}: nc is {count}, but there are {len(names)} names")
    return _distinct(path, names)


def _distinct(path: Path, names: list[str]) -> list[str]:
    refuse(path, "class names occur twice", [n for n, c in Counter(names).items() if c > 1])
    return names


def _image_files(root: Path, description: _Description | None) -> dict[str, list[Path]]:
    """Return the image files of each split, sorted."""
    by_split: dict[str, list[Path]] = {}
    if description is not None:
        for key, entries in description.content.items():
            split = SPLIT_WORDS.get(key.lower()) if isinstance(key, str) else None
            if split is None:
                continue
            for entry in entries if isinstance(entries, list) else [entries]:
                if isinstance(entry, str) and entry:
                    by_split.setdefault(split, [])
                    by_split[split] += _named_images(root, description, split, entry)
    for split in [split for split in USUAL if split not in by_split]:
        found = (files for folder in _usual_folders(root, split) if (files := _images_in(folder)))
        by_split[split] = next(found, [])
    if not by_split.get("train"):
        undivided = (_images_in(root / f) for f in UNDIVIDED if (root / f).is_dir())
        assigned = {path for files in by_split.values() for path in files}
        by_split["train"] = next((f for f in undivided if f and not assigned.intersection(f)), [])
    if not by_split["train"]:
        raise DataError(f"{root}: no images to train on in any of the usual folders")
    return {split: sorted(set(files)) for split, files in by_split.items() if files}


def _usual_folders(root: Path, split: str) -> Iterator[Path]:
    """Return the usual folders of a split, in any case: `images/Train`, `obj_Train_data`."""
    yield from (root / name for name in USUAL[split])
    for base in (root / "images", root):
        for folder in sorted(base.iterdir()) if base.is_dir() else ():
            word = folder.name.lower().removeprefix("obj_").removesuffix("_data")
            if SPLIT_WORDS.get(word) == split:
                yield folder


def _named_images(root: Path, description: _Description, split: str, entry: str) -> list[Path]:
    """Return the images of a folder or list that data.yaml names.

    It is searched for below the dataset folder, which may have another path than when the file was
    written. Only the training images are required.
    """
    tail = _tail(entry)
    base = description.content.get("path", "")
    base = _tail(base if isinstance(base, str) else "")
    joined = base.parts + tail.parts
    # The path as it is, then without the leading folders of another machine.
    for start in range(len(joined)):
        place = root.joinpath(*joined[start:])
        if place.is_dir() and (files := _images_in(place)):
            return files
        if place.is_file() and place.suffix == ".txt":
            return _listed_images(root, place)
    problem = f"{description.path}: {split}: {entry} is not below {root}, or contains no images"
    if split == "train":
        raise DataError(problem, hint="give the folder that holds images and labels as --data")
    log.info("%s: there is no split %s", problem, split)
    return []


def _tail(text: str) -> PurePosixPath:
    """Return a path without the parts that would leave the dataset folder."""
    return PurePosixPath(
        *(p for p in text.replace("\\", "/").split("/") if p not in ("", ".", ".."))
    )


def _read_names(path: Path) -> str:
    with read_errors(path):
        return read_limited(path, MAX_LABEL_BYTES).decode("utf-8-sig", "replace")


def _listed_images(root: Path, path: Path) -> list[Path]:
    with read_errors(path):
        lines = read_text(path, MAX_LIST_BYTES).splitlines()
    images, absent = [], []
    for line in filter(None, (line.strip() for line in lines)):
        parts = _tail(line).parts
        places = [
            base.joinpath(*parts[i:]) for i in range(len(parts)) for base in (path.parent, root)
        ]
        place = next((p for p in places if p.is_file()), None)
        if place is not None and place.is_relative_to(root):
            images.append(place)
        else:
            absent.append(line)
    refuse(path, "images that do not exist", absent)
    return images


def _images_in(folder: Path) -> list[Path]:
    return sorted(folder / name for name in files_below(folder) if is_image(Path(name)))


def _read_split(
    root: Path,
    files: list[Path],
    names: list[str],
    keypoints: bool,
) -> list[LabeledImage]:
    if not files:
        return []

    def read(path: Path) -> LabeledImage:
        try:
            # Trainers that use this layout show images upright, so the boxes fit that view.
            width, height = header_size(path, upright=True)
        except DataError:
            # Dropped, with the reason, when the images are checked.
            return LabeledImage(path.relative_to(root).as_posix(), 0, 0, [])
        label = _label_file(root, path)
        boxes = _boxes(label, names, keypoints, width, height) if label.is_file() else []
        return LabeledImage(path.relative_to(root).as_posix(), width, height, boxes)

    with ThreadPoolExecutor(THREADS) as pool:
        images = list(pool.map(read, files))
    if not any(image.boxes for image in images):
        expected = _label_file(root, files[0])
        log.info("no image of %s has a label: looked for %s", files[0].parent, expected)
    return images


def _report_unused_labels(root: Path, images: list[Path]) -> None:
    """Log how many label files have no image, for example because of the image's format."""
    stems: dict[Path, set[str]] = {}  # of the images, by the folder of their labels
    for folder, image in {image.parent: image for image in images}.items():
        used = stems.setdefault(_label_file(root, image).parent, set())
        used.update(path.stem for path in folder.iterdir() if is_image(path))
    unused = [
        path
        for folder, used in sorted(stems.items())
        for path in sorted(folder.glob("*.txt"))
        if path.stem not in used and not path.name.startswith("._") and _is_label_file(path)
    ]
    if unused:
        log.warning(
            "%d label files have no image and are left out, among them %s",
            len(unused),
            unused[0].relative_to(root),
        )


def _is_label_file(path: Path) -> bool:
    """Return whether the first line is a class number with coordinates: not classes.txt."""
    try:
        words = read_text(path, MAX_LABEL_BYTES).split("\n", 1)[0].split()
        return len([float(word) for word in words]) >= 5
    except (OSError, ValueError):
        return False


def _label_file(root: Path, image: Path) -> Path:
    """Return `labels` in place of the last `images` of the path, or in the image's folder."""
    parts = list(image.relative_to(root).parts)
    for i in reversed(range(len(parts) - 1)):
        if parts[i] == "images":
            parts[i] = "labels"
            return root.joinpath(*parts).with_suffix(".txt")
    adjacent = image.with_suffix(".txt")
    in_labels = root.joinpath("labels", *parts).with_suffix(".txt")
    return adjacent if adjacent.is_file() or not in_labels.is_file() else in_labels


def _boxes(
    path: Path, names: list[str], keypoints: bool, width: int, height: int
) -> list[LabeledBox]:
    """Return the boxes of a label file; the same line twice counts once."""
    with read_errors(path):
        lines = read_text(path, MAX_LABEL_BYTES).splitlines()
    boxes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        with contextlib.suppress(ValueError, OverflowError):
            index, *numbers = (float(word) for word in line.split())
            boxes.append(_box(index, numbers, names, keypoints, place, width, height))
            continue
        raise DataError(f"{place}: {line[:60]!r}: expected a class number and fractions")
    return list(dict.fromkeys(boxes))


def _box(
    index: float,
    numbers: list[float],
    names: list[str],
    keypoints: bool,
    place: str,
    width: int,
    height: int,
) -> LabeledBox:
    if index != int(index) or not 0 <= index < len(names):
        raise DataError(f"{place}: class {index:g}, but there are {len(names)} names, from 0 on")
    if keypoints and len(numbers) > 4:
        numbers = numbers[:4]
    if not all(-SLACK <= number <= 1 + SLACK for number in numbers):
        raise DataError(
            f"{place}: the numbers are not fractions of the image's width and height",
            hint="this layout uses fractions from 0 to 1, not pixels",
        )
    if len(numbers) == 4:
        cx, cy, w, h = numbers
        edges = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
    elif len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[::2], numbers[1::2]
        edges = (min(xs), min(ys), max(xs), max(ys))
    else:
        raise DataError(
            f"{place}: {len(numbers)} numbers after the class: 4 are a box, 6 or more (an even "
            "number) are a polygon"
        )
    left, top, right, bottom = edges
    name = names[int(index)]
    return LabeledBox(
        name, left * width, top * height, (right - left) * width, (bottom - top) * height
    )
