"""Name what a folder or file has that is not a dataset, and what to do with it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from ssdctl.data.formats import yolo
from ssdctl.data.image_files import files_below, is_image
from ssdctl.errors import DataError
from ssdctl.files import open_regular

MAX_FILES = 20_000  # that are searched for what a folder has
MAX_READ = 50  # files of a kind whose content is looked at
HEAD_BYTES = 1_000_000
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
TEXTS = {".json", ".csv", ".tsv", ".xml", ".txt"}
BINARIES = {".mat", ".record", ".tfrecord", ".tfrecords", ".parquet", ".h5"}
SEPARATORS = re.compile(rb"[\s\"',;:/\\<>]+")
COORDINATES = re.compile(rb"(?:-?\d+(?:\.\d+)?[\s,]+){3}-?\d")
CONVERT_LABELME = "convert labelme's files to Pascal VOC's layout with its labelme2voc.py"


def of_folder(folder: Path, formats: list[str]) -> tuple[str, str]:
    """Return what a folder without a dataset has, for the message, and the hint.

    Args:
        folder: The folder.
        formats: The names of those that are read.
    """
    files = sorted(Path(n) for n in itertools.islice(files_below(folder), MAX_FILES))
    images = {file.name: file.stem for file in files if is_image(file)}
    jsons = [file for file in files if file.suffix == ".json"][:MAX_READ]
    if labelme := [file for file in jsons if b'"shapes"' in _head(folder / file)]:
        return f", but labelme's JSON files, such as {labelme[0]}", CONVERT_LABELME
    stems = set(images.values())
    texts = [f for f in files if f.suffix == ".txt" and f.stem in stems][:MAX_READ]
    if labels := [file for file in texts if yolo.has_boxes(folder / file)]:
        pairs = [f for f in files if is_image(f) and f.stem == labels[0].stem]
        is_in_place = any(yolo.label_file(folder, folder / f) == folder / labels[0] for f in pairs)
        return _without_names(folder, labels[0], is_in_place)
    if other := [file for file in texts if _head(folder / file).strip()]:
        return (
            f", but text labels of another format, such as {other[0]}",
            f"export one of the formats that are read: {', '.join(formats)}",
        )
    if archives := [file for file in files if file.suffix.lower() in ARCHIVES]:
        return f", but an archive, {archives[0]}", f"unpack {folder / archives[0]}"
    if images and (labels := [f for f in files if _is_labels(folder, f, images)]):
        return (
            f", but labels in a format that is not read, such as {labels[0]}",
            f"export one of the formats that are read: {', '.join(formats)}",
        )
    hint = (
        "give the folder that an export was unpacked to, or describe the dataset in a "
        "dataset.toml (docs/custom-dataset.md)"
    )
    if images:
        return ", but images without labels", f"export the labels as well; {hint}"
    return "", hint


def of_file(path: Path, name: str | None) -> DataError:
    """Return the error for a file that is not a dataset, or not of the format `name`."""
    suffix = path.suffix.lower()
    if suffix in ARCHIVES:
        return DataError(f"{path}: an archive", hint="unpack it and give the folder")
    if suffix == ".json" and name in (None, "coco"):
        hint = CONVERT_LABELME if b'"shapes"' in _head(path) else None
        problem = "not in COCO's format: no images, annotations and categories"
        return DataError(f"{path}: {problem}", hint=hint)
    return DataError(
        f"{path}: not a dataset file" + (f" of {name}" if name else ""),
        hint="give a folder, COCO's JSON, a data.yaml, CVAT's annotations.xml or a CSV file",
    )


def _without_names(folder: Path, label: Path, is_in_place: bool) -> tuple[str, str]:
    found = f", but YOLO's labels, such as {label}, without the names of the classes"
    hint = f"write {folder / 'classes.txt'}: a name per line, in the order of the class numbers" + (
        "" if is_in_place else ", and move each label file beside its image"
    )
    return found, hint


def _is_labels(folder: Path, file: Path, images: dict[str, str]) -> bool:
    """Return whether a file has something to say about the images, in a form that is not read."""
    if file.suffix in BINARIES:
        return True
    if file.suffix not in TEXTS:
        return False
    head = _head(folder / file)
    if file.suffix == ".txt" and not COORDINATES.search(head):
        return False  # a license, or a list of images
    if file.stem in images.values():
        return True
    return any(word.decode(errors="replace") in images for word in SEPARATORS.split(head))


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
