"""Find COCO's annotation files in a dataset folder, and the image folder of each."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ssdctl.data.image_files import ANNOTATION_FOLDERS, dataset_folder, files_below
from ssdctl.data.split_files import SPLITS, SplitFiles, split_of
from ssdctl.errors import DataError
from ssdctl.files import open_regular

WRITTEN_BY_SSDCTL = "ssdctl_"
SAMPLE_BYTES, SAMPLE_NAMES = 1_000_000, 20
FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
SPLIT_FOLDERS = {
    "train": ("train", "Train", "training", "train2017"),
    "val": ("val", "valid", "validation", "Val", "Validation", "val2017"),
    "test": ("test", "Test", "testing", "test2017"),
}


def splits_of(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a folder in COCO's format, or of a file; empty if it has none.

    Raises:
        DataError: Several files for one split.
    """
    if path.is_file():
        is_coco = path.suffix.lower() == ".json" and is_coco_file(path)
        files = SplitFiles(image_folder(path, dataset_folder(path)), path) if is_coco else None
        return {"train": files} if files is not None else {}
    return own_splits(path) or exported_splits(path)


def own_splits(root: Path) -> dict[str, SplitFiles]:
    """Return the splits that COCO's own layout has in `root`."""
    splits = {}
    for split in SPLITS:
        annotations = root / "annotations" / f"instances_{split}2017.json"
        if annotations.is_file():
            folders = root / f"{split}2017", root / "images" / f"{split}2017"
            images = next((folder for folder in folders if folder.is_dir()), folders[0])
            splits[split] = SplitFiles(images, annotations)
    return splits


def exported_splits(root: Path) -> dict[str, SplitFiles]:
    """Return the splits of a labeling tool's COCO export; empty if there is none.

    Raises:
        DataError: Several files for one split.
    """
    files = _coco_files(root)
    if not files:
        return {}
    by_split: dict[str, list[Path]] = {}
    for file in files:
        folder = file.parent.relative_to(root).name
        split = split_of(file.stem) or split_of(folder)
        by_split.setdefault(split or ("train" if len(files) == 1 else ""), []).append(file)
    several = next((paths for s, paths in by_split.items() if len(paths) > 1 or not s), None)
    if several is not None:
        named = ", ".join(str(file.relative_to(root)) for file in files)
        raise DataError(
            f"{root}: several annotation files, not one for each split: {named}",
            hint="give one: --data FILE, or name them in a dataset.toml "
            "([train] and [val], each with images and annotations)",
        )
    if "train" not in by_split and "val" not in by_split:
        return {}
    return {
        split: SplitFiles(image_folder(by_split[split][0], root, split), by_split[split][0])
        for split in SPLITS
        if split in by_split
    }


def _coco_files(root: Path) -> list[Path]:
    """Return the COCO files of a folder; those called instances_* only, if there are any."""
    places = [root, *(root / name for name in ANNOTATION_FOLDERS)]
    places += sorted(p for p in root.glob("*") if split_of(p.name) and p.is_dir())
    files = [
        file
        for place in places
        for file in (sorted(place.glob("*.json")) if place.is_dir() else ())
        if not file.name.startswith(WRITTEN_BY_SSDCTL) and is_coco_file(file)
    ]
    return [f for f in files if f.name.startswith("instances_")] or files


def is_coco_file(path: Path) -> bool:
    """Return whether a JSON file contains COCO's three tables, without parsing it."""
    try:
        with open_regular(path) as file:
            if not path.stat().st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                keys = (b'"images"', b'"annotations"', b'"categories"')
                return all(content.find(key) >= 0 for key in keys)
    except OSError:
        return False


def image_folder(annotations: Path, root: Path, split: str | None = None) -> Path:
    """Return the folder below `root` that the file names of an annotation file are relative to.

    It is the first of the usual folders in which the first names exist, else in which their base
    names exist anywhere below; else the first folder that exists.
    """
    folders = list(_image_folders(annotations, root, split))
    names = _sample_names(annotations)
    for folder in folders:
        if names and sum((folder / name).is_file() for name in names) * 2 > len(names):
            return folder
    base_names = {name.rpartition("/")[2] for name in names}
    for folder in folders:
        files = {path.rpartition("/")[2] for path in files_below(folder)}
        if base_names and len(base_names & files) * 2 > len(base_names):
            return folder
    return folders[0]


def _image_folders(annotations: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Return the usual places of images, the most specific first; the last one is `root`."""
    words = SPLIT_FOLDERS.get(split or "", ())
    subset = re.sub(r"^(instances|person_keypoints)_", "", annotations.stem)
    names = [f"images/{subset}", subset, *(f"images/{w}" for w in words), *words]
    if annotations.parent.name not in ANNOTATION_FOLDERS and annotations.parent != root:
        yield annotations.parent
    for name in dict.fromkeys([*names, "images", "JPEGImages", "img", "data", "photos"]):
        if (root / name).is_dir():
            yield root / name
    yield root


def _sample_names(annotations: Path) -> list[str]:
    """Return the first file names of an annotation file that stay in a folder, with slashes."""
    with open_regular(annotations) as file:
        head = file.read(SAMPLE_BYTES)
        matches = FILE_NAME.findall(head) or FILE_NAME.findall(head + file.read())
    names = []
    for match in matches[:SAMPLE_NAMES]:
        try:
            names.append(str(msgspec.json.decode(match)).replace("\\", "/"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return [name for name in names if name and "\0" not in name]
