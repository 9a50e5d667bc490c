"""Read COCO annotation files as labeling tools write them.

    splits = read(Path("export"))       # typed; DataError names what is broken

Numbers written as 5.0 or "5", `iscrowd: false`, null areas and a byte order mark are accepted.
Classes are the file's categories in its order. A `dataset.toml` of the user takes precedence over
every folder and file that can be recognized:

    [train]
    images = "photos"                 # folder of the images: below the dataset folder, or absolute
    annotations = "labels/train.json"

`[val]` and `[test]` are the same.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.config.resolve import read_toml
from ssdctl.data import TOML
from ssdctl.data.annotations import (
    MAX_NAMED,
    SPLITS,
    UNLISTED,
    Annotations,
    ClassName,
    Finding,
    SplitFiles,
    one_image_per_file,
    refuse,
    split_of,
)
from ssdctl.data.coco_json import (
    AnnotationColumns,
    Tables,
    column,
    decode_tables,
    read_content,
    repeated_table,
)
from ssdctl.data.find_images import STANDARD
from ssdctl.data.formats import ROTATED, some_files_near, turned
from ssdctl.data.image_files import ANNOTATION_FOLDERS, dataset_folder, files_in, split_folders
from ssdctl.errors import DataError, IntegrityError, UsageError
from ssdctl.files import open_regular, safe_join
from ssdctl.runtime.safe_text import listed

LOOKED_FOR = ("annotations/*.json", "train/_annotations.coco.json", "result.json")
TABLES = (b'"images"', b'"annotations"', b'"categories"')
RENUMBERED = "duplicate annotation id, renumbered"
WRITTEN_BY_SSDCTL = "ssdctl_"
COCO_TASKS = ("captions_", "panoptic_", "person_keypoints_", "stuff_")  # files of COCO's own


def recognize(path: Path) -> Path | None:
    """Return dataset.toml, or the first annotation file."""
    if (path / TOML).is_file():
        return path / TOML
    return next((files.annotations for files in splits_of(path).values()), None)


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a dataset folder, or of an annotation file."""
    splits = _of_file(path) if path.is_file() else splits_of(path)
    if not splits:
        raise DataError(
            f"{path}: no annotation file in COCO's format (looked for *.json in it, in "
            f"{', '.join(ANNOTATION_FOLDERS)} and in the folders of splits)"
        )
    if image_dir is not None:
        folder = [dataset_folder(path) / image_dir]
        splits = {split: files._replace(images=folder) for split, files in splits.items()}
    annotations = read_files(splits)
    _refuse_shared(path, splits, annotations)
    if others := [] if path.is_file() or (path / TOML).is_file() else _not_read(path, splits):
        first = next(iter(annotations))
        note = f"files in COCO's format that are not read: {listed(others, MAX_NAMED)}"
        notes = [*annotations[first].notes, note]
        annotations[first] = annotations[first]._replace(notes=notes)
    return annotations


def _refuse_shared(
    root: Path, splits: Mapping[str, SplitFiles], annotations: Mapping[str, Annotations]
) -> None:
    """Refuse a file without a split in its name if it has images of the other splits."""
    for split, files in splits.items() if len(splits) > 1 and root.is_dir() else ():
        others = {n for s, part in annotations.items() if s != split for n in part.file_names}
        if (
            files.annotations.is_relative_to(root)
            and not split_of(files.annotations.relative_to(root).as_posix())
            and not (root / TOML).is_file()
            and not others.isdisjoint(annotations[split].file_names)
        ):
            raise _several(root, [part.annotations for part in splits.values()])


def _several(root: Path, files: Sequence[Path]) -> DataError:
    named = ", ".join(str(file.relative_to(root)) for file in files)
    return DataError(
        f"{root}: several annotation files, not one for each split: {named}",
        hint="give one: --data FILE, or name them in a dataset.toml "
        "([train], [val] and [test], each with images and annotations)",
    )


def _not_read(root: Path, splits: Mapping[str, SplitFiles]) -> list[Path]:
    used = {files.annotations for files in splits.values()}
    files = [file for file in some_files_near(root, LOOKED_FOR) if file not in used]
    files = [file for file in files if not file.name.startswith((WRITTEN_BY_SSDCTL, *COCO_TASKS))]
    return [file.relative_to(root) for file in files if is_coco_file(file)]


