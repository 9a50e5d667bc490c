"""Find the annotations of a dataset, read them, and notice when their files change.

    splits = read_dataset(root, Conversion(split=0.9))
    splits["train"]                                 # Annotations

A `dataset.toml` of the user takes precedence over every format that can be recognized:

    [train]
    images = "photos"                 # folder of the images: below the dataset folder, or absolute
    annotations = "labels/train.json" # COCO's format

`[val]` and `[test]` are the same. Nothing is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ssdctl.config.resolve import read_toml
from ssdctl.data.annotations import (
    SPLITS,
    Annotations,
    Conversion,
    Labels,
    SplitFiles,
    divided,
    root_folder,
    with_classes,
)
from ssdctl.data.formats import coco, find
from ssdctl.data.image_files import files_below
from ssdctl.errors import DataError, IntegrityError, SsdctlError, UsageError
from ssdctl.files import open_regular, read_errors, safe_join

TOML = "dataset.toml"
MADE = "made"  # a table that version 0.1 added when it wrote the file itself
LABEL_SUFFIXES = (".txt", ".xml", ".csv", ".yaml", ".yml", ".names", ".data")
MAX_COMPARED = 20_000  # label files whose sizes and times are compared at the start of a run
HASHED_BYTES = 4 << 20
WHAT_IS_DROPPED = "`ssdctl prepare` lists what was dropped, and why, in the store's report.json"
S = TypeVar("S")
Read = Callable[[], dict[str, Annotations]]
log = logging.getLogger(__name__)


def require_split(splits: Mapping[str, S], name: str, root: Path) -> S:
    if name in splits:
        return splits[name]
    remedy = "name its images and annotations in dataset.toml"
    if name == "val":
        remedy += ", or create one with `ssdctl prepare --split 0.9`"
    raise DataError(f"{root}: has no split {name}, only {', '.join(splits) or 'none'}", hint=remedy)


def require_root(root: Path) -> None:
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


def find_source(root: Path, conversion: Conversion) -> tuple[str, Read]:
    """Return the format of a dataset and how it is read."""
    require_root(root)
    if (toml := _dataset_toml(root, conversion)) is not None:
        splits = read_dataset_toml(toml)
        for split, files in splits.items():
            if not files.annotations.is_file():
                raise DataError(f"{files.annotations}: no such annotation file (split {split})")
        return "coco", lambda: coco.read_files(splits)
    name, module = find(root, conversion.source)
    return name, lambda: module.read(root)


def read_dataset(
    root: Path, conversion: Conversion, read: Read | None = None
) -> dict[str, Annotations]:
    """Read the splits of a dataset, in the order of SPLITS; `read` is that of `find_source`."""
    splits = (read or find_source(root, conversion)[1])()
    if conversion.classes:
        splits = {s: with_classes(whole, conversion.classes) for s, whole in splits.items()}
    if conversion.split is not None:
        if "val" in splits:
            raise UsageError(f"--split: {root} has validation images already", hint="omit --split")
        train, val = divided(require_split(splits, "train", root), conversion.split)
        splits = {**splits, "train": train, "val": val}
    return {s: splits[s] for s in SPLITS if s in splits}


def label_version(
    root: Path, format_name: str, conversion: Conversion, *, content: bool = False
) -> Labels:
    """Return the version of a dataset's label files."""
    folder = root_folder(root).absolute()
    if format_name != "coco":
        names = [n for n in files_below(folder) if Path(n).suffix in LABEL_SUFFIXES]
        return Labels(_state(folder, sorted(names)))
    paths = _coco_files(root, conversion)
    names = [os.path.relpath(path.absolute(), folder) for path in paths]
    return Labels(_state(folder, names), _hash(paths) if content else "")


def labels_changed(root: Path, format_name: str, conversion: Conversion, recorded: Labels) -> bool:
    """Return whether label files changed since a version was recorded; not if all are gone."""
    try:
        version = label_version(root, format_name, conversion)
        if version.state in ("", recorded.state):
            return False
        return not recorded.content or recorded.content != _hash(_coco_files(root, conversion))
    except (SsdctlError, OSError):  # reported by the command that reads them
        return False


def _coco_files(root: Path, conversion: Conversion) -> list[Path]:
    toml = _dataset_toml(root, conversion)
    splits = coco.splits_of(root) if toml is None else read_dataset_toml(toml)
    return [*([toml] if toml else []), *(files.annotations for files in splits.values())]


def _state(folder: Path, names: list[str]) -> str:
    digest = hashlib.sha256(os.fsencode("\n".join(names)))
    for name in names[:MAX_COMPARED]:
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
    return digest.hexdigest() if names else ""


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with read_errors(path), open_regular(path) as file:
            while chunk := file.read(HASHED_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _dataset_toml(root: Path, conversion: Conversion) -> Path | None:
    path = root / TOML
    if not path.is_file():
        return None
    if conversion.source is not None:
        raise UsageError(
            f"--from {conversion.source}: {path} exists",
            hint="omit --from to prepare what it names, or move it away",
        )
    return path


def read_dataset_toml(path: Path) -> dict[str, SplitFiles]:
    paths: dict[str, dict[str, Path]] = {}
    try:
        for key, value, location in read_toml(path):
            split, _, name = key.partition(".")
            if split == MADE:
                continue
            if split not in SPLITS or name not in SplitFiles._fields:
                raise DataError(
                    f"{location}: unknown key {key!r}",
                    hint="a dataset.toml has the tables [train], [val] and [test] with images "
                    "and annotations",
                )
            if not isinstance(value, str):
                problem = f"{key} must be a path below {path.parent}, or absolute"
                raise DataError(f"{location}: {problem}")
            is_absolute = value.startswith("/") and "\0" not in value
            file = Path(value) if is_absolute else safe_join(path.parent, value)
            paths.setdefault(split, {})[name] = file
    except UsageError as error:  # it is no TOML
        raise DataError(str(error), hint=error.hint) from None
    except IntegrityError as error:  # a path that leaves the folder
        raise DataError(f"{path}: {error}", hint=error.hint) from None
    for split, files in paths.items():
        if missing := [name for name in SplitFiles._fields if name not in files]:
            raise DataError(f"{path}: [{split}] lacks {missing[0]}")
    found = {split: paths[split] for split in SPLITS if split in paths}
    return {split: SplitFiles([p["images"]], p["annotations"]) for split, p in found.items()}
