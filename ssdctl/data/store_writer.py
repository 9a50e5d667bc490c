"""Write the index of a split, and delete files of the store that no index names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ssdctl.data import store
from ssdctl.data.dataset import SplitFiles
from ssdctl.data.formats.coco_check import Boxes
from ssdctl.data.formats._coco_json import ImageEntry
from ssdctl.data.image_check_jobs import Report
from ssdctl.files import atomic_write


def write_index(
    path: Path,
    images: list[ImageEntry],
    boxes: Boxes,
    report: Report,
    metadata: store.Metadata,
) -> None:
    offsets = pa.array(boxes.starts, pa.int32())
    ltrb, fractions = (
        pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 4)
        for values in (boxes.ltrb, boxes.fractions)
    )
    columns: dict[str, Any] = {
        "image_id": pa.array([i.id for i in images], pa.int64()),
        "file_name": pa.array([i.file_name for i in images], pa.string()),
        "width": pa.array([i.width for i in images], pa.int32()),
        "height": pa.array([i.height for i in images], pa.int32()),
        "usable": pa.array([problem is None for problem in report.problems], pa.bool_()),
        "boxes": pa.ListArray.from_arrays(offsets, ltrb),
        "fractions": pa.ListArray.from_arrays(offsets, fractions),
        "labels": pa.ListArray.from_arrays(offsets, pa.array(boxes.labels, pa.int32())),
        "is_crowd": pa.ListArray.from_arrays(offsets, pa.array(boxes.is_crowd)),
        "bytes": pa.array([m.bytes for m in report.fingerprints], pa.int64()),
        "modified_ns": pa.array([m.modified_ns for m in report.fingerprints], pa.int64()),
        "sketch": pa.array([m.sketch for m in report.fingerprints], pa.int64()),
    }
    table = pa.table(columns, metadata={store.METADATA_KEY: msgspec.json.encode(metadata)})
    with atomic_write(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def remove_unused(folder: Path, splits: dict[str, SplitFiles]) -> None:
    """Delete what no index names: parts of other jobs, splits that no longer exist."""
    used = {f"index-{split}.arrow" for split in splits}
    for split in splits:
        metadata = store.read_metadata(folder, split)
        used |= {shard.file for shard in metadata.shards} if metadata else set()
    for pattern in ("index-*.arrow", "images-*.arrow", ".checked-*.arrow"):
        for path in folder.glob(pattern):
            if path.name not in used:
                path.unlink(missing_ok=True)
