"""Notice which files of a dataset changed since its store was made.

    changes(root, folder, made)      # ["labels/a.txt changed", "b.jpg is new"]

The store has a table with a row per label file (all of them, and dataset.toml or data.yaml), per
image file that no split lists, and per image that --split ever divided. Label files of equal size
and time are the same; those of equal size and another time, as in a copy, are compared by content.
The index has the fingerprints of the listed images.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ssdctl.data import TOML, cached_store, index, is_refused, is_writable, usual_store
from ssdctl.data.annotations import Resolved, root_folder
from ssdctl.data.divide import Division
from ssdctl.data.formats import built_in, coco, load, recognized, yolo
from ssdctl.data.image_files import (
    dataset_folder,
    file_sizes,
    files_below,
    in_threads,
    is_image,
    relative_folder,
)
from ssdctl.data.store import image_folder
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.files import (
    DECODE_ERRORS,
    is_utf8,
    msgspec_type,
    open_regular,
    read_errors,
    write_bytes,
)
from ssdctl.runtime.safe_text import counted, printable_line

LABEL_SUFFIXES = (".txt", ".xml", ".csv", ".yaml", ".yml", ".names", ".data")
MAX_COMPARED = 200  # images of a split
MAX_PLUGIN_BYTES = 1 << 30  # larger files of a plugin's dataset are archives and videos
# The files of a run are not a dataset's, nor are those of `evaluate --report`.
RUN_FILES = {"metrics.jsonl", "config.toml"}, {"evaluation.json", "report.html"}
HASHED_BYTES = 4 << 20
UNLISTED_IMAGE = -1
# Whether --split trains on an image, and whether it is `gone` in the division.
SIDES = {-2: (True, False), -3: (False, False), -4: (True, True), -5: (False, True)}
COLUMNS = {
    "name": pa.binary(),  # relative to the dataset folder
    "bytes": pa.int64(),  # of a label file; of an image file UNLISTED_IMAGE or one of SIDES
    "modified_ns": pa.int64(),
    "content": pa.int64(),  # hash
}


class Sources(NamedTuple):
    """Label files, N, image files that no split lists, and how the images were divided."""

    names: list[str]
    bytes: NDArray[np.int64]  # N
    modified_ns: NDArray[np.int64]  # N
    content: NDArray[np.int64]  # N
    unlisted: list[str]
    division: Division


def label_files(root: Path, format_name: str, store: Path) -> list[str]:
    """Return the files that contain a dataset's labels, relative to the dataset folder."""
    folder = root_folder(root).absolute()
    if format_name == "coco":
        paths = [files.annotations for files in coco.splits_of(root).values()]
        if (root / TOML).is_file():
            paths.append(root / TOML)
        return sorted(os.path.relpath(path.absolute(), folder) for path in paths)
    base, files = _files_of(root, store)
    suffixes = (".json",) if format_name.endswith("-json") else LABEL_SUFFIXES
    if format_name not in built_in():  # a plugin may read any file
        others = [name for name in files if not is_image(PurePosixPath(name))]
        sizes = zip(others, file_sizes(base, others), strict=True)
        labels = [name for name, size in sizes if size is not None and size <= MAX_PLUGIN_BYTES]
    else:
        labels = [name for name in files if name.lower().endswith(suffixes) or name == TOML]
    return sorted(os.path.relpath(base / name, folder) for name in labels)


def _files_of(root: Path, store: Path) -> tuple[Path, list[str]]:
    base = dataset_folder(root).absolute()  # as the readers
    return base, _without_runs(files_below(base), os.path.relpath(store.absolute(), base))


def _other_formats(root: Path, store: Path, made: index.Made, names: Sequence[str]) -> list[str]:
    """Return messages on formats that would be recognized, too: `find` chooses or refuses them.

    Args:
        names: The label files of the store's format.
    """
    if made.conversion.source is not None or not root.is_dir() or (root / TOML).is_file():
        return []
    if "train" in coco.own_splits(root):  # whatever else is there
        formats = ["coco"]
    else:
        suffixes = (".json", *LABEL_SUFFIXES)
        others = {name for name in _files_of(root, store)[1] if name.lower().endswith(suffixes)}
        is_needed = not others <= {*names}
        formats = [name for name in built_in() if is_needed and load(name).recognize(root)]
    return [f"labels of the format {name} are new" for name in formats if name != made.format]


