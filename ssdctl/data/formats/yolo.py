"""Read YOLO's format: a text file per image, `class cx cy width height` in fractions of it.

The names come from data.yaml (a list or a table), from Darknet's `*.data`, from classes.txt, or
from the only `*.names`. Images are those that data.yaml or `*.data` names, as folders, lists or
files, if they are below the dataset folder, or those of the usual folders. A line may also be a
polygon, or have keypoints after the box.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from ssdctl.data.annotations import (
    SPLIT_WORDS,
    SPLITS,
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    refuse,
)
from ssdctl.data.formats._parse import in_pixels, in_threads, read_lines
from ssdctl.data.image_check import size_or_none
from ssdctl.data.image_files import dataset_folder, files_below, is_image
from ssdctl.errors import DataError
from ssdctl.files import read_errors, read_limited, read_text

LOOKED_FOR = ("data.yaml", "classes.txt", "*.names")
NAME_FILES = ("classes.txt", "obj.names", "labels/classes.txt", "labels/train/classes.txt")
YAML = (".yaml", ".yml")
SLACK = 0.01  # boxes overshoot their image by rounding; the check clips them
MAX_YAML_BYTES = 1 << 20
MAX_LABEL_BYTES = 16 << 20  # labels of an image, or class names
MAX_LIST_BYTES = 1 << 28  # paths of images
MAX_DEPTH = 2  # folders above a *.names
MAX_TRIED = 200  # label files


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
    """The content of a data.yaml, or of Darknet's files: text, lists and tables."""

    path: Path
    content: dict[str, Any]


def recognise(path: Path) -> Path | None:
    """Return the file of class names of a folder that has labels, or data.yaml."""
    if path.is_file():
        return path if path.suffix.lower() in (*YAML, ".data") else None
    if (description := _read_yaml(path)) is not None:
        return description.path
    description = _read_darknet(path)
    return description.path if description is not None and has_labels(path) else None


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder, or of a data.yaml; classes in the order of their numbers."""
    root, file = dataset_folder(path), path if path.is_file() else None
    description = _read_yaml(root, file) or _read_darknet(root, file)
    if description is None:
        raise DataError(
            f"{root}: not YOLO's format: neither a data.yaml with names nor a classes.txt",
            hint="write data.yaml with `names: [cat, dog]`, in the order of the class numbers",
        )
    notes: list[str] = []
    names = _class_names(description)
    by_split = _image_files(root, description, notes)
    notes += _unused_labels(root, [path for files in by_split.values() for path in files])
    has_keypoints = "kpt_shape" in description.content
    splits = {
        split: _read_split(root, files, names, has_keypoints, notes)
        for split, files in by_split.items()
    }
    return from_images(splits, names, root, description.path, notes)


def has_labels(root: Path) -> bool:
    """Return whether a folder has labels in the usual places, whatever the classes are called."""
    names = (root / f / name for f in ("labels", ".") for name in files_below(root / f))
    texts = (path for path in names if path.suffix == ".txt")
    return any(has_boxes(path) for path in itertools.islice(texts, MAX_TRIED))


def has_boxes(path: Path) -> bool:
    """Return whether the first line of a text file is a class number and fractions."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        words = read_text(path, MAX_LABEL_BYTES).lstrip().split("\n", 1)[0].split()
        index, *numbers = (float(word) for word in words)
        return index == int(index) >= 0 and len(numbers) >= 4 and _are_fractions(numbers[:4])
    return False


