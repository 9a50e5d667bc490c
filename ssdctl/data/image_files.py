"""Find image files by name: which files are images, and where a folder has them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ssdctl.data.annotations import refuse
from ssdctl.data.split_files import split_of

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    | {".gif", ".avif", ".jp2", ".ppm", ".pgm", ".tga", ".heic", ".heif"}
)
ANNOTATION_FOLDERS = ("annotations", "Annotations", "labels")


def is_image(path: Path | PurePosixPath) -> bool:
    """Return whether a file has the name of an image; `._a.jpg` is metadata of macOS."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("._")


def files_below(folder: Path, max_depth: int | None = None) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, following links to folders once.

    Args:
        folder: Where to look.
        max_depth: How many folders may be between; None: any number.
    """
    visited = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [f for f in folders if not f.startswith(".") and not f.endswith("prepared")]
        prefix = os.path.relpath(place, folder)
        if max_depth is not None and prefix != "." and prefix.count("/") + 1 >= max_depth:
            folders.clear()
        for file in files:
            yield file if prefix == "." else f"{prefix}/{file}"


def dataset_folder(path: Path) -> Path:
    """Return the folder of images and labels, of a dataset that may be named by its label file."""
    if not path.is_file():
        return path
    return path.parent.parent if path.parent.name in ANNOTATION_FOLDERS else path.parent


def find_by_name(root: Path, names: Sequence[tuple[str, str]], labels: Path) -> list[str]:
    """Return where the images that a label file names are below a folder.

    Args:
        root: The folder.
        names: The name of each, with or without folders and suffix, and its split. If a name fits
            several files, the split's folder decides.
        labels: The label file, for messages.

    Raises:
        DataError: A file does not exist, or several fit.
    """
    by_name: dict[str, list[str]] = {}
    for file in files_below(root):
        if is_image(PurePosixPath(file)):
            parts = file.split("/")
            for start in range(len(parts)):
                by_name.setdefault("/".join(parts[start:]), []).append(file)
            by_name.setdefault(PurePosixPath(file).stem, []).append(file)
    found: list[str] = []
    missing: list[str] = []
    ambiguous: list[str] = []
    for name, split in names:
        candidates = by_name.get(name, [])
        if len(candidates) > 1:
            folders = {"train", None} if split == "train" else {split}
            candidates = [c for c in candidates if split_of(str(Path(c).parent)) in folders]
        if len(candidates) == 1:
            found.append(candidates[0])
        else:
            (ambiguous if candidates else missing).append(name)
    hint = "export with images, or copy them"
    refuse(labels, f"images that are not below {root}", missing, hint)
    refuse(labels, f"image names that fit several files below {root}", ambiguous)
    return found
