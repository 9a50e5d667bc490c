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
import itertools
import mmap
import os
import weakref
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data.annotations import root_folder
from ssdctl.data.classes import ClassName
from ssdctl.data.image_check import shrunk_sizes
from ssdctl.data.image_decode import Pixels, decode, encode_png, raw_pixels
from ssdctl.data.index import (
    INDEX_COLUMNS,
    SHARD_COLUMNS,
    Metadata,
    Shard,
    check_columns,
    check_objects,
    damaged,
    index_path,
    numbers,
    one_array,
    read_made,
    read_metadata,
    read_table,
)
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
    most_boxes: int  # on one image
    images: ImageFiles | PackedImages
    index_file: Path  # what detections are scored against
    is_raw: bool = False  # whether the images are decoded pixels

    def read(self, row: int) -> bytes:
        """Return the encoded image of a row: a PNG if the store has decoded pixels."""
        return encode_png(self.decode(row)) if self.is_raw else self.images.read(row)

    def decode(self, row: int, rows: int | None = None) -> Pixels:
        """Return the (H, W, 3) RGB pixels of an image, or at least its first `rows` pixel rows.

        They may be in memory that the thread's next call overwrites, or read-only.

        Raises:
            DataError: The image cannot be read.
            DiskError: The file system refuses to read it.
            ImageError: It cannot be decoded, or has another size.
        """
        width, height = self.pixel_sizes[row].tolist()
        if isinstance(self.images, PackedImages) and self.is_raw:
            return self.images.read_pixels(row, (width, height))
        return decode(self.images.read(row), (width, height), rows)

    def place(self, row: int) -> str:
        """Return where the encoded image of a row is, for messages."""
        return self.images.place(row)


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

    def place(self, row: int) -> str:
        return str(self.path(row))


class PackedImages:
    """Images packed into Arrow files.

    A file that is cut or cannot be read in the middle of a run would end the process (SIGBUS) when
    its mapped memory is touched. So encoded images are read. For decoded ones the size of the file
    is checked each time, and a system call, which returns an error, loads them the first time.
    """

    def __init__(self, folder: Path, shards: list[Shard]) -> None:
        if outside := [shard.file for shard in shards if not is_plain_name(shard.file)]:
            raise DataError(f"{folder}: its part {outside[0]!r} is not in that folder")
        allow_open_files(2 * len(shards))
        files = contextlib.ExitStack()
        weakref.finalize(self, files.close)
        self._chunks: list[_Chunk] = []
        for shard in shards:
            path = folder / shard.file
            with read_errors(path):
                file = files.enter_context(open_regular(path))
            self._chunks += _chunks(path, file, shard.rows)
        self._was_read = np.zeros(sum(shard.rows for shard in shards), np.bool_)
        self._ends = list(itertools.accumulate(len(c.starts) - 1 for c in self._chunks))

    def read(self, row: int) -> bytes:
        chunk, start, end = self._span(row)
        with disk_errors(chunk.path, "reading"):
            content = retry_transient(lambda: os.pread(chunk.file.fileno(), end - start, start))
        self._require(len(content) == end - start, chunk.path)
        return content

    def read_pixels(self, row: int, size: tuple[int, int]) -> Pixels:
        """Return the decoded pixels of a row in the mapped file, read-only.

        A copy would take a third of the time that training spends on such an image.

        Raises:
            DataError, DiskError: As `read`.
            ImageError: It has another size.
        """
        chunk, start, end = self._span(row)
        self._require(os.fstat(chunk.file.fileno()).st_size >= end, chunk.path)
        if not self._was_read[row]:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                chunk.map.madvise(POPULATE_READ, page, end - page)
            except OSError as error:
                if error.errno == errno.EINVAL:  # Linux before 5.14
                    return raw_pixels(self.read(row), size)
                self._require(error.errno != errno.EFAULT, chunk.path)
                raise disk_error(error, chunk.path, "reading") from None
            self._was_read[row] = True
        return raw_pixels(memoryview(chunk.map)[start:end], size)

    def _span(self, row: int) -> tuple[_Chunk, int, int]:
        chunk, place = self._locate(row)
        start, end = chunk.starts[place : place + 2].tolist()
        if start == end:
            raise DataError(f"{self.place(row)}: has no image", hint="run ssdctl prepare --force")
        return chunk, start, end

    def _require(self, is_complete: bool, path: Path) -> None:
        if not is_complete:
            raise DiskError(
                f"{path}: the file was cut while it was in use, or its disk cannot be read",
                hint="run ssdctl prepare --force, then the same command again",
            )

    def place(self, row: int) -> str:
        chunk, place = self._locate(row)
        return f"{chunk.path}, row {chunk.first_row + place}"

    def _locate(self, row: int) -> tuple[_Chunk, int]:
        number = bisect.bisect_right(self._ends, row)
        return self._chunks[number], row - (self._ends[number - 1] if number else 0)


