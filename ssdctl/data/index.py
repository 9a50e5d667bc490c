"""The index of a split: what training, scoring and reports read instead of the annotations.

A row per image: its id, file, size and file's fingerprint, whether it can be used, whether it is
empty (no object, not even a dropped one), and lists of its objects: every box unclipped with its
area, as scoring needs it, and clipped in fractions of the image, as training does. The metadata has
the classes, the shards of packed images, and how the annotations were read.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.config import PrepareConfig
from ssdctl.data import STORE_NAME, prepare_command, usual_store
from ssdctl.data.annotations import SPLITS, Annotations, ClassName, Conversion
from ssdctl.data.check import Objects
from ssdctl.data.duplicates import Duplicates
from ssdctl.data.image_files import FingerprintColumns, sketch_of
from ssdctl.errors import DataError
from ssdctl.files import DECODE_ERRORS, disk_error, msgspec_type, sync

METADATA_KEY = b"ssdctl"
STORE_FILE = re.compile(
    r"(index-[a-z]+|sources-[0-9a-f]{16}|(images|\.checked)-[a-z]+-[0-9a-f]{8}-\d{5,})\.arrow"
)
Encoding = Literal["jpeg", "raw"]
Verified = Literal["no", "damaged dropped", "damaged kept"]  # whether each image was decoded
Types = Mapping[str, pa.DataType]

SPREAD = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing
FINGERPRINT_COLUMNS = dict.fromkeys(FingerprintColumns._fields, pa.int64())
SHARD_COLUMNS = {"image": pa.large_binary()}
RESULT_COLUMNS = {"problem": pa.string(), "note": pa.string()} | FINGERPRINT_COLUMNS
NULLABLE = ("image", "problem", "note")
IMAGE_COLUMNS: Types = {
    "image_id": pa.int64(),
    "file_name": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "usable": pa.bool_(),
}
INDEX_COLUMNS: Types = {
    **IMAGE_COLUMNS,
    "empty": pa.bool_(),
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

# What reading a damaged file raises; other errors of Arrow are ValueErrors.
READ_ERRORS = (pa.ArrowException, OSError, ValueError, MemoryError)


class Shard(msgspec.Struct, frozen=True):
    file: str
    rows: int


class Made(msgspec.Struct, frozen=True):
    """How the annotations of all splits of a store were read."""

    format: str  # coco, voc, ...
    conversion: Conversion
    sources: str  # the file of the store that lists the files they were read from
    splits: list[str]
    version: str  # ssdctl's
    root: str  # the dataset, an absolute path
    divisions: tuple[str, ...] = ()  # the states of a `Division`; none: not divided by --split


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal[5]
    packed: bool  # else the images are read from the dataset folder
    shards: list[Shard]
    shrink: int | None = None
    encoding: Encoding = "jpeg"  # packed files; raw: decoded pixels
    verified: Verified = msgspec.field(default="no", name="strictly_verified")
    key: str  # identifies the index, and the report on its images
    upright: bool | msgspec.UnsetType = msgspec.UNSET  # see `Annotations`; absent: nothing to turn
    classes: list[ClassName]
    images: str  # their folder, relative to the dataset folder if it is below it
    origin: str  # the file or folder of the labels, for messages
    made: Made
    duplicates: list[Duplicates]  # images that an earlier split has, too


def index_path(folder: Path, split: str) -> Path:
    return folder / f"index-{split}.arrow"


def read_metadata(folder: Path, split: str) -> Metadata | None:
    """Return the metadata of a split's index; None if there is none that this version reads."""
    path = index_path(folder, split)
    try:
        if not path.is_file():
            return None
        with pa.OSFile(str(path)) as source:
            raw = pa.ipc.open_file(source).schema.metadata or {}
        return msgspec.json.decode(raw.get(METADATA_KEY, b"{}"), type=msgspec_type(Metadata))
    except (*READ_ERRORS, *DECODE_ERRORS) as error:
        _raise_refusal(error, path)
        return None


def _raise_refusal(error: BaseException, path: Path) -> None:
    """Raise DiskError for a refusal of the system: the file may be whole. Arrow's has no number."""
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR):
        raise disk_error(error, path, "reading") from None


def require_metadata(path: Path) -> Metadata:
    metadata = read_metadata(path.parent, path.stem.removeprefix("index-"))
    if metadata is None:
        raise DataError(f"{path}: no index", hint=repair_command(path.parent))
    return metadata


def packing_options(stored: Metadata | PrepareConfig) -> list[str]:
    """Return the options on images that the next `prepare` does not remember."""
    is_packed = stored.packed if isinstance(stored, Metadata) else stored.pack
    options = ["--no-pack"] * (not is_packed)
    options += [] if stored.shrink is None else ["--shrink", str(stored.shrink)]
    return options + ([] if stored.encoding == "jpeg" else ["--encoding", stored.encoding])


