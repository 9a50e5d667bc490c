"""Image files: which files are images, where a folder has them, their sizes, what has changed.

Labeling tools write the paths of their own server or of another machine: `images\\x.jpg`,
`/data/upload/3/x.jpg`, `..\\..\\label-studio\\media\\upload\\4\\x.jpg`. `resolve_images` makes
backslashes slashes, removes leading folders as far as needed, and uses a base name that occurs once
in the image folder. Other absolute names and names with `..` are left as they are; `check` refuses
them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED, SPLIT_WORDS, Annotations, refuse, split_of
from ssdctl.data.image_decode import as_image_error, open_image, read_header
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    | {".gif", ".avif", ".jp2", ".ppm", ".pgm", ".tga", ".heic", ".heif"}
)
TOOL_FOLDERS = {"upload", "uploads", "label-studio", "local-files"}
CHUNK_FILES = 64  # that a thread looks at before it takes others
SKETCH_BYTES = 4096
ANNOTATION_FOLDERS = ("annotations", "Annotations", "labels")
T = TypeVar("T")
R = TypeVar("R")


class FingerprintColumns(NamedTuple):
    """Identify the versions of N image files."""

    bytes: NDArray[np.int64]  # N
    modified_ns: NDArray[np.int64]  # N
    sketch: NDArray[np.int64]  # N: CRC-32 of the first and last 4 KiB: copies have another time


def is_image(path: Path | PurePosixPath) -> bool:
    """Return whether a file has the name of an image; `._a.jpg` is metadata of macOS."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("._")


def files_below(folder: Path, max_depth: int | None = None) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, following links to folders once."""
    visited = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [f for f in folders if not f.startswith(".") and not f.endswith("prepared")]
        prefix = os.path.relpath(parent, folder)
        if max_depth is not None and prefix != "." and prefix.count("/") + 1 >= max_depth:
            folders.clear()
        for file in files:
            yield file if prefix == "." else f"{prefix}/{file}"


def dataset_folder(path: Path) -> Path:
    """Return the folder of images and labels, of a dataset that may be named by its label file."""
    if not path.is_file():
        return path
    return path.parent.parent if path.parent.name in ANNOTATION_FOLDERS else path.parent


def split_folders(root: Path, split: str) -> Iterator[Path]:
    """Yield the folders with the name of a split: `images/Train`, `val2017`, `obj_Train_data`."""
    for base in (root / "images", root):
        for folder in sorted(base.iterdir()) if base.is_dir() else ():
            word = folder.name.lower().removeprefix("obj_").removesuffix("_data")
            if SPLIT_WORDS.get(word.removesuffix("2017")) == split:
                yield from (folder / "images", folder)


def require_image_folder(folder: Path, split: str, origin: Path) -> None:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such image folder (split {split})",
            hint=f"the images of {origin.name} belong there, or a link to them",
        )


def find_by_name(root: Path, names: Sequence[tuple[str, str]], labels: Path) -> list[str]:
    """Return where the images that a label file names, each with its split, are below a folder.

    A name may lack folders and suffix. If it fits several files, the split's folder decides.
    """
    by_name: dict[str, list[str]] = {}
    for file in files_below(root):
        if is_image(PurePosixPath(file)):
            for name in (*_tails(file), PurePosixPath(file).stem):
                by_name.setdefault(name, []).append(file)
    found, missing, ambiguous = list[str](), list[str](), list[str]()
    for name, split in names:
        files = by_name.get(name, [])
        if len(files) > 1:
            folders = {"train", None} if split == "train" else {split}
            files = [file for file in files if split_of(file.rpartition("/")[0]) in folders]
        if len(files) != 1:
            (ambiguous if files else missing).append(name)
        found += files
    hint = "export with images, or copy them"
    refuse(labels, f"images that are not below {root}", missing, hint)
    refuse(labels, f"image names that fit several files below {root}", ambiguous)
    return found


def _tails(path: str) -> list[str]:
    """Return a path, and the same without its first folders, to its base name."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def resolve_images(annotations: Annotations) -> tuple[Annotations, list[int | None]]:
    """Replace file names by paths of existing files, and absent image sizes by the files'.

    Returns also the files' sizes in bytes, None for a file that does not exist.
    """
    notes, folder = list(annotations.notes), annotations.folder
    names, sizes = list(annotations.file_names), annotations.sizes
    num_bytes = file_sizes(folder, names)
    rows = [row for row, size in enumerate(num_bytes) if size is None]
    if rows and folder.is_dir() and (replaced := _replace_names(names, rows, folder)):
        old, new = replaced[0]
        notes.append(
            "file names that are not paths below the image folder, matched to the files there: "
            f"{len(replaced):,}, such as {old!r} to {new}"
        )
        for row, size in zip(rows, file_sizes(folder, [names[r] for r in rows]), strict=True):
            num_bytes[row] = size
    unsized = [row for row in np.nonzero((sizes == 0).any(axis=1))[0] if num_bytes[row] is not None]
    if unsized:
        sizes = sizes.copy()
        sizes[unsized] = [size_or_none(folder / names[row]) for row in unsized]
        if num_sized := int(sizes[unsized].all(axis=1).sum()):
            notes.append(f"images without width and height, taken from the files: {num_sized:,}")
        sizes[unsized] = sizes[unsized].clip(1)  # dropped when checked, with the reason
    return annotations._replace(file_names=names, sizes=sizes, notes=notes), num_bytes


