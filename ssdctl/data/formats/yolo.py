"""Read YOLO's layout: a text file an image, `class cx cy width height` in fractions of it.

    splits = read_yolo(root) -> {"train": [FoundImage, ...], "val": [...]}, classes

The names come from data.yaml (a list or a table), or from classes.txt or obj.names. The images
lie where data.yaml says, as far as that is below the dataset folder, or in the usual folders. A
line may also be a polygon, or have keypoints behind the box.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from ssdctl.data.formats.coco import refuse
from ssdctl.data.formats.coco_writer import FoundBox, FoundImage, without_test
from ssdctl.data.image_check import header_size
from ssdctl.errors import DataError

SUFFIXES = {".jpg", ".jpeg", ".png"}
NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt", "labels/train/classes.txt")
USUAL = {
    "train": ("images/train", "train/images", "images/train2017", "train", "obj_train_data"),
    "val": ("images/val", "val/images", "valid/images", "images/val2017", "val", "valid"),
    "test": ("images/test", "test/images", "test"),
}
UNDIVIDED = ("images", ".")
SLACK = 0.01  # boxes overshoot their image by rounding; the check clips them
MOST_YAML_BYTES = 1_000_000
THREADS = 8


class _Yaml(NamedTuple):
    """What a data.yaml says."""

    path: Path
    content: dict[str, Any]


def read_yolo(
    root: Path, say: Callable[[str], None]
) -> tuple[dict[str, list[FoundImage]], list[str]]:
    """The images of each split by their names, and the classes by their numbers.

    Raises:
        DataError: No class names, no images, a broken line (named with its place).
    """
    described = _yaml(root)
    names = _class_names(root, described)
    has_keypoints = described is not None and "kpt_shape" in described.content
    found: dict[str, list[FoundImage]] = {}
    for split, files in _image_files(root, described).items():
        found[split] = _read_split(root, files, names, has_keypoints, say)
    return without_test(found, say), names


def _yaml(root: Path) -> _Yaml | None:
    candidates = [root / "data.yaml", root / "dataset.yaml"]
    candidates += sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    for path in candidates:
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > MOST_YAML_BYTES:
                raise DataError(f"{path}: too large for a dataset's description")
            # Every value stays text: a class may be called `no`.
            content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if isinstance(content, dict) and "names" in content:
            return _Yaml(path, content)
    return None


def _class_names(root: Path, described: _Yaml | None) -> list[str]:
    if described is None:
        for name in NAME_FILES:
            if (root / name).is_file():
                text = (root / name).read_text(encoding="utf-8", errors="replace")
                return _distinct(
                    root / name, [s for line in text.splitlines() if (s := line.strip())]
                )
        raise DataError(
            f"{root}: no YOLO layout: neither a data.yaml with names nor a classes.txt",
            hint="write data.yaml with `names: [cat, dog]`, in the order of the class numbers",
        )
    path, names = described.path, described.content["names"]
    if isinstance(names, dict):
        numbers = [str(n) for n in range(len(names))]
        if set(names) != set(numbers):
            raise DataError(f"{path}: names must be numbered from 0 without a gap")
        names = [names[n] for n in numbers]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError(f"{path}: names must be a list or a table of class names")
    count = described.content.get("nc", str(len(names)))
    if count != str(len(names)):
        raise DataError(f"{path}: nc is {count}, but there are {len(names)} names")
    return _distinct(path, names)


def _distinct(path: Path, names: list[str]) -> list[str]:
    refuse(path, "class names occur twice", [n for n in dict.fromkeys(names) if names.count(n) > 1])
    return names


def _image_files(root: Path, described: _Yaml | None) -> dict[str, list[Path]]:
    """The image files of each split, sorted."""
    found: dict[str, list[Path]] = {}
    if described is not None:
        for split in ("train", "val", "test"):
            wanted = described.content.get(split)
            for entry in wanted if isinstance(wanted, list) else [wanted]:
                if isinstance(entry, str) and entry:
                    found.setdefault(split, []).extend(_named_images(root, described, split, entry))
    for split, folders in USUAL.items():
        if not found.get(split) and (described is None or not described.content.get(split)):
            usual = (root / f for f in folders if (root / f).is_dir())
            found[split] = next((files for f in usual if (files := _images_in(f))), [])
    if not found.get("train"):
        undivided = (_images_in(root / f) for f in UNDIVIDED if (root / f).is_dir())
        taken = {path for files in found.values() for path in files}
        found["train"] = next((f for f in undivided if f and not taken.intersection(f)), [])
    if not found["train"]:
        raise DataError(f"{root}: no JPEG or PNG images to train on, in none of the usual folders")
    return {split: sorted(set(files)) for split, files in found.items() if files}


def _named_images(root: Path, described: _Yaml, split: str, entry: str) -> list[Path]:
    """The images of a folder or list that data.yaml names; it must lie below the dataset folder,
    wherever it lay when the file was written."""
    tail = _tail(entry)
    base = described.content.get("path", "")
    base = _tail(base if isinstance(base, str) else "")
    joined = base.parts + tail.parts
    # The path as it is, then without what stood before it on another machine.
    for start in range(len(joined)):
        place = root.joinpath(*joined[start:])
        if place.is_dir() and (files := _images_in(place)):
            return files
        if place.is_file() and place.suffix == ".txt":
            return _listed_images(root, place)
    raise DataError(
        f"{described.path}: {split}: {entry} is not below {root}, or holds no JPEG or PNG images",
        hint="give the folder that holds images and labels as --data",
    )


def _tail(text: str) -> PurePosixPath:
    """A path without what would leave the dataset folder."""
    return PurePosixPath(
        *(p for p in text.replace("\\", "/").split("/") if p not in ("", ".", ".."))
    )


def _listed_images(root: Path, path: Path) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    found, absent = [], []
    for line in filter(None, (line.strip() for line in lines)):
        parts = _tail(line).parts
        places = [
            base.joinpath(*parts[i:]) for i in range(len(parts)) for base in (path.parent, root)
        ]
        place = next((p for p in places if p.is_file()), None)
        if place is not None and place.is_relative_to(root):
            found.append(place)
        else:
            absent.append(line)
    refuse(path, "images that are not there", absent)
    return found


def _images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _read_split(
    root: Path, files: list[Path], names: list[str], keypoints: bool, say: Callable[[str], None]
) -> list[FoundImage]:
    def read(path: Path) -> FoundImage | DataError:
        try:
            # Trainers on this layout show images upright, so its boxes fit that view.
            width, height = header_size(path, upright=True)
        except DataError as error:
            return error
        label = _label_file(root, path)
        boxes = _boxes(label, names, keypoints, width, height) if label.is_file() else []
        return FoundImage(path.relative_to(root).as_posix(), width, height, boxes)

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(read, files))
    bad = [result for result in results if isinstance(result, DataError)]
    if bad:
        say(f"{len(bad)} images do not open and are left out, among them {bad[0]}")
    found = [result for result in results if isinstance(result, FoundImage)]
    if found and not any(image.boxes for image in found):
        say(f"no image of {files[0].parent} has a label: looked for {_label_file(root, files[0])}")
    return found


def _label_file(root: Path, image: Path) -> Path:
    """`labels` in place of the last `images` of the path, or beside the image."""
    parts = list(image.relative_to(root).parts)
    for i in reversed(range(len(parts) - 1)):
        if parts[i] == "images":
            parts[i] = "labels"
            return root.joinpath(*parts).with_suffix(".txt")
    beside = image.with_suffix(".txt")
    in_labels = root.joinpath("labels", *parts).with_suffix(".txt")
    return beside if beside.is_file() or not in_labels.is_file() else in_labels


def _boxes(
    path: Path, names: list[str], keypoints: bool, width: int, height: int
) -> list[FoundBox]:
    """The boxes of a label file; the same line twice counts once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    boxes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        with contextlib.suppress(ValueError, OverflowError):
            index, *numbers = (float(word) for word in line.split())
            boxes.append(_box(index, numbers, names, keypoints, place, width, height))
            continue
        raise DataError(f"{place}: {line[:60]!r}: a class number and fractions were expected")
    return list(dict.fromkeys(boxes))


def _box(
    index: float,
    numbers: list[float],
    names: list[str],
    keypoints: bool,
    place: str,
    width: int,
    height: int,
) -> FoundBox:
    if index != int(index) or not 0 <= index < len(names):
        raise DataError(f"{place}: class {index:g}, but there are {len(names)} names, from 0 on")
    if keypoints and len(numbers) > 4:
        numbers = numbers[:4]
    if not all(-SLACK <= number <= 1 + SLACK for number in numbers):
        raise DataError(
            f"{place}: the numbers are no fractions of the image's width and height",
            hint="this layout counts from 0 to 1, not in pixels",
        )
    if len(numbers) == 4:
        cx, cy, w, h = numbers
        edges = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
    elif len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[::2], numbers[1::2]
        edges = (min(xs), min(ys), max(xs), max(ys))
    else:
        raise DataError(
            f"{place}: {len(numbers)} numbers behind the class: 4 make a box, 6 and more (an even "
            "number) a polygon"
        )
    left, top, right, bottom = edges
    name = names[int(index)]
    return FoundBox(
        name, left * width, top * height, (right - left) * width, (bottom - top) * height
    )
