"""Find the splits of a dataset: named by a `dataset.toml`, or recognised by their layout.

[train]
images = "photos"                     # folder of the images: below the dataset folder, or absolute
annotations = "labels/train.json"     # COCO format

`[val]` and `[test]` are the same. A [made] table describes how `ssdctl prepare` wrote the file
(convert.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ssdctl.config.resolve import read_toml
from ssdctl.data.formats.find_layout import Layout, find_layout
from ssdctl.data.split_files import SPLITS
from ssdctl.data.split_files import SplitFiles as SplitFiles  # part of this module's interface
from ssdctl.errors import DataError, IntegrityError, UsageError
from ssdctl.files import safe_join

MADE = "made"
TOML = "dataset.toml"
CONVERTED = "converted"  # folder in the store: annotations of layouts other than COCO's
WHAT_IS_DROPPED = "`ssdctl prepare` lists what was dropped, and why, in the store's report.json"
S = TypeVar("S")

COCO_NUM_IMAGES = 117_266  # training images of COCO 2017 with boxes
COCO_NUM_CLASSES = 80


class NotConvertedError(DataError):
    """Raised for a dataset of a layout that must be converted before it can be used."""


def require_split(splits: Mapping[str, S], name: str, root: Path) -> S:
    """Return the split with that name.

    Raises:
        DataError: The dataset does not have it.
    """
    if name in splits:
        return splits[name]
    remedy = "name its images and annotations in dataset.toml"
    if name == "val":
        remedy += ", or create one with `ssdctl prepare --split 0.9`"
    raise DataError(f"{root}: has no split {name}, only {', '.join(splits) or 'none'}", hint=remedy)


def find_splits(root: Path, folder: Path | None = None) -> dict[str, SplitFiles]:
    """Return the splits of the dataset in `root`: train or val, and perhaps test.

    Args:
        root: The dataset folder, or a file such as data.yaml or instances_default.json.
        folder: The store's folder, which has the annotations of converted layouts.

    Raises:
        DataError: No folder, no annotations, a broken dataset.toml, a layout that must be
            converted first.
    """
    require_root(root)
    splits = read_dataset_toml(root / TOML) if (root / TOML).is_file() else {}
    if not splits and folder is not None and (folder / CONVERTED / TOML).is_file():
        splits = read_dataset_toml(folder / CONVERTED / TOML, images_root=root_folder(root))
    if not splits:
        splits = _splits_of(find_layout(root), root)
    for split, files in splits.items():
        if not files.annotations.is_file():
            raise DataError(f"{files.annotations}: no such annotation file (split {split})")
    return splits


def _splits_of(layout: Layout, root: Path) -> dict[str, SplitFiles]:
    if not layout.splits:
        raise NotConvertedError(
            f"{root}: recognised as {layout.describe()}, but not prepared",
            hint=f"ssdctl prepare --data {root}",
        )
    return layout.splits


def require_root(root: Path) -> None:
    """Check that the dataset folder or file exists.

    Raises:
        DataError: It does not.
    """
    if not root.exists():
        raise DataError(
            f"{root}: no such dataset folder",
            hint="name it with --data DIR, or fetch one: ssdctl download --dest DIR",
        )


def warning_without_validation(root: Path) -> str:
    """Return a warning that a dataset has no validation split, with the command that makes one."""
    return (
        f"{root} has no validation split, so training reports no AP; to hold out a tenth of the "
        f"images: ssdctl prepare --data {shlex.quote(str(root))} --split 0.9"
    )


def require_images(split: str, files: SplitFiles) -> None:
    """Check that the image folder exists, which everything but a packed store needs.

    Raises:
        DataError: It does not.
    """
    if not files.images.is_dir():
        raise DataError(
            f"{files.images}: no such image folder (split {split})",
            hint=f"the images of {files.annotations.name} belong there, or a link to them",
        )


def root_folder(root: Path) -> Path:
    """Return the dataset folder, or the folder of the dataset's file."""
    return root.parent if root.is_file() else root


def read_dataset_toml(path: Path, images_root: Path | None = None) -> dict[str, SplitFiles]:
    """Return the splits that a `dataset.toml` names.

    Args:
        path: The file.
        images_root: The folder that image folders are relative to; None is the file's own.

    Raises:
        DataError: It is broken, names nothing, or names a path outside of its folder.
    """
    try:
        return _from_toml(path, images_root or path.parent)
    except (UsageError, IntegrityError) as error:  # a broken file, a path that leaves the folder
        raise DataError(f"{path}: {error}", hint=error.hint) from None


def _from_toml(path: Path, images_root: Path) -> dict[str, SplitFiles]:
    paths: dict[str, dict[str, Path]] = {}
    for key, value, place in read_toml(path):
        split, _, name = key.partition(".")
        if split == MADE:
            continue
        if split not in SPLITS or name not in ("images", "annotations"):
            raise DataError(
                f"{place}: unknown key {key!r}",
                hint="a dataset.toml has the tables [train], [val] and [test] with images and "
                "annotations",
            )
        if not isinstance(value, str):
            raise DataError(f"{place}: {key} must be a path below {path.parent}, or absolute")
        base = images_root if name == "images" else path.parent
        is_absolute = value.startswith("/") and "\0" not in value
        paths.setdefault(split, {})[name] = Path(value) if is_absolute else safe_join(base, value)
    for split, parts in paths.items():
        for name in ("images", "annotations"):
            if name not in parts:
                raise DataError(f"{path}: [{split}] lacks {name}")
    return {split: SplitFiles(**paths[split]) for split in SPLITS if split in paths}
