"""Dataset formats, one per file. A format has the name of its file: `cvat_xml.py` is `cvat-xml`.

    name, module = find(Path("export"))
    splits = module.read(Path("export"))

A format is a module with the functions of `Format`, and LOOKED_FOR, the names of its files for
messages. An entry point of `ssdctl.datasets` adds one. Files that begin with an underscore are not
formats.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ssdctl.data.annotations import MAX_NAMED, SPLIT_WORDS, Annotations, from_images
from ssdctl.data.image_files import ANNOTATION_FOLDERS, dataset_folder, files_below, is_image
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.files import open_regular
from ssdctl.runtime.packages import entry_point_names, load_entry_point

ENTRY_POINTS = "ssdctl.datasets"
MAX_FOLDERS = 20  # that are searched for a dataset, for the hint of an error
MAX_FILES = 20_000  # that are searched for what a folder has
MAX_READ = 50  # files of a kind whose content is looked at
HEAD_BYTES = 1_000_000
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
# As in train.record-00000-of-00010 and train-00000-of-00256; not a checkpoint's .data-*.
TFRECORD = re.compile(r"\.(tf_?)?records?(-\d+-of-\d+)?$|(?<!\.data)-\d{5}-of-\d{5}$")
TFRECORD_HINT = (
    "TFRecords are not read: give the images and labels that they were made from; COCO is "
    "fetched by `ssdctl download --dest DIR`"
)
CONVERT_LABELME = "convert labelme's files to Pascal VOC's layout with its labelme2voc.py"
log = logging.getLogger(__name__)


class Format(Protocol):
    """A module of this folder, or a plugin. `path` is a folder, or a file such as data.yaml."""

    def recognise(self, path: Path) -> Path | bool | None:
        """Return by which file or folder of labels a dataset is of this format, if it is.

        It is fast and writes nothing.
        """

    def read(self, path: Path) -> dict[str, Annotations]:
        """Return the splits, in the order train, val, test.

        Raises:
            DataError: It is not of this format, or broken.
        """


class _Plugin(NamedTuple):
    """A format of another package: a module with both functions, or a function.

    The function returns the images of each split, and the names of the classes.
    """

    name: str
    plugin: Any

    def recognise(self, path: Path) -> Path | bool | None:
        with self._errors(path):
            ask = getattr(self.plugin, "recognise", None)
            return ask(path) if ask else None

    def read(self, path: Path) -> dict[str, Annotations]:
        with self._errors(path):
            result = getattr(self.plugin, "read", self.plugin)(path)
            if isinstance(result, dict):
                return result
            splits, classes = result
            used = {b.name for images in splits.values() for image in images for b in image.boxes}
            if unlisted := used - set(classes):
                problem = f"--from {self.name} does not list the class {min(unlisted)!r}"
                raise DataError(f"{path}: {problem}")
            return from_images(splits, classes, dataset_folder(path), path)

    @contextlib.contextmanager
    def _errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except SsdctlError:
            raise
        except Exception as error:
            raise DataError(
                f"{path}: --from {self.name} failed: {type(error).__name__}: {error}",
                hint=f"report it to the package of the entry point {self.name} of {ENTRY_POINTS}",
            ) from error


def built_in() -> list[str]:
    return sorted(p.stem.replace("_", "-") for p in Path(__file__).parent.glob("[!_]*.py"))


def names() -> list[str]:
    return [*built_in(), *entry_point_names(ENTRY_POINTS)]


def load(name: str) -> Format:
    if name in built_in():
        module: Format = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        return module
    if name in entry_point_names(ENTRY_POINTS):
        return _Plugin(name, load_entry_point(ENTRY_POINTS, name))
    raise UsageError(
        f"--from {name}: no such dataset format", hint=f"choose from {', '.join(names())}"
    )


def find(path: Path, name: str | None = None) -> tuple[str, Format]:
    """Return the format of a folder or of a file such as data.yaml; without a name, detect it."""
    from ssdctl.data.formats import coco

    if name is not None and not path.is_file():
        return name, load(name)  # it says what is absent
    if coco.own_splits(path):
        return "coco", coco  # there may be other labels as well
    found = [entry for entry in _recognized(path) if name in (None, entry[0])]
    if not found:
        raise _not_a_dataset(path, name) if path.is_file() else _no_dataset(path)
    described = [_describe(path, name, by) for name, _, by in found]
    name, module, by = found[0]
    if len(found) > 1:
        raise DataError(
            f"{path}: contains several datasets: {', '.join(described)}",
            hint=f"choose one: ssdctl prepare --data {path} --from {name}",
        )
    if by != path:
        log.info("%s: detected %s", path, described[0])
    return name, module


def datasets_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, of the first ones, that are datasets."""
    folders = sorted(p for p in folder.glob("[!.]*") if p.is_dir())[:MAX_FOLDERS]
    return [path for path in folders if _is_dataset(path)]