class _Chunk(NamedTuple):
    """Some consecutive images of a shard."""

    path: Path
    file: IO[bytes]
    map: mmap.mmap
    first_row: int  # in the shard
    starts: NDArray[np.int64]  # where each image starts in the file, and the end of the last


def _chunks(path: Path, file: IO[bytes], num_rows: int) -> list[_Chunk]:
    with read_errors(path):
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    spans = _image_spans(path, mapped)
    rows = list(itertools.accumulate((len(starts) - 1 for starts in spans), initial=0))
    if rows[-1] != num_rows:
        raise DataError(f"{path}: {rows[-1]} rows, not {num_rows}")
    return [
        _Chunk(path, file, mapped, row, starts) for row, starts in zip(rows, spans, strict=False)
    ]


def _image_spans(path: Path, mapped: mmap.mmap) -> list[NDArray[np.int64]]:
    """Return where the images of a shard are: an array for each chunk of the column.

    Each array has the start of every image in the file, and the end of the last one.
    """
    try:
        content = pa.py_buffer(mapped)
        table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise damaged(path, error) from None
    check_columns(table, SHARD_COLUMNS, path)
    spans = []
    for chunk in table.column("image").chunks:
        _, offsets, data = chunk.buffers()
        starts = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        start = 0 if data is None else data.address - content.address
        if data is not None and not 0 <= start <= content.size - data.size:
            raise damaged(path, "it is compressed")
        spans.append(starts + start)
    return spans


def image_folder(root: Path, metadata: Metadata) -> Path:
    folder, name = root_folder(root), metadata.images
    return (
        Path(name) if name.startswith("/") else folder if name == "." else safe_join(folder, name)
    )


def open_splits(root: Path, folder: Path) -> dict[str, Split]:
    made = read_made(folder)
    if made is None:
        raise DataError(f"{root}: not prepared", hint=f"ssdctl prepare --data {root}")
    return {split: open_split(root, folder, split) for split in made.splits}


def open_split(root: Path, folder: Path, split: str) -> Split:
    path = index_path(folder, split)
    metadata = read_metadata(folder, split)
    if metadata is None:
        raise DataError(f"{path}: no index; run ssdctl prepare")
    table = read_table(path, INDEX_COLUMNS)
    sizes = np.stack([numbers(table, "width"), numbers(table, "height")], axis=1)
    starts = check_objects(table, len(metadata.classes), path)
    labels, fractions, is_trained = (
        one_array(table, name).flatten() for name in ("labels", "fractions", "is_trained")
    )
    boxes = fractions.flatten().to_numpy().reshape(-1, 4)
    labels, is_trained = labels.to_numpy(), is_trained.to_numpy(zero_copy_only=False)
    if not is_trained.all():
        starts = np.concatenate([[0], np.cumsum(is_trained)])[starts]
        boxes, labels = boxes[is_trained], labels[is_trained]
    counts = np.diff(starts)
    is_usable = numbers(table, "usable")
    images: ImageFiles | PackedImages
    if metadata.packed:
        images = PackedImages(folder, metadata.shards)
    else:
        names = one_array(table, "file_name")
        if outside := [name for name in names.to_pylist() if not is_plain_name(name)]:
            raise damaged(path, f"{outside[0]!r} is not a plain path")
        images = ImageFiles(image_folder(root, metadata), names)
    return Split(
        classes=metadata.classes,
        image_ids=numbers(table, "image_id"),
        sizes=sizes,
        pixel_sizes=shrunk_sizes(sizes, metadata.shrink),
        starts=starts,
        boxes=boxes,
        labels=labels,
        usable=is_usable,
        trainable=np.nonzero(is_usable & (counts > 0))[0],
        most_boxes=int(counts.max(initial=0)),
        images=images,
        index_file=path,
        is_raw=metadata.packed and metadata.encoding == "raw",
    )
