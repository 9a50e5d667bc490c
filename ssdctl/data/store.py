"""The store that training reads: an index per split, and the packed images if there are any.

    prepared/index-train.arrow                  a row per image: id, file, size, boxes, labels
    prepared/images-train-5be1c0de-00000.arrow  JPEG bytes in the index's order (with --pack), or
                                                RGB pixels, row by row (with --encoding raw)
    prepared/report.json                        what prepare dropped or changed

Arrow IPC files, memory-mapped: the page cache is shared by all ranks, and any Arrow reader opens
them. The index is written last; its metadata holds the class table, the shards and a fingerprint of
the annotations that it was made from, its rows a fingerprint of each image file.
"""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data.dataset import SplitFiles, find_splits
from ssdctl.data.formats.coco import ClassName
from ssdctl.data.formats.coco_slices import open_content, sha256
from ssdctl.data.image_check import Encoding, FingerprintColumns
from ssdctl.data.image_decode import Pixels, decode, encode_png, raw_pixels
from ssdctl.data.store_check import (
    FINGERPRINT_COLUMNS,
    IMAGE_COLUMNS,
    INDEX_COLUMNS,
    check_boxes,
    check_names,
    map_table,
)
from ssdctl.errors import DataError
from ssdctl.files import DECODE_ERRORS, is_plain_name, retry_transient

FORMAT = 3
METADATA_KEY = b"ssdctl"
Verified = Literal["no", "damaged dropped", "damaged kept"]  # whether each image was decoded


class Fingerprint(msgspec.Struct, frozen=True):
    """Identifies one version of an annotation file."""

    bytes: int
    modified_ns: int
    sha256: str


class Shard(msgspec.Struct, frozen=True):
    """A file of packed images."""

    file: str
    rows: int


class Metadata(msgspec.Struct, frozen=True):
    """The metadata of an index."""

    format: int
    classes: list[ClassName]
    fingerprint: Fingerprint
    key: str  # of the job that wrote the index
    packed: bool  # else the images are read from the dataset folder
    shards: list[Shard]
    shrink: int | None = None
    encoding: Encoding = "jpeg"  # of packed images; raw: decoded pixels
    verified: Verified = msgspec.field(default="no", name="strictly_verified")


class Split(NamedTuple):
    """One split, open. Row i is the i-th image of the annotation file.

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
    annotations: Path
    is_raw: bool = False  # whether the images are decoded pixels

    def read(self, row: int) -> bytes | memoryview:
        """Return the encoded image of a row: a PNG if the store has decoded pixels."""
        return encode_png(self.decode(row)) if self.is_raw else self.images.read(row)

    def decode(self, row: int, rows: int | None = None) -> Pixels:
        """Return the (H, W, 3) RGB pixels of an image, or at least its first `rows` pixel rows.

        They may be in memory that the thread's next call overwrites, or in the mapped file,
        read-only.

        Raises:
            DataError: The image cannot be read.
            ImageError: It cannot be decoded, or has another size.
        """
        width, height = self.pixel_sizes[row].tolist()
        content = self.images.read(row)
        if self.is_raw:
            return raw_pixels(content, (width, height))
        return decode(content, (width, height), rows)

    def place(self, row: int) -> str:
        """Return where the encoded image of a row is, for messages."""
        return self.images.place(row)


class ImageFiles(NamedTuple):
    """Images that are files in a folder."""

    folder: Path
    names: Any  # a sequence, or an Arrow array, of N strings

    def path(self, row: int) -> Path:
        return self.folder / str(self.names[row])

    def read(self, row: int) -> bytes:
        path = self.path(row)
        try:
            return retry_transient(path.read_bytes)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None

    def place(self, row: int) -> str:
        return str(self.path(row))


class PackedImages:
    """Images packed into Arrow files, mapped into memory."""

    def __init__(self, folder: Path, shards: list[Shard]) -> None:
        if outside := [shard.file for shard in shards if not is_plain_name(shard.file)]:
            raise DataError(f"{folder}: its part {outside[0]!r} is not in that folder")
        tables = [map_table(folder / shard.file, IMAGE_COLUMNS) for shard in shards]
        for table, shard in zip(tables, shards, strict=True):
            if table.num_rows != shard.rows:
                raise DataError(f"{folder / shard.file}: {table.num_rows} rows, not {shard.rows}")
        self._files = [(folder / shard.file, shard.rows) for shard in shards]
        chunks = [chunk for table in tables for chunk in table.column("image").chunks]
        self._chunks = [_offsets_and_data(chunk) for chunk in chunks]
        self._ends = list(itertools.accumulate(len(chunk) for chunk in chunks))

    def read(self, row: int) -> memoryview:
        chunk = bisect.bisect_right(self._ends, row)
        place = row - (self._ends[chunk - 1] if chunk else 0)
        offsets, data = self._chunks[chunk]
        content = data[offsets[place] : offsets[place + 1]]
        if not content:
            raise DataError(f"{self.place(row)}: has no image", hint="run ssdctl prepare --force")
        return content

    def place(self, row: int) -> str:
        ends = np.cumsum([rows for _, rows in self._files])
        number = int(np.searchsorted(ends, row, side="right"))
        path, rows = self._files[number]
        return f"{path}, row {row - ends[number] + rows}"


def _offsets_and_data(chunk: Any) -> tuple[NDArray[np.int64], memoryview]:
    """Return the buffers of a column of bytes; its scalars would be copies of the mapped file."""
    _, offsets, data = chunk.buffers()
    values = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    return values, memoryview(b"" if data is None else data)


def shrunk_sizes(sizes: NDArray[np.int32], shorter: int | None) -> NDArray[np.int32]:
    """Return (N, 2) image sizes after shrinking to a shorter side of at most `shorter` pixels."""
    if shorter is None:
        return sizes
    scale = np.minimum(1.0, shorter / sizes.min(axis=1, keepdims=True))
    return np.rint(sizes * scale).astype(np.int32)


def index_path(folder: Path, split: str) -> Path:
    return folder / f"index-{split}.arrow"


def is_same(fingerprint: Fingerprint, path: Path) -> bool:
    """Return whether the file still has this fingerprint; read it only if its time differs."""
    stat = path.stat()
    if stat.st_size != fingerprint.bytes:
        return False
    if stat.st_mtime_ns == fingerprint.modified_ns:
        return True
    return sha256(open_content(path)) == fingerprint.sha256


def read_metadata(folder: Path, split: str) -> Metadata | None:
    """Return the metadata of a split's index; None if there is none that this version reads."""
    path = index_path(folder, split)
    if not path.is_file():
        return None
    try:
        with pa.memory_map(str(path)) as source:
            raw = pa.ipc.open_file(source).schema.metadata or {}
        metadata = msgspec.json.decode(raw.get(METADATA_KEY, b"{}"), type=Metadata)
    except (pa.ArrowException, OSError, *DECODE_ERRORS):
        return None
    return metadata if metadata.format == FORMAT else None