def _recognized(path: Path) -> Iterator[tuple[str, Format, Path | bool]]:
    for name in names():
        try:
            module = load(name)
            by = module.recognise(path)
        except SsdctlError as error:
            if name in built_in():
                raise
            log.warning("%s", error)  # a broken plugin must not stop the others
            continue
        if by:
            yield name, module, by


def _describe(path: Path, name: str, by: Path | bool) -> str:
    if not isinstance(by, Path) or by == path:
        return name
    return f"{name} ({by.relative_to(path) if by.is_relative_to(path) else by})"


def _is_dataset(folder: Path) -> bool:
    with contextlib.suppress(DataError):
        return (folder / "dataset.toml").is_file() or any(_recognized(folder))
    return False


def _has_labels(folder: Path) -> bool:
    """Return whether the labels of a dataset are in a folder, not in one that is a dataset."""
    with contextlib.suppress(DataError):
        for _, _, by in _recognized(folder):
            labels = by if isinstance(by, Path) else folder
            labels = labels.parent if labels.is_file() else labels
            usual = labels.name in ANNOTATION_FOLDERS or labels.name.lower() in SPLIT_WORDS
            if labels == folder or (labels.parent == folder and usual):
                return True
    return (folder / "dataset.toml").is_file()


def _no_dataset(path: Path) -> DataError:
    looked_for = ["dataset.toml"]
    for name in built_in():
        looked_for += getattr(load(name), "LOOKED_FOR", ())
    files = sorted(Path(n) for n in itertools.islice(files_below(path), MAX_FILES))
    kinds = ["TFRecord" if TFRECORD.search(f.name) else f.suffix.lower() or "other" for f in files]
    first = dict(zip(reversed(kinds), reversed(files), strict=True))
    counts = Counter(kinds).most_common(MAX_NAMED)
    found = [f"{count:,} {kind} files such as {first[kind]}" for kind, count in counts]
    above = path.parent if path.name else path.resolve().parent
    if _has_labels(above):
        hint = f"did you mean the folder above, --data {above}?"
    elif below := datasets_in(path):
        hint = f"a folder in it is a dataset: --data {below[0]}; or write a dataset.toml"
    else:
        hint = _hint_for(path, files)
    return DataError(
        f"{path}: no dataset found{', but ' if found else ''}{', '.join(found)} "
        f"(looked for {', '.join(looked_for)})",
        hint=hint,
    )


def _hint_for(folder: Path, files: list[Path]) -> str:
    """Return what to do with the files of a folder that is no dataset."""
    from ssdctl.data.formats import yolo

    jsons = [file for file in files if file.suffix == ".json"]
    if any(b'"shapes"' in _head(folder / file) for file in jsons[:MAX_READ]):
        return CONVERT_LABELME
    images = [folder / file for file in files if is_image(file)]
    stems = {image.stem for image in images}
    for file in [file for file in files if file.suffix == ".txt" and file.stem in stems][:MAX_READ]:
        if yolo.has_boxes(folder / file):
            own = [yolo.label_file(folder, image) for image in images if image.stem == file.stem]
            move = "" if folder / file in own else ", and move each label file beside its image"
            return (
                f"{file} is YOLO's: write {folder / 'classes.txt'}, with the "
                f"name of a class per line, in the order of the class numbers{move}"
            )
    if any(TFRECORD.search(file.name) for file in files):
        return TFRECORD_HINT
    for file in files:
        if file.suffix.lower() in ARCHIVES:
            return f"unpack {folder / file}"
    return (
        "give the folder that an export was unpacked to, with the labels in one of the formats "
        f"{', '.join(built_in())}; or describe the dataset in a dataset.toml "
        "(docs/custom-dataset.md)"
    )


def _not_a_dataset(path: Path, name: str | None) -> DataError:
    """Return the error for a file that is not a dataset, or not of the format `name`."""
    suffix = path.suffix.lower()
    if suffix in ARCHIVES:
        return DataError(f"{path}: an archive", hint="unpack it and give the folder")
    if TFRECORD.search(path.name):
        return DataError(f"{path}: a TFRecord file", hint=TFRECORD_HINT)
    if suffix == ".json" and name in (None, "coco"):
        problem = "not in COCO's format: no images, annotations and categories"
        hint = CONVERT_LABELME if b'"shapes"' in _head(path) else None
        return DataError(f"{path}: {problem}", hint=hint)
    return DataError(
        f"{path}: not a dataset file{f' of {name}' if name else ''}",
        hint="give a folder, COCO's JSON, a data.yaml, CVAT's annotations.xml or a CSV file",
    )


def _head(path: Path) -> bytes:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(HEAD_BYTES)
    return b""
