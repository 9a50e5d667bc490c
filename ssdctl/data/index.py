"""The index of a split: what training, scoring and reports read instead of the annotations.

A row per image: its id, file, size and file's fingerprint, whether it can be used, and lists of its
objects: every box unclipped with its area, as scoring needs it, and clipped in fractions of the
image, as training does. The metadata has the classes, the shards of packed images, and how the
annotations were read. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations
from ssdctl.data.check import Objects
from ssdctl.data.classes import ClassName
from ssdctl.data.dataset import Conversion, Labels, labels_changed
from ssdctl.data.image_check import Encoding, FingerprintColumns
from ssdctl.data.split_files import SPLITS
from ssdctl.data.store_check import (
    FINGERPRINT_COLUMNS,
    IMAGE_COLUMNS,
    METADATA_KEY,
    TRUTH_COLUMNS,
    Shard,
    check_objects,
    numbers,
    one_array,
    read_table,
)
from ssdctl.errors import DataError
from ssdctl.files import DECODE_ERRORS, atomic_write

if TYPE_CHECKING:
    from ssdctl.data.image_check_jobs import Report

FORMAT = 4  # version 3 had no boxes to score against
T = TypeVar("T")
_OBJECT_COLUMNS = ("labels", "boxes", "areas", "is_crowd")
Verified = Literal["no", "damaged dropped", "damaged kept"]  # whether each image was decoded


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """How the images of a split are stored: what indexes of earlier versions have, too."""

    format: int
    packed: bool  # else the images are read from the dataset folder
    shards: list[Shard]
    shrink: int | None = None
    encoding: Encoding = "jpeg"  # of packed images; raw: decoded pixels
    verified: Verified = msgspec.field(default="no", name="strictly_verified")


class Made(msgspec.Struct, frozen=True):
    """How the annotations of all splits of a store were read."""

    format: str  # coco, voc, ...
    conversion: Conversion
    labels: Labels
    splits: list[str]
    version: str  # of ssdctl


class Metadata(Packing, frozen=True, kw_only=True):
    """The metadata of an index."""

    key: str  # identifies the index
    classes: list[ClassName]
    images: str  # their folder, relative to the dataset folder if it is below it
    origin: str  # the file or folder of the labels, for messages
    made: Made


def index_path(folder: Path, split: str) -> Path:
    return folder / f"index-{split}.arrow"


def read_metadata(folder: Path, split: str) -> Metadata | None:
    """Return the metadata of a split's index; None if there is none that this version reads."""
    metadata = _decode_metadata(index_path(folder, split), Metadata)
    return metadata if metadata is not None and metadata.format == FORMAT else None


def read_packing(folder: Path, split: str) -> Packing | None:
    """Return how a split's images are stored, by the index of this or an earlier version."""
    return _decode_metadata(index_path(folder, split), Packing)


def earlier_packing(folder: Path) -> Packing | None:
    """Return how a store of an earlier version has its images; None if there is no such store."""
    found = [p for split in SPLITS if (p := read_packing(folder, split)) is not None]
    return found[0] if found and all(p.format < FORMAT for p in found) else None


def _decode_metadata(path: Path, kind: type[T]) -> T | None:
    if not path.is_file():
        return None
    try:
        with pa.OSFile(str(path)) as source:
            raw = pa.ipc.open_file(source).schema.metadata or {}
        return msgspec.json.decode(raw.get(METADATA_KEY, b"{}"), type=kind)
    except (pa.ArrowException, OSError, *DECODE_ERRORS):
        return None


def read_made(folder: Path) -> Made | None:
    """Return how a store was made; None if it is incomplete, or not of this version."""
    made = [m.made for split in SPLITS if (m := read_metadata(folder, split)) is not None]
    is_complete = made and all(m == made[0] for m in made) and len(made) == len(made[0].splits)
    return made[0] if is_complete else None


def is_prepared(root: Path, folder: Path) -> bool:
    """Return whether the store has every split of the dataset, with its current annotations.

    Changed labels of a format that has a file per image do not count: `open_dataset` warns of them.
    """
    made = read_made(folder)
    if made is None:
        return False
    is_few = bool(made.labels.content)
    return not (is_few and labels_changed(root, made.format, made.conversion, made.labels))


