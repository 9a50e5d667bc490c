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
from pathlib import Path, PurePosixPath
from typing import Any

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
from ssdctl.data.formats import in_pixels, read_lines
from ssdctl.data.image_files import (
    dataset_folder,
    files_below,
    in_threads,
    is_image,
    size_or_none,
    split_folders,
)
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
# A data.yaml, or Darknet's file, and its content: text, lists and tables.
_Description = tuple[Path, dict[str, Any]]


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


def recognize(path: Path) -> Path | None:
    """Return the file of class names of a folder that has labels, or data.yaml."""
    if path.is_file():
        return path if path.suffix.lower() in (*YAML, ".data") else None
    origin, content = _read_yaml(path) or _read_darknet(path) or (path, None)
    is_yaml = origin.suffix.lower() in YAML
    return origin if content and (is_yaml or _has_labels(path)) else None


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder, or of a data.yaml; classes in the order of their numbers."""
    root, file = dataset_folder(path), path if path.is_file() else None
    described = _read_yaml(root, file) or _read_darknet(root, file)
    if described is None:
        raise DataError(
            f"{root}: not YOLO's format: neither a data.yaml with names nor a classes.txt",
            hint="write data.yaml with `names: [cat, dog]`, in the order of the class numbers",
        )
    origin, content = described
    notes: list[str] = []
    names = _class_names(origin, content)
    by_split = _image_files(root, origin, content, notes)
    notes += _unused_labels(root, [path for files in by_split.values() for path in files])
    splits = {
        split: _read_split(root, files, names, "kpt_shape" in content, notes)
        for split, files in by_split.items()
    }
    # Trainers that use this format show images upright, so the boxes fit that view.
    annotations = from_images(splits, names, root, origin, notes)
    return {split: a._replace(upright=True) for split, a in annotations.items()}


def _has_labels(root: Path) -> bool:
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
            return path, content
    return None


def _read_darknet(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of Darknet's `*.data` or of a file of class names, or None."""
    below = [root / name for name in files_below(root, MAX_DEPTH)]
    found = [path for path in below if path.suffix == ".names"]
    usual = [root / name for name in NAME_FILES if (root / name).is_file()]
    names = next(iter(usual or (found if len(found) == 1 else [])), None)
    for path in [file] if file else [path for path in below if path.suffix == ".data"]:
        if path.stat().st_size > MAX_YAML_BYTES:
            continue
        pairs = (line.partition("=") for line in _read_lines(path))
        content: dict[str, Any] = {k.strip(): v.strip() for k, is_set, v in pairs if is_set}
        if "names" in content:
            tail = _tail(content["names"])
            same_name = (path for path in found if path.name == tail.name)
            named = _below(root, tail) or next(same_name, names)
            if named is None:
                problem = f"{path}: names: {content['names']} is not below {root}"
                raise DataError(problem, hint="copy it beside this file")
            return path, {**content, "names": _read_lines(named)}
    return (names, {"names": _read_lines(names)}) if names else None


