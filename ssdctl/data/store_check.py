"""Check Arrow files of a store before they are read: datasets are passed on with their stores.

Arrow itself does not check what it maps into memory: an offset that is too large is read beyond the
end of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

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


def map_table(path: Path, types: Types) -> Any:
    """Return a table with its buffers in the mapped file, after checking its structure.

    Raises:
        DataError: It cannot be read, lacks a column, or refers to bytes outside the file.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=True)
        columns = table.schema.names  # not checked above: it may not be UTF-8
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None
    for name, type_ in types.items():
        index = columns.index(name) if columns.count(name) == 1 else -1
        if index < 0 or table.schema.field(index).type != type_:
            raise _damaged(path, f"no column {name} of type {type_}")
        if table.column(index).null_count and name != "image":
            raise _damaged(path, f"empty values in the column {name}")
    return table


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