def again_command(root: Path, folder: Path, *options: str) -> str:
    """Return the command that prepares a dataset as its store was, with more options."""
    stored = next((m for s in SPLITS if (m := read_metadata(folder, s)) is not None), None)
    return prepare_command(root, folder, *(packing_options(stored) if stored else ()), *options)


def repair_command(folder: Path) -> str:
    """Return the command that writes a store again; with DIR if its dataset is not known."""
    named, made = Path(str(folder).removesuffix(f".{STORE_NAME}")), last_made(folder)
    roots = [root for root in (folder.parent, named) if usual_store(root) == folder]
    return again_command([*roots, Path(made.root if made else "DIR")][0], folder, "--force")


def read_made(folder: Path) -> Made | None:
    """Return how a store was made; None if it is incomplete, or not of this version."""
    made = [m.made for split in SPLITS if (m := read_metadata(folder, split)) is not None]
    is_complete = made and all(m == made[0] for m in made) and len(made) == len(made[0].splits)
    return made[0] if is_complete else None


def last_made(folder: Path) -> Made | None:
    """Return how a store was made the last time, even if it is incomplete by now."""
    found = (m.made for split in SPLITS if (m := read_metadata(folder, split)) is not None)
    return next(found, None)


def is_complete(file: Path) -> bool:
    """Return whether an Arrow file is there, and was not cut."""
    try:
        with pa.OSFile(str(file)) as source:
            pa.ipc.open_file(source)
    except READ_ERRORS as error:
        _raise_refusal(error, file)
        return False
    return True


def read_annotations(index: Path) -> Annotations:
    """Return the annotations of an index: every object that has a box, image by image."""
    metadata = require_metadata(index)
    table = read_table(index, {**TRUTH_COLUMNS, **FINGERPRINT_COLUMNS})
    starts, objects = read_objects(table, len(metadata.classes), index)
    return Annotations(
        folder=Path(metadata.images),
        origin=Path(metadata.origin),
        image_ids=numbers(table, "image_id"),
        file_names=table.column("file_name").to_pylist(),
        sizes=_sizes(table),
        classes=metadata.classes,
        ids=np.arange(1, starts[-1] + 1),
        rows=np.repeat(np.arange(table.num_rows, dtype=np.int32), np.diff(starts)),
        labels=objects["labels"],
        boxes=objects["boxes"],
        areas=objects["areas"],
        is_crowd=objects["is_crowd"],
        upright=bool(metadata.upright),
        contents=_contents_of(table),
    )


def read_areas(index: Path) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the areas of the objects that are trained on, in square pixels, and which are crowds.

    They are in the order of `Split.boxes`.
    """
    names = ("labels", "areas", "is_crowd")
    types = {**{name: TRUTH_COLUMNS[name] for name in names}, "is_trained": pa.list_(pa.bool_())}
    table = read_table(index, types)
    _, objects = read_objects(table, len(require_metadata(index).classes), index)
    is_trained = objects["is_trained"]
    return objects["areas"][is_trained], objects["is_crowd"][is_trained]


class IndexedImages(NamedTuple):
    """The images of a split, as its index lists them."""

    ids: NDArray[np.int64]
    names: list[str]
    sizes: NDArray[np.int64]  # N x 2
    is_usable: NDArray[np.bool_]
    fingerprints: FingerprintColumns


def read_images(folder: Path, split: str, at_most: int | None = None) -> IndexedImages:
    table = read_table(index_path(folder, split), {**IMAGE_COLUMNS, **FINGERPRINT_COLUMNS})
    if at_most is not None and table.num_rows > at_most:
        table = table.take(np.linspace(0, table.num_rows - 1, at_most).astype(np.int64))
    return IndexedImages(
        numbers(table, "image_id"),
        table.column("file_name").to_pylist(),
        _sizes(table),
        numbers(table, "usable"),
        fingerprints_of(table),
    )


def image_contents(index: Path) -> NDArray[np.uint64]:
    """Return a hash of 48 bits of each image file's size and checksum, (N,)."""
    return _contents_of(read_table(index, FINGERPRINT_COLUMNS))


def content_of(path: Path) -> int:
    """Return the hash of an image file as `image_contents` does.

    Raises:
        OSError: The file cannot be read.
    """
    num_bytes = path.stat().st_size
    columns = np.array([[num_bytes], [0], [sketch_of(str(path), num_bytes)]], np.int64)
    return int(_spread(FingerprintColumns(*columns))[0])


def _contents_of(table: Any) -> NDArray[np.uint64]:
    return _spread(fingerprints_of(table))


def _spread(fingerprints: FingerprintColumns) -> NDArray[np.uint64]:
    return fingerprints.of_contents().astype(np.uint64) * SPREAD >> np.uint64(16)


def fingerprints_of(table: Any) -> FingerprintColumns:
    return FingerprintColumns(*(numbers(table, name) for name in FingerprintColumns._fields))


def _sizes(table: Any) -> NDArray[np.int64]:
    return np.stack([numbers(table, name) for name in ("width", "height")], axis=1).astype(np.int64)