def is_prepared(root: Path, folder: Path) -> bool:
    """Return whether the store has every split of the dataset, with its current annotations."""
    return all(
        (metadata := read_metadata(folder, split)) is not None
        and is_same(metadata.fingerprint, files.annotations)
        for split, files in find_splits(root, folder).items()
    )


def open_split(folder: Path, split: str, files: SplitFiles) -> Split:
    """Open one split of the store.

    Raises:
        DataError: There is no index, or it was made from other annotations.
    """
    metadata = read_metadata(folder, split)
    if metadata is None:
        raise DataError(f"{index_path(folder, split)}: no index; run ssdctl prepare")
    if not is_same(metadata.fingerprint, files.annotations):
        raise DataError(
            f"{files.annotations} changed since {folder} was prepared",
            hint="run ssdctl prepare again",
        )
    path = index_path(folder, split)
    table = map_table(path, INDEX_COLUMNS)
    sizes = np.stack([_numbers(table, "width"), _numbers(table, "height")], axis=1)
    labels = _array(table, "labels")
    boxes = _array(table, "fractions")
    check_boxes(labels, boxes, len(metadata.classes), path)
    starts = labels.offsets.to_numpy().astype(np.int64)
    counts = np.diff(starts)
    fractions = boxes.flatten().flatten()
    is_usable = _numbers(table, "usable")
    images: ImageFiles | PackedImages
    if metadata.packed:
        images = PackedImages(folder, metadata.shards)
    else:
        names = _array(table, "file_name")
        check_names(names, path)
        images = ImageFiles(files.images, names)
    return Split(
        classes=metadata.classes,
        image_ids=_numbers(table, "image_id"),
        sizes=sizes,
        pixel_sizes=shrunk_sizes(sizes, metadata.shrink),
        starts=starts,
        boxes=fractions.to_numpy().reshape(-1, 4),  # in the mapped file
        labels=labels.flatten().to_numpy(),
        usable=is_usable,
        trainable=np.nonzero(is_usable & (counts > 0))[0],
        most_boxes=int(counts.max(initial=0)),
        images=images,
        annotations=files.annotations,
        is_raw=metadata.packed and metadata.encoding == "raw",
    )


def read_fingerprints(
    folder: Path, split: str, at_most: int | None = None
) -> tuple[list[str], FingerprintColumns]:
    """Return the image files of a split and their fingerprints.

    Args:
        folder: The store's.
        split: Its name.
        at_most: Return only so many, evenly spaced; None: all.

    Raises:
        DataError: The index cannot be read.
    """
    table = map_table(index_path(folder, split), FINGERPRINT_COLUMNS)
    if at_most is not None and table.num_rows > at_most:
        table = table.take(np.linspace(0, table.num_rows - 1, at_most).astype(np.int64))
    columns = (_numbers(table, name) for name in FingerprintColumns._fields)
    return table.column("file_name").to_pylist(), FingerprintColumns(*columns)


def _array(table: Any, column: str) -> Any:
    """Return a column as one Arrow array; it is in the mapped file if that has a single chunk."""
    chunks = table.column(column)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def _numbers(table: Any, column: str) -> NDArray[Any]:
    return np.asarray(table.column(column).to_numpy())
