"""Check Arrow files of a store before they are read: datasets are passed on with their stores.

Arrow itself does not check what it maps into memory: an offset that is too large is read beyond the
end of the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

METADATA_KEY = b"ssdctl"
Types = Mapping[str, pa.DataType]

SHARD_COLUMNS: Types = {"image": pa.large_binary()}
FINGERPRINT_COLUMNS: Types = {
    **dict.fromkeys(("bytes", "modified_ns", "sketch"), pa.int64()),
    "file_name": pa.string(),
}
IMAGE_COLUMNS: Types = {
    "image_id": pa.int64(),
    "file_name": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "usable": pa.bool_(),
}
INDEX_COLUMNS: Types = {
    **IMAGE_COLUMNS,
    "labels": pa.list_(pa.int32()),
    "is_trained": pa.list_(pa.bool_()),
    "fractions": pa.list_(pa.list_(pa.float32(), 4)),
}
TRUTH_COLUMNS: Types = {
    **IMAGE_COLUMNS,
    "labels": pa.list_(pa.int32()),
    "boxes": pa.list_(pa.list_(pa.float64(), 4)),
    "areas": pa.list_(pa.float64()),
    "is_crowd": pa.list_(pa.bool_()),
}


class Shard(msgspec.Struct, frozen=True):
    """A file of packed images."""

    file: str
    rows: int


def read_table(path: Path, types: Types) -> Any:
    """Return the columns of a table in memory, after checking its structure.

    Raises:
        DataError: It cannot be read, lacks a column, or refers to bytes outside the file.
    """
    try:
        with pa.OSFile(str(path)) as source:
            names = pa.ipc.open_file(source).schema.names
            _require_once(names, types, path)
            options = pa.ipc.IpcReadOptions(included_fields=[names.index(n) for n in types])
            table = pa.ipc.open_file(source, options=options).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None
    _check_columns(table, types, path)
    return table


def one_array(table: Any, column: str) -> Any:
    """Return a column as one Arrow array."""
    chunks = table.column(column)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def numbers(table: Any, column: str) -> NDArray[Any]:
    return np.asarray(table.column(column).to_numpy())


def image_spans(path: Path, mapped: mmap.mmap) -> list[NDArray[np.int64]]:
    """Return where the images of a shard are: an array for each chunk of the column.

    Each array has the start of every image in the file, and the end of the last one.

    Raises:
        DataError: It cannot be read, is compressed, or refers to bytes outside the file.
    """
    try:
        content = pa.py_buffer(mapped)
        table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        table.validate(full=True)
        _require_once(table.schema.names, SHARD_COLUMNS, path)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _damaged(path, error) from None
    _check_columns(table, SHARD_COLUMNS, path)
    spans = []
    for chunk in table.column("image").chunks:
        _, offsets, data = chunk.buffers()
        starts = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        start = 0 if data is None else data.address - content.address
        if data is not None and not 0 <= start <= content.size - data.size:
            raise _damaged(path, "it is compressed")
        spans.append(starts + start)
    return spans


def _require_once(names: Sequence[str], types: Types, path: Path) -> None:
    for name, type_ in types.items():
        if names.count(name) != 1:
            raise _damaged(path, f"no column {name} of type {type_}")


def _check_columns(table: Any, types: Types, path: Path) -> None:
    for name, type_ in types.items():
        if table.schema.field(name).type != type_:
            raise _damaged(path, f"no column {name} of type {type_}")
        if table.column(name).null_count and name != "image":
            raise _damaged(path, f"empty values in the column {name}")


def check_objects(table: Any, num_classes: int, path: Path) -> NDArray[np.int64]:
    """Check that the lists of objects belong together, and that their labels exist.

    Returns:
        Where the objects of each of the N images start, and the end of the last (N + 1).

    Raises:
        DataError: They do not.
    """
    starts: NDArray[np.int64] | None = None
    for name in table.schema.names:
        if not pa.types.is_list(table.schema.field(name).type):
            continue
        lists = one_array(table, name)
        values = lists.flatten()
        while pa.types.is_fixed_size_list(values.type) and not values.null_count:
            values = values.flatten()
        if values.null_count:
            raise _damaged(path, "empty values in its boxes")
        offsets = lists.offsets.to_numpy().astype(np.int64)
        if starts is not None and not np.array_equal(np.diff(offsets), np.diff(starts)):
            raise _damaged(path, "it has more labels than boxes, or fewer")
        starts = offsets - offsets[0]
        if name == "labels":
            labels = values.to_numpy()
            if len(labels) and not (labels.min() >= 1 and labels.max() <= num_classes):
                raise _damaged(path, f"a label is not one of its {num_classes} classes")
    assert starts is not None
    return starts


def check_names(names: Any, path: Path) -> None:
    """Check that image files are below their folder.

    Raises:
        DataError: One is not.
    """
    outside = [name for name in names.to_pylist() if not is_plain_name(name)]
    if outside:
        raise _damaged(path, f"{outside[0]!r} is not a plain path")


def _damaged(path: Path, problem: object) -> DataError:
    return DataError(
        f"{path}: not a readable part of a store: {problem}", hint="run ssdctl prepare --force"
    )