def _without_runs(names: Iterator[str], store: str) -> list[str]:
    """Return the files below a dataset folder that are neither in the store nor in a run folder."""
    files = list(names)
    own = dict[str, set[str]]()  # names by folder
    for folder, _, name in (file.rpartition("/") for file in files):
        if any(name in of_run for of_run in RUN_FILES):
            own.setdefault(folder, set()).add(name)
    runs = (folder for folder, found in own.items() if any(of <= found for of in RUN_FILES))
    left_out = tuple(f"{folder}/" for folder in {store, *runs} if folder)
    return [name for name in files if not name.startswith(left_out)]


def versions_of(folder: Path, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return size and time of each file; -1 for one that is absent."""

    def version(name: str) -> tuple[int, int]:
        try:
            status = (folder / name).stat()
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns

    return in_threads(version, names)


def contents_of(folder: Path, names: Sequence[str]) -> list[int]:
    """Return a hash of the content of each file.

    Raises:
        DiskError: A file cannot be read.
    """

    def content(name: str) -> int:
        digest = hashlib.sha256()
        with read_errors(folder / name), open_regular(folder / name) as file:
            while part := file.read(HASHED_BYTES):
                digest.update(part)
        return int.from_bytes(digest.digest()[:8], "big", signed=True)

    return in_threads(content, names)


def unlisted_images(
    root: Path, folders: Mapping[str, tuple[Path, Collection[str]]], store: Path, format_name: str
) -> list[str]:
    """Return the image files below image folders that no split lists.

    Of YOLO, only folders of listed images and of splits count if data.yaml names these.

    Args:
        folders: An image folder and the listed files by the name of the folder in the index.
    """
    found, in_splits = list[str](), set[str]()
    named = yolo.named_folders(root) if format_name == "yolo" else None
    only = None if named is None else [os.path.realpath(path) for path in named]
    for name, (folder, listed) in folders.items():
        relative = os.path.relpath(store.absolute(), folder.absolute())
        below = files_below(folder, skips_unreadable=True)
        files = _without_runs(below, relative) if folder.is_dir() else []
        others = sorted(filter(is_utf8, set(files).difference(listed)))
        if only is not None:
            own, real = {PurePosixPath(file).parent for file in listed}, os.path.realpath(folder)
            others = [
                file
                for file in others
                if not own.isdisjoint(PurePosixPath(file).parents)
                or any(Path(real, file).is_relative_to(path) for path in only)
            ]
        prefix = f"{name}/".removeprefix("./")
        found += [f"{prefix}{file}" for file in others if is_image(PurePosixPath(file))]
        in_splits.update(f"{prefix}{file}" for file in listed)
    return [file for file in dict.fromkeys(found) if file not in in_splits]  # folders may overlap


def note_unlisted(root: Path, resolved: dict[str, Resolved], unlisted: Sequence[str]) -> None:
    """Note image files that no split lists, in the first split of each folder with listed ones."""
    splits: dict[str, str] = {}  # by folder
    for split, (images, num_bytes) in resolved.items():
        prefix = f"{relative_folder(images.folder, root)}/".removeprefix("./")
        for name, size in zip(images.file_names, num_bytes, strict=True):
            if size is not None:
                splits.setdefault(f"{prefix}{name}".rpartition("/")[0], split)
    others: dict[str, list[str]] = {}  # by split
    for name in unlisted:
        if owner := splits.get(name.rpartition("/")[0]):
            others.setdefault(owner, []).append(name)
    for split, names in others.items():
        images, num_bytes = resolved[split]
        note = f"image files not in the dataset, left out: {len(names):,}, such as {names[0]}"
        resolved[split] = images._replace(notes=[*images.notes, note]), num_bytes


def write_sources(store: Path, sources: Sources) -> str:
    """Write the table to a store, and return the file's name, which depends on the content."""
    kind_of = {side: kind for kind, side in SIDES.items()}
    states, sides, gone, options = sources.division
    divided = [kind_of[is_train, path in gone] for path, is_train in sides.items()]
    kinds = np.array([UNLISTED_IMAGE] * len(sources.unlisted) + divided, np.int64)
    values = [
        [os.fsencode(name) for name in (*sources.names, *sources.unlisted, *sides)],
        *(np.concatenate([column, kinds]) for column in sources[1:4]),
    ]
    arrays = [pa.array(v, t) for v, t in zip(values, COLUMNS.values(), strict=True)]
    metadata = {"division": msgspec.json.encode((states, options))} if states else None
    table = pa.table(arrays, schema=pa.schema(COLUMNS.items(), metadata=metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    file = f"sources-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
    write_bytes(store / file, content)
    return file


def read_sources(path: Path) -> Sources:
    table = index.read_table(path, COLUMNS)
    num_bytes, modified_ns, content = (index.numbers(table, n) for n in list(COLUMNS)[1:])
    names = [os.fsdecode(name) for name in table.column("name").to_pylist()]
    labels = slice(int((num_bytes >= 0).sum()))
    kinds = [*zip(names, num_bytes.tolist(), strict=True)]
    unlisted = [name for name, kind in kinds if kind == UNLISTED_IMAGE]
    sides = {name: SIDES[kind] for name, kind in kinds if kind in SIDES}
    states, options = (), None
    if encoded := (table.schema.metadata or {}).get(b"division"):
        try:
            kind = msgspec_type(tuple[tuple[str, ...], tuple[float, str | None]])
            states, options = msgspec.json.decode(encoded, type=kind)
        except DECODE_ERRORS as error:
            raise index.damaged(path, error) from None
    division = Division(
        states,
        options=options,
        sides={name: is_train for name, (is_train, _) in sides.items()},
        gone={name for name, (_, is_gone) in sides.items() if is_gone},
    )
    return Sources(
        names[labels], num_bytes[labels], modified_ns[labels], content[labels], unlisted, division
    )


def last_store(root: Path, store: Path) -> Path:
    """Return the store that has the options of the last `prepare`: this one, else the dataset's."""
    usual, cached = usual_store(root), cached_store(root)
    stores = [usual, cached]
    if not is_writable(usual):  # its owner may have prepared it again
        stores.sort(key=_written_at, reverse=True)
    if store not in stores or is_writable(usual):
        stores.insert(0, store)
    known = (path for path in stores if path == store or not is_refused(path))
    return next((path for path in known if index.last_made(path) is not None), store)


def _written_at(store: Path) -> float:
    try:
        return max((path.stat().st_mtime for path in store.glob("index-*.arrow")), default=0)
    except OSError:
        return 0


def other_dataset(root: Path, store: Path) -> Path | None:
    """Return the dataset that a store was made of if it is not `root`, nor the same elsewhere.

    A copy is unchanged; one that is gone may have been moved, and changed since.
    """
    made, usual = index.last_made(store), usual_store(root)
    if made is None or os.path.realpath(store) == os.path.realpath(usual):
        return None
    last = Path(made.root)
    is_file = os.path.isfile(last) and root.is_file()  # noqa: PTH113 - others may not look there
    paths = (last, root) if is_file else map(root_folder, (last, root))
    if len({*map(os.path.realpath, paths)}) == 1:
        return None
    is_there, changed = os.path.exists(last), bool(changes(root, store, made))  # noqa: PTH110
    is_same = not (is_there and changed) and _is_moved(root, store, made, has_changed=changed)
    return None if is_same else last


def _is_moved(root: Path, store: Path, made: index.Made, *, has_changed: bool) -> bool:
    """Return whether most images that are in `root` are a store's; without images, most labels."""
    same: list[bool] = []
    with contextlib.suppress(DataError):  # damaged
        for split in made.splits:
            metadata = index.require_metadata(index.index_path(store, split))
            images = index.read_images(store, split, MAX_COMPARED)
            sizes = file_sizes(image_folder(root, metadata), images.names)
            pairs = zip(sizes, images.fingerprints.bytes.tolist(), strict=True)
            same += [a == b for a, b in pairs if a is not None]
        if not same and has_changed:
            recorded, folder = read_sources(store / made.sources), root_folder(root)
            versions = versions_of(folder, recorded.names)
            of_labels = zip(versions, recorded.bytes.tolist(), strict=True)
            same = [num_bytes == size for (size, _), num_bytes in of_labels if num_bytes]
    return 2 * sum(same) >= len(same) and (bool(same) or not has_changed)


def refuse_store_of_another(root: Path, store: Path) -> None:
    """Raise UsageError if a store, which is to be written, is of another dataset."""
    if (other := other_dataset(root, store)) is not None:
        raise UsageError(
            f"--store {store}: is the store of {other}",
            hint="choose another folder; `ssdctl prepare` with --force replaces it",
        )


def is_prepared(root: Path, folder: Path) -> bool:
    """Return whether the store has every split of the dataset with its current labels."""
    made = index.read_made(folder)
    return made is not None and not changes(root, folder, made)


def has_dataset(root: Path, store: Path) -> bool:
    """Return whether a dataset is there, or all its images in a store, which suffices."""
    made = None if root.exists() else index.read_made(store)
    if made is None or os.path.realpath(made.root) != os.path.realpath(root):
        return root.exists()
    paths = [index.index_path(store, split) for split in made.splits]
    return all(index.require_metadata(path).packed for path in paths)


def changes(root: Path, store: Path, made: index.Made) -> list[str]:
    """Return what changed since a store was made, as messages; empty if nothing did.

    Nothing changed if all labels are gone and no other format is there, or the folder cannot be
    read: a store is used without its dataset. Listed images are compared in `open_dataset` and
    `prepare`.
    """
    folder = root_folder(root)
    try:
        os.scandir(folder).close()
        recorded = read_sources(store / made.sources)
        names = label_files(root, made.format, store)
        # A label file that is broken, as one being written, may not be recognized.
        others = set(recorded.names).difference(names)
        names = sorted([*names, *(name for name in others if (folder / name).is_file())])
        if not names and not any(recognized(root)):
            return []
        found = _changed_labels(folder, recorded, names)
        found += _other_formats(root, store, made, names)
        images = _listed_images(root, store, made)
        unlisted = unlisted_images(root, images, store, made.format)
    except SsdctlError as error:  # reported when they are read again
        return [str(error)]
    except OSError:
        return []
    new = sorted(set(unlisted).difference(recorded.unlisted))
    return [*found, *_said(new, "image file", "new")]


def _changed_labels(folder: Path, recorded: Sources, names: list[str]) -> list[str]:
    known = {name: row for row, name in enumerate(recorded.names)}
    versions = versions_of(folder, names)
    resized, touched = [], []
    for name, (num_bytes, modified_ns) in zip(names, versions, strict=True):
        if (row := known.get(name)) is None:
            continue
        if num_bytes != recorded.bytes[row]:
            resized.append(name)
        elif modified_ns != recorded.modified_ns[row]:
            touched.append(name)
    contents = zip(touched, contents_of(folder, touched), strict=True)
    changed = [*resized, *(name for name, c in contents if c != recorded.content[known[name]])]
    new, gone = [n for n in names if n not in known], sorted(set(known).difference(names))
    groups = ((sorted(changed), "changed"), (new, "new"), (gone, "gone"))
    return [text for group, state in groups for text in _said(group, "label file", state)]


def _said(names: list[str], noun: str, state: str) -> list[str]:
    first = [printable_line(name) for name in names[:1]]
    if len(names) < 2:
        return [f"{name} {'changed' if state == 'changed' else f'is {state}'}" for name in first]
    verb = "changed" if state == "changed" else f"are {state}"
    return [f"{counted(len(names), noun)} {verb}, such as {first[0]}"]


def _listed_images(
    root: Path, store: Path, made: index.Made
) -> dict[str, tuple[Path, Collection[str]]]:
    folders: dict[str, tuple[Path, set[str]]] = {}
    for split in made.splits:
        metadata = index.require_metadata(index.index_path(store, split))
        images = folders.setdefault(metadata.images, (image_folder(root, metadata), set()))
        images[1].update(index.read_images(store, split).names)
    return {**folders}
