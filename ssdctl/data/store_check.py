"""Check Arrow files of a store before they are read: datasets are passed on with their stores.

Arrow itself does not check what it maps into memory: an offset that is too large is read beyond the
end of the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

Types = Mapping[str, pa.DataType]

IMAGE_COLUMNS: Types = {"image": pa.large_binary()}
FINGERPRINT_COLUMNS: Types = {
    **dict.fromkeys(("bytes", "modified_ns", "sketch"), pa.int64()),
    "file_name": pa.string(),
}
INDEX_COLUMNS: Types = {
    "image_id": pa.int64(),
    "file_name": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "usable": pa.bool_(),
    "fractions": pa.list_(pa.list_(pa.float32(), 4)),
    "labels": pa.list_(pa.int32()),
}


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
        _require_once(table.schema.names, IMAGE_COLUMNS, path)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _damaged(path, error) from None
    _check_columns(table, IMAGE_COLUMNS, path)
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


def check_boxes(labels: Any, fractions: Any, num_classes: int, path: Path) -> None:
    """Check that the lists of labels and boxes belong together, and that the labels exist.

    Raises:
        DataError: They do not.
    """
    values, boxes = labels.flatten(), fractions.flatten()
    if values.null_count or boxes.null_count or boxes.flatten().null_count:
        raise _damaged(path, "empty values in its boxes")
    if not np.array_equal(np.diff(labels.offsets), np.diff(fractions.offsets)):
        raise _damaged(path, "it has more labels than boxes, or fewer")
    numbers = values.to_numpy()
    if len(numbers) and not (numbers.min() >= 1 and numbers.max() <= num_classes):
        raise _damaged(path, f"a label is not one of its {num_classes} classes")


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