def _replace_names(names: list[str], rows: Sequence[int], folder: Path) -> list[tuple[str, str]]:
    """Resolve the names of images in place; return the pairs of old and new ones."""
    by_base_name: dict[str, list[str]] = {}
    for path in files_below(folder):
        by_base_name.setdefault(PurePosixPath(path).name, []).append(path)
    replaced, ambiguous = [], []
    for row in rows:
        old, name = names[row], names[row].replace("\\", "/")
        if "/local-files/?d=" in name:  # a URL of Label Studio's server
            name = f"local-files/{unquote(name.partition('?d=')[2])}"
        base_name = PurePosixPath(name).name
        if base_name not in by_base_name and unquote(base_name) in by_base_name:
            name = unquote(name)  # Label Studio's `/data/upload/3/a%20b.jpg`
            base_name = PurePosixPath(name).name
        paths, is_plain = by_base_name.get(base_name, []), is_plain_name(name)
        if not paths or not (is_plain or TOOL_FOLDERS.intersection(name.split("/"))):
            if is_plain:
                names[row] = name
            continue
        # Of several files, the one whose path is the longest end of the name.
        fitting = paths if len(paths) == 1 else [t for t in _tails(name)[:-1] if t in paths]
        if fitting:
            names[row] = fitting[0]
            replaced.append((old, fitting[0]))
        else:
            ambiguous.append(f"{old!r} ({', '.join(sorted(paths)[:MAX_NAMED])})")
    hint = "write file_name as a path relative to the image folder"
    refuse(folder, "file names that fit several files", ambiguous, hint)
    return replaced


def header_size(path: Path, *, upright: bool = False) -> tuple[int, int]:
    """Return width and height by the header; `upright`: as it is shown, by its orientation."""
    try:
        with open_image(path) as image:
            header = read_header(image)
    except Exception as error:
        raise DataError(f"{path}: {as_image_error(error)}") from None
    return header.upright_size if upright else header.stored_size


def size_or_none(path: Path, *, upright: bool = False) -> tuple[int, int]:
    """Like `header_size`, but 0 x 0 for a file that is dropped, with the reason, when checked."""
    try:
        return header_size(path, upright=upright)
    except DataError:
        return 0, 0


def changed_images(
    folder: Path, names: Sequence[str], fingerprints: FingerprintColumns
) -> list[str]:
    """Return the files that are missing or changed; those whose time differs are opened."""
    base = str(folder)

    def is_same(image: tuple[str, int, int, int]) -> bool:
        name, num_bytes, modified_ns, sketch = image
        path = f"{base}/{name}"
        try:
            status = os.stat(path)  # noqa: PTH116 - millions of them
            if status.st_size != num_bytes:
                return False
            return status.st_mtime_ns == modified_ns or _sketch(path, num_bytes) == sketch
        except (OSError, ValueError):  # a name with a null byte
            return False

    images = list(zip(names, *(column.tolist() for column in fingerprints), strict=True))
    same = in_threads(is_same, images)
    return [name for name, found in zip(names, same, strict=True) if not found]


def _sketch(path: str, num_bytes: int) -> int:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        head = file.read(SKETCH_BYTES)
        tail = os.pread(file.fileno(), SKETCH_BYTES, max(num_bytes - SKETCH_BYTES, 0))
    return zlib.crc32(tail, zlib.crc32(head))


def file_sizes(folder: Path, names: list[str]) -> list[int | None]:
    """Return the size of each file in bytes; None if it does not exist, or is not in the folder."""
    base = str(folder)

    def size(name: str) -> int | None:
        if is_plain_name(name):
            with contextlib.suppress(OSError):
                status = os.stat(f"{base}/{name}")  # noqa: PTH116 - a hundred thousand of them
                return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    return in_threads(size, names)


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply `work` to each item, in order; in threads, because a network file system serves many
    requests at a time."""

    def process(start: int) -> list[R]:
        return [work(item) for item in items[start : start + CHUNK_FILES]]

    with ThreadPoolExecutor(16) as pool:
        return [r for chunk in pool.map(process, range(0, len(items), CHUNK_FILES)) for r in chunk]
