"""Image files: which files are images, where a folder has them, their sizes, what has changed."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import SPLIT_WORDS, split_of
from ssdctl.data.image_decode import as_image_error, open_image, read_header
from ssdctl.errors import DataError
from ssdctl.files import disk_error, is_plain_name

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    | {".gif", ".avif", ".jp2", ".ppm", ".pgm", ".tga", ".heic", ".heif"}
)
CHUNK_FILES = 64  # that a thread looks at before it takes others
SKETCH_BYTES = 4096
# Of these formats, files with other pixels may have the same size, beginning and end.
UNCOMPRESSED = (".bmp", ".pbm", ".pgm", ".ppm", ".pnm", ".tga", ".tif", ".tiff")
OF_SYSTEMS = ("__MACOSX", "lost+found")
ANNOTATION_FOLDERS = ("annotations", "Annotations", "labels")
T = TypeVar("T")
R = TypeVar("R")


class FingerprintColumns(NamedTuple):
    """Identify the versions of N image files."""

    bytes: NDArray[np.int64]  # N
    modified_ns: NDArray[np.int64]  # N
    sketch: NDArray[np.int64]  # N: CRC-32 of the first and last 4 KiB: copies have another time

    def of_contents(self) -> NDArray[np.int64]:
        """Return size and checksum of each file as one number, (N,); copies have the same."""
        return (self.bytes << 32) + self.sketch


def require_root(root: Path) -> None:
    if not root.exists():
        raise DataError(
            f"{root}: no such dataset folder",
            hint="name it with --data DIR, or fetch one: ssdctl download --dest DIR",
        )


def is_image(path: Path | PurePosixPath) -> bool:
    return is_image_name(path.name)


def is_image_name(name: str) -> bool:
    """Return whether a base name is the name of an image; `._a.jpg` is metadata of macOS."""
    stem, dot, suffix = name.rpartition(".")
    return bool(stem) and dot + suffix.lower() in IMAGE_SUFFIXES and not name.startswith("._")


def refuse_unlisted(error: OSError) -> None:
    """Raise DiskError for a folder that cannot be listed, unless it is gone; for `os.walk`."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise disk_error(error, error.filename, "listing")


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Return what is in a folder and has this suffix, sorted; empty if there is no folder.

    Raises:
        DiskError: The folder cannot be listed.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    except OSError as error:
        refuse_unlisted(error)
        return []


def files_below(
    folder: Path, max_depth: int | None = None, *, skips_unreadable: bool = False
) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, and in links that are no cycle.

    A folder has one name in each split: its own if it is below, else that of the first link. The
    metadata of systems (`._a.txt`, `__MACOSX`, `lost+found`) is left out.

    Raises:
        DiskError: A folder cannot be listed.
    """
    refuse = None if skips_unreadable else refuse_unlisted
    visited = set[tuple[str, str | None]]()
    unread = [folder]  # links to folders are read after all folders
    for top in unread:
        for parent, folders, files in os.walk(top, onerror=refuse):
            real, prefix = os.path.realpath(parent), os.path.relpath(parent, folder)
            if (real, split_of(prefix)) in visited:
                folders.clear()
                continue
            visited.add((real, split_of(prefix)))
            folders[:] = sorted(
                f
                for f in folders
                if not (f.startswith(".") or f in OF_SYSTEMS or _is_store(f"{parent}/{f}"))
            )
            if max_depth is not None and prefix != "." and prefix.count("/") + 1 >= max_depth:
                folders.clear()
            links = [link for f in folders if (link := Path(parent, f)).is_symlink()]
            unread += [f for f in links if not Path(real).is_relative_to(os.path.realpath(f))]
            for file in files:
                if not file.startswith("._"):
                    yield file if prefix == "." else f"{prefix}/{file}"


def _is_store(folder: str) -> bool:
    return folder.endswith("prepared") and any(Path(folder).glob("*.arrow"))


def dataset_folder(path: Path) -> Path:
    """Return the folder of images and labels, of a dataset that may be named by its label file."""
    if not path.is_file():
        return path
    folder = path.parent
    if folder.name in ("", ".."):  # typed in or below the folder of the labels
        return folder / ".." if folder.resolve().name in ANNOTATION_FOLDERS else folder
    return folder.parent if folder.name in ANNOTATION_FOLDERS else folder


def relative_folder(path: Path, root: Path) -> str:
    """Return a path relative to the dataset folder if it is below it, else absolute."""
    path, base = path.absolute(), dataset_folder(root).absolute()
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


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
    folder: Path,
    names: Sequence[str],
    fingerprints: FingerprintColumns,
    *,
    may_be_gone: bool = False,
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
            return status.st_mtime_ns == modified_ns or sketch_of(path, num_bytes) == sketch
        except FileNotFoundError:
            return may_be_gone
        except (OSError, ValueError):  # a name with a null byte
            return False

    images = list(zip(names, *(column.tolist() for column in fingerprints), strict=True))
    same = in_threads(is_same, images)
    return [name for name, found in zip(names, same, strict=True) if not found]


def is_uncompressed(path: str) -> bool:
    return path.lower().endswith(UNCOMPRESSED)


def sketch_of(path: str, num_bytes: int) -> int:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        if is_uncompressed(path):
            return zlib.crc32(file.readall())
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