def _read_yaml(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of the YAML file that has `names`; None if there is none."""
    candidates = [file] if file else [root / "data.yaml", root / "dataset.yaml"]
    candidates += [] if file else sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    for path in candidates:
        if path.suffix.lower() not in YAML or not path.is_file():
            continue
        try:
            with read_errors(path):
                content = yaml.load(read_text(path, MAX_YAML_BYTES), Loader=_DistinctKeys)
        except (yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if isinstance(content, dict) and "names" in content:
            return _Description(path, content)
    return None


def _read_darknet(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of Darknet's `*.data` or of a file of class names, or None."""
    below = [root / name for name in files_below(root, MAX_DEPTH)]
    found = [path for path in below if path.suffix == ".names"]
    places = [root / name for name in NAME_FILES if (root / name).is_file()]
    names = next(iter(places or (found if len(found) == 1 else [])), None)
    data = [file] if file else [path for path in below if path.suffix == ".data"]
    for path in (path for path in data if path.stat().st_size <= MAX_YAML_BYTES):
        pairs = (line.partition("=") for line in _read_lines(path))
        content = {key.strip(): value.strip() for key, is_set, value in pairs if is_set}
        if "names" in content:
            tail = _tail(content["names"])
            same_name = (path for path in found if path.name == tail.name)
            place = _place(root, tail) or next(same_name, names)
            if place is None:
                problem = f"{path}: names: {content['names']} is not below {root}"
                raise DataError(problem, hint="copy it beside this file")
            return _Description(path, {**content, "names": _read_lines(place)})
    return _Description(names, {"names": _read_lines(names)}) if names else None


def _read_lines(path: Path) -> list[str]:
    with read_errors(path):
        text = read_limited(path, MAX_LABEL_BYTES).decode("utf-8-sig", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _class_names(description: _Description) -> list[str]:
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
    refuse(path, "class names occur twice", [n for n, c in Counter(names).items() if c > 1])
    return names


def _image_files(root: Path, description: _Description, notes: list[str]) -> dict[str, list[Path]]:
    """Return the image files of each split, sorted."""
    by_split: dict[str, list[Path]] = {}
    for key, entries in description.content.items():
        split = SPLIT_WORDS.get(key.lower()) if isinstance(key, str) else None
        for entry in entries if isinstance(entries, list) else [entries]:
            if split is not None and isinstance(entry, str) and entry:
                by_split.setdefault(split, [])
                by_split[split] += _named_images(root, description, split, entry, notes)
    for split in [split for split in SPLITS if split not in by_split]:
        found = (files for folder in _usual_folders(root, split) if (files := _images_in(folder)))
        by_split[split] = next(found, [])
    if not by_split.get("train"):
        assigned = {path for files in by_split.values() for path in files}
        undivided = (_images_in(folder) for folder in (root / "images", root))
        by_split["train"] = next((f for f in undivided if f and not assigned.intersection(f)), [])
    if not by_split["train"]:
        raise DataError(f"{root}: no images to train on in any of the usual folders")
    return {split: sorted(set(files)) for split, files in by_split.items() if files}


def _usual_folders(root: Path, split: str) -> Iterator[Path]:
    """Return the folders with the name of a split: `images/Train`, `val2017`, `obj_Train_data`."""
    for base in (root / "images", root):
        for folder in sorted(base.iterdir()) if base.is_dir() else ():
            word = folder.name.lower().removeprefix("obj_").removesuffix("_data")
            if SPLIT_WORDS.get(word.removesuffix("2017")) == split:
                yield from (folder / "images", folder)


def _named_images(
    root: Path, description: _Description, split: str, entry: str, notes: list[str]
) -> list[Path]:
    """Return the images of a folder or list that data.yaml names, or the image.

    They are searched for below the dataset folder, which may have another path than when the file
    was written. Only the training images are required.
    """
    base = description.content.get("path", "")
    tail = _tail(base if isinstance(base, str) else "") / _tail(entry)
    place = _place(root, tail)
    if place is not None and place.suffix == ".txt":
        return _listed_images(root, place)
    if place is not None and (place.is_dir() or is_image(place)):
        return [place] if is_image(place) else _images_in(place)
    problem = f"{description.path}: {split}: {entry} is not below {root}, or contains no images"
    if split == "train":
        raise DataError(problem, hint="give the folder that holds images and labels as --data")
    notes.append(f"{problem}: there is no split {split}")
    return []


def _place(root: Path, path: PurePosixPath) -> Path | None:
    """Return a list, an image, or a folder with images, without leading folders that are absent."""
    for start in range(len(path.parts)):
        place = root.joinpath(*path.parts[start:])
        if place.is_file() or (
            place.is_dir() and any(is_image(Path(n)) for n in files_below(place))
        ):
            return place
    return None


def _tail(text: str) -> PurePosixPath:
    """Return a path without the parts that would leave the dataset folder."""
    return PurePosixPath(
        *(p for p in text.replace("\\", "/").split("/") if p not in ("", ".", ".."))
    )


def _listed_images(root: Path, path: Path) -> list[Path]:
    images, absent = [], []
    for line in filter(None, map(str.strip, read_lines(path, MAX_LIST_BYTES))):
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
    root: Path, files: list[Path], names: list[str], keypoints: bool, notes: list[str]
) -> list[LabeledImage]:
    def read_image(path: Path) -> LabeledImage:
        # Trainers that use this format show images upright, so the boxes fit that view.
        width, height = size_or_none(path, upright=True)
        label = label_file(root, path)
        lines = _boxes(label, names, keypoints) if width and label.is_file() else []
        boxes = dict.fromkeys(in_pixels(box, width, height) for box in lines)
        return LabeledImage(path.relative_to(root).as_posix(), width, height, list(boxes))

    images = in_threads(read_image, files)
    if files and not any(image.boxes for image in images):
        expected = label_file(root, files[0])
        notes.append(f"no image of {files[0].parent} has a label: looked for {expected}")
    return images


def _unused_labels(root: Path, images: list[Path]) -> list[str]:
    """Return a note on label files without an image, for example because of its format."""
    stems: dict[Path, set[str]] = {}  # image stems by the folder of their labels
    for folder, image in {image.parent: image for image in images}.items():
        used = stems.setdefault(label_file(root, image).parent, set())
        used.update(path.stem for path in folder.iterdir() if is_image(path))
    unused = [
        path.relative_to(root)
        for folder, used in sorted(stems.items())
        for path in sorted(folder.glob("*.txt"))
        if path.stem not in used and not path.name.startswith("._") and has_boxes(path)
    ]
    first = f"are left out, among them {unused[0]}" if unused else ""
    return [f"{len(unused):,} label files have no image and {first}"] if unused else []


def label_file(root: Path, image: Path) -> Path:
    """Return `labels` in place of the last `images` of the path, or in the image's folder."""
    parts = list(image.relative_to(root).parts)
    for i in reversed(range(len(parts) - 1)):
        if parts[i] == "images":
            parts[i] = "labels"
            return root.joinpath(*parts).with_suffix(".txt")
    adjacent = image.with_suffix(".txt")
    in_labels = root.joinpath("labels", *parts).with_suffix(".txt")
    return adjacent if adjacent.is_file() or not in_labels.is_file() else in_labels


def _boxes(path: Path, names: list[str], keypoints: bool) -> list[LabeledBox]:
    """Return the boxes of a label file, in fractions of the image."""
    boxes = []
    for number, line in enumerate(read_lines(path, MAX_LABEL_BYTES), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        with contextlib.suppress(ValueError, OverflowError):
            index, *numbers = (float(word) for word in line.split())
            if index != int(index) or not 0 <= index < len(names):
                problem = f"class {index:g}, but there are {len(names)} names, from 0 on"
                raise DataError(f"{place}: {problem}")
            left, top, right, bottom = _edges(numbers[:4] if keypoints else numbers, place)
            boxes.append(LabeledBox(names[int(index)], left, top, right - left, bottom - top))
            continue
        raise DataError(f"{place}: {line[:60]!r}: expected a class number and fractions")
    return boxes


def _are_fractions(numbers: list[float]) -> bool:
    return all(-SLACK <= number <= 1 + SLACK for number in numbers)


def _edges(numbers: list[float], place: str) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a box or a polygon."""
    if not _are_fractions(numbers):
        raise DataError(
            f"{place}: the numbers are not fractions of the image's width and height",
            hint="this format uses fractions from 0 to 1, not pixels",
        )
    if len(numbers) == 4:
        x, y, width, height = numbers
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[::2], numbers[1::2]
        return min(xs), min(ys), max(xs), max(ys)
    raise DataError(
        f"{place}: {len(numbers)} numbers after the class: 4 are a box, 6 or more (an even "
        "number) are a polygon"
    )