def read_annotations(index: Path) -> Annotations:
    """Return the annotations of an index: every object that has a box, image by image.

    Raises:
        DataError: It cannot be read.
    """
    metadata = _decode_metadata(index, Metadata)
    if metadata is None or metadata.format != FORMAT:
        raise DataError(f"{index}: no index; run ssdctl prepare")
    table = read_table(index, TRUTH_COLUMNS)
    starts = check_objects(table, len(metadata.classes), index)
    lists = {name: one_array(table, name).flatten() for name in _OBJECT_COLUMNS}
    return Annotations(
        folder=Path(metadata.images),
        origin=Path(metadata.origin),
        image_ids=numbers(table, "image_id"),
        file_names=table.column("file_name").to_pylist(),
        sizes=np.stack([numbers(table, "width"), numbers(table, "height")], axis=1).astype(
            np.int64
        ),
        classes=metadata.classes,
        ids=np.arange(1, starts[-1] + 1),
        rows=np.repeat(np.arange(table.num_rows, dtype=np.int32), np.diff(starts)),
        labels=lists["labels"].to_numpy(),
        boxes=lists["boxes"].flatten().to_numpy().reshape(-1, 4),
        areas=lists["areas"].to_numpy(),
        is_crowd=lists["is_crowd"].to_numpy(zero_copy_only=False),
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
    table = read_table(index_path(folder, split), FINGERPRINT_COLUMNS)
    if at_most is not None and table.num_rows > at_most:
        table = table.take(np.linspace(0, table.num_rows - 1, at_most).astype(np.int64))
    columns = (numbers(table, name) for name in FingerprintColumns._fields)
    return table.column("file_name").to_pylist(), FingerprintColumns(*columns)


def read_images(path: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the names, the sizes (N x 2) and the usability of images, of any version's index.

    Raises:
        DataError: It cannot be read.
    """
    table = read_table(path, IMAGE_COLUMNS)
    names: list[str] = table.column("file_name").to_pylist()
    return names, _sizes(table), numbers(table, "usable")


def _sizes(table: Any) -> NDArray[np.int64]:
    return np.stack([numbers(table, name) for name in ("width", "height")], axis=1).astype(np.int64)


def write_index(
    path: Path,
    names: Sequence[str],
    image_ids: NDArray[np.int64],
    sizes: NDArray[np.int64],
    objects: Objects,
    images: Report,
    metadata: Metadata,
) -> None:
    offsets = pa.array(objects.starts, pa.int32())

    def lists(values: NDArray[Any]) -> Any:
        array = pa.array(values.reshape(-1))
        if values.ndim == 2:
            array = pa.FixedSizeListArray.from_arrays(array, values.shape[1])
        return pa.ListArray.from_arrays(offsets, array)

    columns: dict[str, Any] = {
        "image_id": pa.array(image_ids),
        "file_name": pa.array(names, pa.string()),
        "width": pa.array(sizes[:, 0], pa.int32()),
        "height": pa.array(sizes[:, 1], pa.int32()),
        "usable": pa.array([problem is None for problem in images.problems], pa.bool_()),
        **{name: lists(values) for name, values in objects._asdict().items() if name != "starts"},
        **{
            name: pa.array([getattr(f, name) for f in images.fingerprints], pa.int64())
            for name in FingerprintColumns._fields
        },
    }
    table = pa.table(columns, metadata={METADATA_KEY: msgspec.json.encode(metadata)})
    with atomic_write(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def remove_if_it_has(folder: Path, split: str, part: str) -> None:
    """Remove the index of a split if the parts that it names are about to change."""
    metadata = read_metadata(folder, split)
    if metadata is not None and part in [shard.file for shard in metadata.shards]:
        index_path(folder, split).unlink()


def remove_unused(folder: Path, splits: Collection[str]) -> None:
    """Delete what no index names: parts of other jobs, splits that no longer exist."""
    used = {f"index-{split}.arrow" for split in splits}
    for split in splits:
        metadata = read_metadata(folder, split)
        used |= {shard.file for shard in metadata.shards} if metadata else set()
    for pattern in ("index-*.arrow", "images-*.arrow", ".checked-*.arrow"):
        for path in folder.glob(pattern):
            if path.name not in used:
                path.unlink(missing_ok=True)
