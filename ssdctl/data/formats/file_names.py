"""Resolve the file names of annotation files to files below the image folder.

Labelling tools write the paths of their own server or of another machine: `images\\x.jpg`,
`/data/upload/3/x.jpg`, `..\\..\\label-studio\\media\\upload\\4\\x.jpg`. Backslashes become
slashes, leading folders are removed as far as needed, and a base name that occurs once in the image
folder is used. Other absolute names and names with `..` are left as they are; `check` refuses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from ssdctl.data.formats.coco import MAX_NAMED, refuse
from ssdctl.data.formats.coco_json import ImageEntry
from ssdctl.data.image_check import file_sizes, header_size
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    | {".gif", ".avif", ".jp2", ".ppm", ".pgm", ".tga", ".heic", ".heif"}
)
TOOL_FOLDERS = {"upload", "uploads", "label-studio", "local-files"}


def is_image(path: Path) -> bool:
    """Return whether a file has the name of an image; `._a.jpg` is metadata of macOS."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("._")


class ResolvedImages(NamedTuple):
    """The image files of an annotation file.

    Attributes:
        sizes: In bytes, None for a file that does not exist.
        notes: What was resolved, for the user.
    """

    sizes: list[int | None]
    notes: list[str]


def resolve_images(images: Sequence[ImageEntry], folder: Path) -> ResolvedImages:
    """Replace file names in place by paths of existing files; fill in absent image sizes.

    Raises:
        DataError: A name could mean several files.
    """
    notes = []
    names = [image.file_name for image in images]
    sizes = file_sizes(folder, [name if is_plain_name(name) else "" for name in names])
    rows = [row for row, size in enumerate(sizes) if size is None]
    if rows and folder.is_dir():
        replaced = _replace_names([images[row] for row in rows], folder)
        if replaced:
            notes.append(_note(replaced))
            new_sizes = file_sizes(folder, [images[row].file_name for row in rows])
            for row, size in zip(rows, new_sizes, strict=True):
                sizes[row] = size if is_plain_name(images[row].file_name) else None
    unsized = [
        image
        for image, size in zip(images, sizes, strict=True)
        if size is not None and not (image.width and image.height)
    ]
    num_sized = sum(_fill_size(image, folder) for image in unsized)
    if num_sized:
        notes.append(f"{num_sized:,} images without width and height: taken from the files")
    return ResolvedImages(sizes, notes)


def _replace_names(images: list[ImageEntry], folder: Path) -> list[tuple[str, str]]:
    """Resolve the names of images; return the pairs of old and new ones."""
    by_base_name: dict[str, list[str]] = {}
    for path in files_below(folder):
        by_base_name.setdefault(PurePosixPath(path).name, []).append(path)
    replaced, ambiguous = [], []
    for image in images:
        name = image.file_name.replace("\\", "/")
        if "/local-files/?d=" in name:  # a URL of Label Studio's server
            name = f"local-files/{unquote(name.partition('?d=')[2])}"
        base_name = PurePosixPath(name).name
        if base_name not in by_base_name and unquote(base_name) in by_base_name:
            name = unquote(name)  # Label Studio's `/data/upload/3/a%20b.jpg`
            base_name = PurePosixPath(name).name
        paths = by_base_name.get(base_name, [])
        if not paths or not (is_plain_name(name) or _is_tool_path(name)):
            if is_plain_name(name):
                image.file_name = name
            continue
        tail = longest_tail(name, paths)
        if tail is None and len(paths) > 1:
            ambiguous.append(f"{image.file_name!r} ({', '.join(sorted(paths)[:MAX_NAMED])})")
            continue
        replaced.append((image.file_name, tail or paths[0]))
        image.file_name = tail or paths[0]
    if ambiguous:
        hint = "write file_name as a path relative to the image folder"
        refuse(folder, "file names that fit several files", ambiguous, hint)
    return replaced


def longest_tail(name: str, paths: Sequence[str]) -> str | None:
    """Return the path that equals the longest tail of `name`; None if only its base name fits."""
    parts = name.split("/")
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if tail in paths and (start < len(parts) - 1 or len(paths) == 1):
            return tail
    return None


def _is_tool_path(name: str) -> bool:
    """Return whether a path that leaves its folder is a path on a labelling tool's server."""
    return bool(TOOL_FOLDERS.intersection(name.split("/")))


def files_below(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, following links to folders once."""
    visited = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [f for f in folders if not f.startswith(".") and not f.endswith("prepared")]
        prefix = os.path.relpath(place, folder)
        for file in files:
            yield file if prefix == "." else f"{prefix}/{file}"


def _note(replaced: list[tuple[str, str]]) -> str:
    old, new = replaced[0]
    return (
        f"{len(replaced):,} file names are not paths below the image folder and were matched to "
        f"the files there, such as {old!r}: {new}"
    )


def _fill_size(image: ImageEntry, folder: Path) -> bool:
    try:
        image.width, image.height = header_size(folder / image.file_name)
    except DataError:
        image.width = image.height = 1  # dropped when the file is checked, with the reason
        return False
    return True