def write_index(
    file: IO[bytes],
    annotations: Annotations,
    objects: Objects,
    is_usable: NDArray[np.bool_],
    is_empty: NDArray[np.bool_],
    fingerprints: FingerprintColumns,
    metadata: Metadata,
) -> None:
    offsets = pa.array(objects.starts, pa.int32())

    def lists(values: NDArray[Any]) -> Any:
        array = pa.array(values.reshape(-1))
        if values.ndim == 2:
            array = pa.FixedSizeListArray.from_arrays(array, values.shape[1])
        return pa.ListArray.from_arrays(offsets, array)

    columns: dict[str, Any] = {
        "image_id": pa.array(annotations.image_ids),
        "file_name": pa.array(annotations.file_names, pa.string()),
        "width": pa.array(annotations.sizes[:, 0], pa.int32()),
        "height": pa.array(annotations.sizes[:, 1], pa.int32()),
        "usable": pa.array(is_usable),
        "empty": pa.array(is_empty),
        **{name: lists(values) for name, values in objects._asdict().items() if name != "starts"},
        **{name: pa.array(values) for name, values in fingerprints._asdict().items()},
    }
    table = pa.table(columns, metadata={METADATA_KEY: msgspec.json.encode(metadata)})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    file.flush()
    sync(file.fileno())


def remove_unused(folder: Path, splits: Collection[str]) -> None:
    """Delete what no index names: chunks of other jobs, splits that no longer exist."""
    used = {index_path(folder, split).name for split in splits}
    for split in splits:
        if (metadata := read_metadata(folder, split)) is not None:
            used |= {metadata.made.sources, *(shard.file for shard in metadata.shards)}
    for path in folder.glob("*.arrow"):
        if is_store_file(path.name) and path.name not in used:
            path.unlink(missing_ok=True)


def is_store_file(name: str) -> bool:
    """Return whether a file has the name of an index, of sources, or of a chunk of images."""
    return STORE_FILE.fullmatch(name) is not None


def read_table(path: Path, types: Types, source: Any = None) -> Any:
    """Return columns of a table, in memory or of an opened `source`, after checking its structure.

    Raises:
        DataError: It cannot be read, lacks a column, or refers to bytes outside the file.
    """
    try:
        with source or pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if source is None:  # columns that are selected are copied
                fields = [n for n, name in enumerate(reader.schema.names) if name in types]
                options = pa.ipc.IpcReadOptions(included_fields=fields)
                reader = pa.ipc.open_file(file, options=options)
            table = reader.read_all()
        table.validate(full=True)
    except READ_ERRORS as error:
        _raise_refusal(error, path)
        raise damaged(path, error) from None
    for name, type_ in types.items():
        number = table.schema.get_field_index(name)  # -1 if there are two
        if number < 0 or table.schema.field(number).type != type_:
            raise damaged(path, f"no column {name} of type {type_}")
        if table.column(name).null_count and name not in NULLABLE:
            raise damaged(path, f"empty values in the column {name}")
    return table


def one_array(table: Any, column: str) -> Any:
    chunks = table.column(column)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def numbers(table: Any, column: str) -> NDArray[Any]:
    return np.asarray(table.column(column).to_numpy())


def read_objects(
    table: Any, num_classes: int, path: Path
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Return the columns of objects, after checking that they belong together.

    Returns:
        Where the objects of each of the N images start, and the end of the last (N + 1); and the
        columns of all objects by name: (M, 4) boxes, else (M,).
    """
    starts = np.zeros(1, np.int64)
    columns: dict[str, NDArray[Any]] = {}
    for field in table.schema:
        if not pa.types.is_list(field.type):
            continue
        lists = one_array(table, field.name)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        if columns and not np.array_equal(offsets - offsets[0], starts):
            raise damaged(path, "it has more labels than boxes, or fewer")
        starts = offsets - offsets[0]
        values = lists.flatten()
        is_box = pa.types.is_fixed_size_list(values.type)
        if is_box and not values.null_count:
            values = values.flatten()
        if values.null_count:
            raise damaged(path, "empty values in its boxes")
        column = values.to_numpy(zero_copy_only=False)
        columns[field.name] = column.reshape(-1, 4) if is_box else column
    labels = columns["labels"]
    if len(labels) and not (labels.min() >= 1 and labels.max() <= num_classes):
        raise damaged(path, f"a label is not one of its {num_classes} classes")
    return starts, columns


def damaged(path: Path, problem: object) -> DataError:
    return DataError(
        f"{path}: not a readable part of a store: {problem}", hint=repair_command(path.parent)
    )


def shrunk_sizes(sizes: NDArray[np.int32], shorter: int | None) -> NDArray[np.int32]:
    """Return (N, 2) image sizes after shrinking to a shorter side of at most `shorter` pixels."""
    if shorter is None:
        return sizes
    scale = np.minimum(1.0, shorter / sizes.min(axis=1, keepdims=True))
    return np.rint(sizes * scale).astype(np.int32)
