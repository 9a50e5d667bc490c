"""The store that training reads: an index per split, and the packed images if there are any.

    prepared/index-train.arrow                  a row per image: id, file, size, its objects
    prepared/images-train-5be1c0de-00000.arrow  JPEG bytes in the index's order (with --pack), or
                                                RGB pixels, row by row (with --encoding raw)
    prepared/report.json                        what prepare dropped or changed

Arrow IPC files, which any Arrow reader opens. The index is read into memory, images when they are
needed. The index (index.py) is written last.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data import index, prepare_command
from ssdctl.data.annotations import ClassName
from ssdctl.data.duplicates import duplicate_warnings
from ssdctl.data.image_decode import Pixels, decode, encode, raw_pixels
from ssdctl.data.image_files import dataset_folder, require_root
from ssdctl.errors import DataError, DiskError
from ssdctl.files import (
    disk_error,
    disk_errors,
    is_plain_name,
    open_regular,
    read_errors,
    retry_transient,
    safe_join,
    unreadable,
)
from ssdctl.runtime.system import allow_open_files

MAX_SAMPLE = 128  # images; a split with 5% of the training images has one of them (99.9% certain)
POPULATE_READ = 22  # MADV_POPULATE_READ: load the pages, or fail


class Split(NamedTuple):
    """One split, open. Row i is the i-th image of the annotations.

    `boxes[starts[i]:starts[i + 1]]` are image i's boxes, as left, top, right, bottom in fractions
    of its width and height; `labels` go with them.
    """

    classes: list[ClassName]
    image_ids: NDArray[np.int64]  # N
    sizes: NDArray[np.int32]  # N x 2: width, height in pixels
    pixel_sizes: NDArray[np.int32]  # N x 2: of the encoded images, which `shrink` made smaller
    starts: NDArray[np.int64]  # N + 1
    boxes: NDArray[np.float32]  # M x 4
    labels: NDArray[np.int32]  # M
    usable: NDArray[np.bool_]  # N: whether the image opens
    trainable: NDArray[np.int64]  # rows with an image that opens and at least one box
    background: NDArray[
        np.int64
    ]  # rows with an image that opens and no object, not even a dropped one
    most_boxes: int  # on one image
    images: ImageFiles | PackedImages
    index_file: Path  # what detections are scored against
    is_raw: bool = False  # whether the images are decoded pixels
    shrink: int | None = None  # the shorter side of larger images in pixels
    upright: bool = False  # whether images of the annotated size are turned by their EXIF data
    divisions: Sequence[str] = ()  # states of --split's division, see `Division`
    warnings: Sequence[str] = ()  # for the user, on measuring with this split
    tiles: Tiles | None = None  # the last rows are tiles of the images: see `tiled`

    @property
    def num_images(self) -> int:
        """The number of images: rows that are not tiles."""
        return len(self.image_ids) - (0 if self.tiles is None else len(self.tiles.rows))

    def training_digest(self) -> str:
        """Return a fingerprint of the images to train on; tiles do not change it."""
        return hashlib.sha256(self.image_ids[self._trained_images()].tobytes()).hexdigest()[:12]

    def _trained_images(self) -> NDArray[np.int64]:
        return np.unique(self.trainable[self.trainable < self.num_images])

    def training_sample(self) -> list[str]:
        """Return hashes of up to 128 training images, which show if another split has some of them.

        The smallest hashes, so equal splits have equal samples; empty for fake data.
        """
        if self.index_file == Path():
            return []
        contents = index.image_contents(self.index_file)[self._trained_images()]
        return [f"{content:012x}" for content in np.unique(contents)[:MAX_SAMPLE].tolist()]

    def digest(self) -> str:
        """Return a fingerprint of all that training and scoring depend on, without the pixels."""
        arrays = self.image_ids, self.sizes, self.trainable, self.background
        parts = (array.tobytes() for array in arrays)
        categories = repr([(c.id, c.name) for c in self.classes]).encode()
        content = b"".join([self.labels_digest().encode(), *parts, categories])
        return hashlib.sha256(content).hexdigest()[:12]

    def labels_digest(self) -> str:
        """Return a fingerprint of the boxes of all images; tiles do not change it."""
        starts = self.starts[: self.num_images + 1]
        parts = starts, self.boxes[: starts[-1]], self.labels[: starts[-1]]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:12]

    def image_of(self, row: int) -> tuple[int, tuple[int, int, int, int] | None]:
        """Return the row of the image of a row; of a tile also its ltrb in pixels."""
        tile = row - self.num_images
        if self.tiles is None or tile < 0:
            return row, None
        image = int(self.tiles.rows[tile])
        left, top, right, bottom = self.tiles.in_pixels_of(self, slice(tile, tile + 1))[0].tolist()
        return image, (left, top, right, bottom)

    def read(self, row: int) -> bytes:
        """Return the encoded image of a row; of a tile or decoded pixels a PNG."""
        if self.is_raw or row >= self.num_images:
            return encode(self.decode(row), "PNG")
        return self.images.read(row)

    def decode(self, row: int, rows: int | None = None) -> Pixels:
        """Return the (H, W, 3) RGB pixels of an image, or at least its first `rows` pixel rows.

        They may be in memory that the thread's next call overwrites, or read-only.

        Raises:
            DataError: The image cannot be read.
            DiskError: The file system refuses to read it.
            ImageError: It cannot be decoded, or has another size.
        """
        row, window = self.image_of(row)
        if window is not None:
            left, top, right, bottom = window
            bottom = bottom if rows is None else min(bottom, top + rows)
            return self._decode_image(row, bottom)[top:bottom, left:right]
        return self._decode_image(row, rows)

    def _decode_image(self, row: int, rows: int | None) -> Pixels:
        width, height = self.pixel_sizes[row].tolist()
        if isinstance(self.images, PackedImages) and self.is_raw:
            return self.images.read_pixels(row, (width, height))
        return decode(self.images.read(row), (width, height), rows, self.upright)

    def location(self, row: int) -> str:
        """Return where the encoded image of a row is, for messages."""
        return self.images.location(self.image_of(row)[0])


class Tiles(NamedTuple):
    """K parts of images, the tiles of an image together, from its top to its bottom."""

    rows: NDArray[np.int64]  # K: which images, ascending
    windows: NDArray[np.int32]  # K x 4: ltrb in pixels of the annotated image

    def in_pixels_of(self, split: Split, chosen: slice = slice(None)) -> NDArray[np.int32]:
        """Return ltrb in pixels of the encoded images, which `shrink` made smaller."""
        rows = self.rows[chosen]
        scale = np.tile(split.pixel_sizes[rows] / split.sizes[rows], 2)
        ltrb = np.rint(self.windows[chosen] * scale).astype(np.int32)
        ltrb[:, 2:] = np.maximum(ltrb[:, 2:], ltrb[:, :2] + 1)
        return ltrb


class ImageFiles(NamedTuple):
    folder: Path
    names: Any  # a sequence, or an Arrow array, of N strings

    def path(self, row: int) -> Path:
        return self.folder / str(self.names[row])

    def read(self, row: int) -> bytes:
        path = self.path(row)
        try:
            return retry_transient(path.read_bytes)
        except OSError as error:
            raise unreadable(path, error) from None

    def location(self, row: int) -> str:
        return str(self.path(row))


class PackedImages:
    """Images packed into Arrow files.

    A file that is cut or cannot be read in the middle of a run would end the process (SIGBUS) when
    its mapped memory is touched. So encoded images are read. For decoded ones the size of the file
    is checked each time, and a system call, which returns an error, loads them the first time.
    """

    def __init__(self, folder: Path, shards: list[index.Shard]) -> None:
        if outside := [shard.file for shard in shards if not is_plain_name(shard.file)]:
            raise DataError(f"{folder}: its file {outside[0]!r} is not in that folder")
        allow_open_files(2 * len(shards))
        files = contextlib.ExitStack()
        weakref.finalize(self, files.close)
        self._shards: list[_Shard] = []
        spans = [np.empty((0, 2), np.int64)]
        for shard in shards:
            path = folder / shard.file
            with read_errors(path):
                file = files.enter_context(open_regular(path))
                if not os.fstat(file.fileno()).st_size:
                    raise index.damaged(path, "it is empty")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._shards.append(_Shard(path, file, mapped, sum(map(len, spans))))
            spans.append(_image_spans(path, mapped, shard.rows))
        self._spans = np.concatenate(spans)  # N x 2: where each image starts and ends in its file
        self._was_read = np.zeros(len(self._spans), np.bool_)

    def read(self, row: int) -> bytes:
        shard, start, end = self._span(row)
        with disk_errors(shard.path, "reading"):
            content = retry_transient(lambda: os.pread(shard.file.fileno(), end - start, start))
        self._require(len(content) == end - start, shard.path)
        return content

    def read_pixels(self, row: int, size: tuple[int, int]) -> Pixels:
        """Return the decoded pixels of a row in the mapped file, read-only.

        A copy would take a third of the time that training spends on such an image.

        Raises:
            DataError, DiskError: As `read`.
            ImageError: It has another size.
        """
        shard, start, end = self._span(row)
        self._require(os.fstat(shard.file.fileno()).st_size >= end, shard.path)
        if not self._was_read[row]:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                shard.map.madvise(POPULATE_READ, page, end - page)
            except OSError as error:
                if error.errno == errno.EINVAL:  # Linux before 5.14
                    return raw_pixels(self.read(row), size)
                self._require(error.errno != errno.EFAULT, shard.path)
                raise disk_error(error, shard.path, "reading") from None
            self._was_read[row] = True
        return raw_pixels(memoryview(shard.map)[start:end], size)

    def _span(self, row: int) -> tuple[_Shard, int, int]:
        start, end = self._spans[row].tolist()
        if start == end:
            raise DataError(
                f"{self.location(row)}: has no image",
                hint=index.repair_command(self._shard(row).path.parent),
            )
        return self._shard(row), start, end

    def _require(self, is_complete: bool, path: Path) -> None:
        if not is_complete:
            raise DiskError(
                f"{path}: the file was truncated while it was in use, or its disk cannot be read",
                hint=f"run {index.repair_command(path.parent)}, then the same command again",
            )

    def location(self, row: int) -> str:
        shard = self._shard(row)
        return f"{shard.path}, row {row - shard.first_row}"

    def _shard(self, row: int) -> _Shard:
        number = bisect.bisect_right(self._shards, row, key=lambda shard: shard.first_row)
        return self._shards[number - 1]


class _Shard(NamedTuple):
    path: Path
    file: IO[bytes]
    map: mmap.mmap
    first_row: int


def _image_spans(path: Path, mapped: mmap.mmap, num_rows: int) -> NDArray[np.int64]:
    """Return where each image of a shard starts and ends in the file (N x 2)."""
    content = pa.py_buffer(mapped)
    table = index.read_table(path, index.SHARD_COLUMNS, pa.BufferReader(content))
    if table.num_rows != num_rows:
        raise DataError(f"{path}: {table.num_rows} rows, not {num_rows}")
    spans = [np.empty((0, 2), np.int64)]
    for chunk in table.column("image").chunks:
        _, offsets, data = chunk.buffers()
        starts = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        # Without a usable image there are no bytes, and no address.
        start = data.address - content.address if data is not None and data.size else 0
        if data is not None and not 0 <= start <= content.size - data.size:
            raise index.damaged(path, "it is compressed")
        spans.append(start + np.stack([starts[:-1], starts[1:]], axis=1))
    return np.concatenate(spans)


def image_folder(root: Path, metadata: index.Metadata) -> Path:
    folder, name = dataset_folder(root), metadata.images
    return (
        Path(name) if name.startswith("/") else folder if name == "." else safe_join(folder, name)
    )


def open_splits(root: Path, folder: Path) -> dict[str, Split]:
    made = index.read_made(folder)
    if made is None:
        require_root(root)
        raise DataError(f"{root}: not prepared", hint=prepare_command(root, folder))
    return {split: open_split(root, folder, split) for split in made.splits}


def open_split(root: Path, folder: Path, split: str) -> Split:
    path = index.index_path(folder, split)
    metadata = index.require_metadata(path)
    table = index.read_table(path, index.INDEX_COLUMNS)
    sizes = np.stack([index.numbers(table, "width"), index.numbers(table, "height")], axis=1)
    starts, objects = index.read_objects(table, len(metadata.classes), path)
    boxes, labels, is_trained = (objects[n] for n in ("fractions", "labels", "is_trained"))
    if not is_trained.all():
        starts = np.concatenate([[0], np.cumsum(is_trained)])[starts]
        boxes, labels = boxes[is_trained], labels[is_trained]
    counts = np.diff(starts)
    is_usable = index.numbers(table, "usable")
    images: ImageFiles | PackedImages
    if metadata.packed:
        images = PackedImages(folder, metadata.shards)
    else:
        names = index.one_array(table, "file_name")
        if outside := [name for name in names.to_pylist() if not is_plain_name(name)]:
            raise index.damaged(path, f"{outside[0]!r} is not a plain path")
        images = ImageFiles(image_folder(root, metadata), names)
    return Split(
        classes=metadata.classes,
        image_ids=index.numbers(table, "image_id"),
        sizes=sizes,
        pixel_sizes=index.shrunk_sizes(sizes, metadata.shrink),
        starts=starts,
        boxes=boxes,
        labels=labels,
        usable=is_usable,
        trainable=np.nonzero(is_usable & (counts > 0))[0],
        background=np.nonzero(is_usable & index.numbers(table, "empty"))[0],
        most_boxes=int(counts.max(initial=0)),
        images=images,
        index_file=path,
        is_raw=metadata.packed and metadata.encoding == "raw",
        shrink=metadata.shrink,
        upright=bool(metadata.upright),
        divisions=metadata.made.divisions,
        warnings=duplicate_warnings(split, len(sizes), metadata.duplicates),
    )