def _read_lines(path: Path) -> list[str]:
    with read_errors(path):
        text = read_limited(path, MAX_LABEL_BYTES).decode("utf-8-sig", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _class_names(path: Path, content: dict[str, Any]) -> list[str]:
    names = content["names"]
    if isinstance(names, dict):
        numbers = [str(n) for n in range(len(names))]
        if set(names) != set(numbers):
            raise DataError(f"{path}: names must be numbered from 0 without a gap")
        names = [names[n] for n in numbers]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError(f"{path}: names must be a list or a table of class names")
    count = content.get("nc", str(len(names)))
    if count != str(len(names)):
        raise DataError(f"{path}: nc is {count}, but there are {len(names)} names")
    refuse(path, "class names occur twice", [n for n, c in Counter(names).items() if c > 1])
    return names


def _image_files(
    root: Path, origin: Path, content: dict[str, Any], notes: list[str]
) -> dict[str, list[Path]]:
    """Return the image files of each split, sorted."""
    by_split: dict[str, list[Path]] = {}
    for key, entries in content.items():
        split = SPLIT_WORDS.get(key.lower()) if isinstance(key, str) else None
        for entry in entries if isinstance(entries, list) else [entries]:
            if split is not None and isinstance(entry, str) and entry:
                named = _named_images(root, content.get("path"), entry)
                problem = f"{origin}: {split}: {entry} is not below {root}, or contains no images"
                if named is None and split == "train":
                    hint = "give the folder that holds images and labels as --data"
                    raise DataError(problem, hint=hint)
                if named is None:
                    notes.append(f"{problem}: there is no split {split}")
                by_split[split] = by_split.get(split, []) + (named or [])
    for split in [split for split in SPLITS if split not in by_split]:
        found = (files for f in split_folders(root, split) if (files := _images_in(f)))
        by_split[split] = next(found, [])
    if not by_split["train"]:
        assigned = {path for files in by_split.values() for path in files}
        undivided = (_images_in(folder) for folder in (root / "images", root))
        by_split["train"] = next((f for f in undivided if f and not assigned.intersection(f)), [])
    if not by_split["train"]:
        raise DataError(f"{root}: no images to train on in any of the usual folders")
    return {split: sorted(set(files)) for split, files in by_split.items() if files}


def _named_images(root: Path, base: Any, entry: str) -> list[Path] | None:
    """Return the images of a folder or list that data.yaml names, or the image; None if not found.

    They are searched for below the dataset folder, which may have another path than when the file
    was written.
    """
    found = _below(root, _tail(base if isinstance(base, str) else "") / _tail(entry))
    if found is None:
        return None
    if found.suffix == ".txt":
        return _listed_images(root, found)
    if found.is_dir():
        return _images_in(found)
    return [found] if is_image(found) else None


def _below(root: Path, path: PurePosixPath) -> Path | None:
    """Return a list, an image, or a folder with images, without leading folders that are absent."""
    for start in range(len(path.parts)):
        found = root.joinpath(*path.parts[start:])
        if found.is_file() or (
            found.is_dir() and any(is_image(Path(n)) for n in files_below(found))
        ):
            return found
    return None


def _tail(text: str) -> PurePosixPath:
    """Return a path without the parts that would leave the dataset folder."""
    parts = text.replace("\\", "/").split("/")
    return PurePosixPath(*(part for part in parts if part not in ("", ".", "..")))


def _listed_images(root: Path, path: Path) -> list[Path]:
    images, absent = [], []
    for _, line in read_lines(path, MAX_LIST_BYTES):
        parts = _tail(line.strip()).parts
        candidates = (
            base.joinpath(*parts[start:])
            for start in range(len(parts))
            for base in (path.parent, root)
        )
        image = next((path for path in candidates if path.is_file()), None)
        if image is not None and image.is_relative_to(root):
            images.append(image)
        else:
            absent.append(line.strip())
    refuse(path, "images that do not exist", absent)
    return images


def _images_in(folder: Path) -> list[Path]:
    return sorted(folder / name for name in files_below(folder) if is_image(Path(name)))


def _read_split(
    root: Path, files: list[Path], names: list[str], keypoints: bool, notes: list[str]
) -> list[LabeledImage]:
    def read_image(path: Path) -> LabeledImage:
        width, height = size_or_none(path, upright=True)
        label = label_file(root, path)
        has_labels = label.is_file()
        lines = _boxes(label, names, keypoints) if width and has_labels else []
        boxes = dict.fromkeys(in_pixels(box, width, height) for box in lines)
        name = path.relative_to(root).as_posix()
        return LabeledImage(name, width, height, list(boxes), has_labels)

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
    return [
        f"label files without an image, left out: {len(unused):,}, such as {name}"
        for name in unused[:1]
    ]


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
    for location, line in read_lines(path, MAX_LABEL_BYTES):
        try:
            index, *numbers = (float(word) for word in line.split())
            label = int(index)
        except (ValueError, OverflowError):
            problem = f"{line[:60]!r}: expected a class number and fractions"
            raise DataError(f"{location}: {problem}") from None
        if index != label or not 0 <= label < len(names):
            problem = f"class {index:g}, but there are {len(names)} names, from 0 on"
            raise DataError(f"{location}: {problem}")
        left, top, right, bottom = _edges(numbers[:4] if keypoints else numbers, location)
        boxes.append(LabeledBox(names[label], left, top, right - left, bottom - top))
    return boxes


def _are_fractions(numbers: list[float]) -> bool:
    return all(-SLACK <= number <= 1 + SLACK for number in numbers)


def _edges(numbers: list[float], location: str) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a box or a polygon."""
    if not _are_fractions(numbers):
        raise DataError(
            f"{location}: the numbers are not fractions of the image's width and height",
            hint="this format uses fractions from 0 to 1, not pixels",
        )
    if len(numbers) == 4:
        x, y, width, height = numbers
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[::2], numbers[1::2]
        return min(xs), min(ys), max(xs), max(ys)
    raise DataError(
        f"{location}: {len(numbers)} numbers after the class: 4 are a box, 6 or more (an even "
        "number) are a polygon"
    )