def read_files(splits: Mapping[str, SplitFiles]) -> dict[str, Annotations]:
    """Return splits by their files; see `read`.

    A category that is only the supercategory of others (Roboflow's 0) is a class if it has boxes in
    one of the splits.
    """
    tables = {split: _decode(files.annotations) for split, files in splits.items()}
    unused = {split: _unused_supercategories(table) for split, table in tables.items()}
    used: set[object] = set()
    for split, table in tables.items():
        used |= {c.name for c in table.categories} - set(unused[split].values())
    result = {}
    for split, files in splits.items():
        left_out = {i: name for i, name in unused[split].items() if name not in used}
        result[split] = _columns(tables.pop(split), left_out, files)
    return result


def _decode(path: Path) -> Tables[AnnotationColumns]:
    content = read_content(path)
    try:
        tables = decode_tables(content)
    except msgspec.ValidationError as error:
        raise DataError(
            f"{path}: not in COCO's format: {error}".replace("`", ""),
            hint="expected images (id, file_name, width, height), annotations (id, image_id, "
            "category_id, bbox) and categories (id, name)",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "export or copy the file again"
        raise DataError(f"{path}: broken JSON: {error}", hint=hint) from None
    if (repeated := repeated_table(content)) is not None:
        name, lines = repeated
        raise DataError(
            f"{path}:{lines[1]}: has {name} again, after line {lines[0]}",
            hint="merge both into one list",
        )
    return tables


def _unused_supercategories(tables: Tables[AnnotationColumns]) -> dict[int, str]:
    """Return the categories without boxes that only name the supercategory of others, by id."""
    parents = {c.supercategory for c in tables.categories if isinstance(c.supercategory, str)}
    used = set(np.unique(tables.annotations.category_id).tolist())
    return {
        c.id: c.name
        for c in tables.categories
        if c.name in parents
        and c.supercategory in (None, "", "none")
        and len(tables.categories) > 1
        and c.id not in used
    }


def _columns(
    tables: Tables[AnnotationColumns], left_out: Mapping[int, str], files: SplitFiles
) -> Annotations:
    path, columns = files.annotations, tables.annotations
    classes = [ClassName(c.id, str(c.name)) for c in tables.categories if c.id not in left_out]
    image_ids = column(tables.images, "id")
    category_ids = np.array([c.id for c in classes], np.int64)
    for what, ids in (("image", image_ids), ("category", column(tables.categories, "id"))):
        duplicates = np.unique(ids[_repeated(ids)]).tolist()
        refuse(path, f"duplicate {what} ids", duplicates, "each must occur once")
    rows = positions(image_ids, columns.image_id)
    absent = np.flatnonzero(rows < 0)
    refuse(
        path,
        "annotations of images that the file does not list",
        [f"{columns.id[n]} (image {columns.image_id[n]})" for n in absent],
        "each image_id must be the id of an entry in images",
    )
    labels = 1 + positions(category_ids, columns.category_id)
    ids, findings = _unique_ids(columns.id, columns.image_id)
    for n in np.flatnonzero(labels < 1):
        detail = f"category {columns.category_id[n]}"
        findings.append(Finding(UNLISTED, int(columns.image_id[n]), int(ids[n]), detail))
    # Most files list all: an index that copies nothing.
    listed = slice(None) if labels.all() else labels > 0
    names = ", ".join(f"{name} (id {i})" for i, name in left_out.items())
    note = f"category {names} is the supercategory of others and has no boxes: not a class"
    sizes = [(image.width or 0, image.height or 0) for image in tables.images]
    notes = [note] if left_out else []
    if num_turned := int((columns.degrees % 180 != 0).sum()):
        notes.append(f"{ROTATED}: {num_turned:,}")
        columns.bbox[:] = np.stack(turned(columns.bbox.T, columns.degrees), axis=1)
    annotations = Annotations(
        folder=Path(os.path.commonpath(files.images)),
        origin=path,
        image_ids=image_ids,
        file_names=[image.file_name for image in tables.images],
        sizes=np.array(sizes, np.int64).reshape(-1, 2),
        classes=classes,
        ids=ids[listed],
        rows=rows[listed].astype(np.int32),
        labels=labels[listed].astype(np.int32),
        boxes=columns.bbox[listed],
        areas=columns.area[listed],
        is_crowd=columns.is_crowd[listed],
        findings=findings,
        notes=notes,
        image_folders=files.images,
    )
    return one_image_per_file(annotations)


def _unique_ids(
    ids: NDArray[np.int64], image_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[Finding]]:
    """Give annotations that repeat an id, as merging tools write them, ids that are free."""
    repeated = _repeated(ids)
    if not len(repeated):
        return ids, []
    taken = set(ids.tolist())
    free = (n for n in range(1, 2 * len(ids) + 1) if n not in taken)
    new = ids.copy()
    findings = []
    for row in repeated.tolist():
        new[row] = next(free)
        detail = f"id {ids[row]} occurs again, is now {new[row]}"
        findings.append(Finding(RENUMBERED, int(image_ids[row]), int(ids[row]), detail))
    return new, findings


def positions(listed: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each wanted id in `listed`; -1 if it is not listed."""
    if not len(listed):
        return np.full(len(wanted), -1)
    order = np.argsort(listed, kind="stable")
    ranked = listed[order]
    rank = np.searchsorted(ranked, wanted).clip(max=len(listed) - 1)
    return np.where(ranked[rank] == wanted, order[rank], -1)


def _repeated(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows of ids that occurred before."""
    order = np.argsort(ids, kind="stable")  # np.unique takes many times as long
    return np.sort(order[1:][ids[order[1:]] == ids[order[:-1]]])


def splits_of(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a folder in COCO's format, or of a file; empty if it has none."""
    if not path.is_file():
        return own_splits(path) or exported_splits(path)
    return _of_file(path) if path.suffix.lower() == ".json" and is_coco_file(path) else {}


def _of_file(path: Path) -> dict[str, SplitFiles]:
    return {"train": SplitFiles(_image_folders(path, dataset_folder(path)), path)}


def own_splits(root: Path) -> dict[str, SplitFiles]:
    """Return the splits that a dataset.toml names, or that COCO's own layout has in `root`."""
    splits = {}
    if (root / TOML).is_file():
        splits = read_dataset_toml(root / TOML)
        for split, files in splits.items():
            if not files.annotations.is_file():
                raise DataError(f"{files.annotations}: no such annotation file (split {split})")
        return splits
    for split in SPLITS:
        annotations = root / "annotations" / f"instances_{split}2017.json"
        if annotations.is_file():
            folders = root / f"{split}2017", root / "images" / f"{split}2017"
            images = [folder for folder in folders if folder.is_dir()][:1]
            splits[split] = SplitFiles([*images, root] if images else folders[:1], annotations)
    return splits


def read_dataset_toml(path: Path) -> dict[str, SplitFiles]:
    paths: dict[str, dict[str, Path]] = {}
    tables = "the tables [train], [val] and [test] with images and annotations"
    try:
        for key, value, location in read_toml(path):
            split, _, name = key.partition(".")
            if split not in SPLITS or name not in SplitFiles._fields:
                hint = f"a dataset.toml has {tables}"
                raise DataError(f"{location}: unknown key {key!r}", hint=hint)
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
    if not paths:
        raise DataError(f"{path}: names no images", hint=f"write {tables}")
    for split, files in paths.items():
        if missing := [name for name in SplitFiles._fields if name not in files]:
            raise DataError(f"{path}: [{split}] lacks {missing[0]}")
    found = {split: paths[split] for split in SPLITS if split in paths}
    return {split: SplitFiles([p["images"]], p["annotations"]) for split, p in found.items()}


def exported_splits(root: Path) -> dict[str, SplitFiles]:
    """Return the splits of a labeling tool's COCO export; empty if there is none."""
    files = _coco_files(root)
    by_split: dict[str, Path] = {}
    for split, file in ((split_of(file.relative_to(root).as_posix()), file) for file in files):
        if by_split.setdefault(split or "train", file) != file:
            raise _several(root, files)
    if by_split.keys() <= {"test"}:
        return {}
    return {
        split: SplitFiles(_image_folders(by_split[split], root, split), by_split[split])
        for split in SPLITS
        if split in by_split
    }


def _coco_files(root: Path) -> list[Path]:
    """Return the COCO files of a folder; those called instances_* only, if there are any."""
    folders = [root, *(root / name for name in ANNOTATION_FOLDERS)]
    folders += sorted(p for p in root.glob("*") if split_of(p.name) and p.is_dir())
    files = [
        file
        for folder in folders
        for file in files_in(folder, ".json")
        if not file.name.startswith(WRITTEN_BY_SSDCTL) and is_coco_file(file)
    ]
    return [f for f in files if f.name.startswith("instances_")] or files


def is_coco_file(path: Path) -> bool:
    """Return whether a JSON file contains COCO's three tables, without parsing it."""
    with (
        contextlib.suppress(OSError, ValueError),  # ValueError: an empty file
        open_regular(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return all(content.find(key) >= 0 for key in TABLES)
    return False


def _image_folders(annotations: Path, root: Path, split: str | None = None) -> list[Path]:
    """Return the usual folders of images, the most specific first."""
    subset = re.sub(r"^(instances|person_keypoints)_", "", annotations.stem)
    folders = [root / "images" / subset, root / subset, *split_folders(root, split or "")]
    if annotations.parent.name not in ANNOTATION_FOLDERS and annotations.parent != root:
        folders.insert(0, annotations.parent)
    folders += [root / name for name in STANDARD]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
