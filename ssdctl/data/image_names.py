"""Resolve the file names of annotations to files below the image folder.

Labeling tools write the paths of their own server or of another machine: `images\\x.jpg`,
`/data/upload/3/x.jpg`, `..\\..\\label-studio\\media\\upload\\4\\x.jpg`. Backslashes become
slashes, leading folders are removed as far as needed, and a base name that occurs once in the image
folder is used. Other absolute names and names with `..` are left as they are; `check` refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from ssdctl.data.annotations import MAX_NAMED, Annotations, refuse
from ssdctl.data.image_check import file_sizes, header_size
from ssdctl.data.image_files import files_below
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

TOOL_FOLDERS = {"upload", "uploads", "label-studio", "local-files"}


class ResolvedImages(NamedTuple):
    """The image files of a split.

    Attributes:
        annotations: With the names of existing files, and their sizes in pixels.
        bytes: The files' sizes, None for a file that does not exist.
    """

    annotations: Annotations
    bytes: list[int | None]


def resolve_images(annotations: Annotations) -> ResolvedImages:
    """Replace file names by paths of existing files; fill in absent image sizes.

    Raises:
        DataError: A name could mean several files.
    """
    notes, folder = list(annotations.notes), annotations.folder
    names, sizes = annotations.file_names, annotations.sizes
    num_bytes = file_sizes(folder, [name if is_plain_name(name) else "" for name in names])
    rows = [row for row, size in enumerate(num_bytes) if size is None]
    if rows and folder.is_dir():
        names = list(names)
        if replaced := _replace_names(names, rows, folder):
            notes.append(_note(replaced))
            found = file_sizes(folder, [names[row] for row in rows])
            for row, size in zip(rows, found, strict=True):
                num_bytes[row] = size if is_plain_name(names[row]) else None
    is_unsized = (sizes == 0).any(axis=1).tolist()
    unsized = [row for row, size in enumerate(num_bytes) if is_unsized[row] and size is not None]
    if unsized:
        sizes = sizes.copy()
        num_sized = 0
        for row in unsized:
            try:
                sizes[row] = header_size(folder / names[row])
                num_sized += 1
            except DataError:
                sizes[row] = 1  # dropped when the file is checked, with the reason
        if num_sized:
            notes.append(f"{num_sized:,} images without width and height: taken from the files")
    annotations = annotations._replace(file_names=names, sizes=sizes, notes=notes)
    return ResolvedImages(annotations, num_bytes)


def _replace_names(names: list[str], rows: Sequence[int], folder: Path) -> list[tuple[str, str]]:
    """Resolve the names of images in place; return the pairs of old and new ones."""
    by_base_name: dict[str, list[str]] = {}
    for path in files_below(folder):
        by_base_name.setdefault(PurePosixPath(path).name, []).append(path)
    replaced, ambiguous = [], []
    for row in rows:
        name = names[row].replace("\\", "/")
        if "/local-files/?d=" in name:  # a URL of Label Studio's server
            name = f"local-files/{unquote(name.partition('?d=')[2])}"
        base_name = PurePosixPath(name).name
        if base_name not in by_base_name and unquote(base_name) in by_base_name:
            name = unquote(name)  # Label Studio's `/data/upload/3/a%20b.jpg`
            base_name = PurePosixPath(name).name
        paths = by_base_name.get(base_name, [])
        if not paths or not (is_plain_name(name) or TOOL_FOLDERS.intersection(name.split("/"))):
            if is_plain_name(name):
                names[row] = name
            continue
        tail = longest_tail(name, paths)
        if tail is None and len(paths) > 1:
            ambiguous.append(f"{names[row]!r} ({', '.join(sorted(paths)[:MAX_NAMED])})")
            continue
        replaced.append((names[row], tail or paths[0]))
        names[row] = tail or paths[0]
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


def _note(replaced: list[tuple[str, str]]) -> str:
    old, new = replaced[0]
    return (
        f"{len(replaced):,} file names are not paths below the image folder and were matched to "
        f"the files there, such as {old!r}: {new}"
    )
