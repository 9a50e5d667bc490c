"""Dataset formats, one per file. A format has the name of its file: `cvat_xml.py` is `cvat-xml`.

    name, module = find(Path("export"))
    splits = module.read(Path("export"))

A format has two functions; so has an entry point of `ssdctl.datasets`, which adds another one:

    recognise(path: Path) -> Path | bool | None: the file or folder of labels by which a dataset is
        of this format. It is fast and writes nothing.
    read(path: Path) -> dict[str, Annotations]: the splits, in the order train, val, test.

`path` is a folder, or a file such as `data.yaml`. LOOKED_FOR names the files for messages. Files
that begin with an underscore are not formats.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ssdctl.data.annotations import Annotations, from_images
from ssdctl.data.image_files import ANNOTATION_FOLDERS, dataset_folder
from ssdctl.data.split_files import SPLIT_WORDS
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.runtime.packages import entry_point_names, load_entry_point

ENTRY_POINTS = "ssdctl.datasets"
MAX_FOLDERS = 20  # that are searched for a dataset, for the hint of an error
log = logging.getLogger(__name__)
T = TypeVar("T")


class Format(Protocol):
    """A module of this folder, or a plugin."""

    def recognise(self, path: Path) -> Path | bool | None:
        """Return by which file or folder a dataset is of this format, if it is."""

    def read(self, path: Path) -> dict[str, Annotations]:
        """Return the splits.

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
        ask = getattr(self.plugin, "recognise", None)
        return None if ask is None else self._call(ask, path)

    def read(self, path: Path) -> dict[str, Annotations]:
        return self._call(self._read, path)

    def _read(self, path: Path) -> dict[str, Annotations]:
        result = getattr(self.plugin, "read", self.plugin)(path)
        if isinstance(result, dict):
            return result
        splits, classes = result
        used = {b.name for images in splits.values() for image in images for b in image.boxes}
        if unlisted := used - set(classes):
            problem = f"--from {self.name} does not list the class {min(unlisted)!r}"
            raise DataError(f"{path}: {problem}")
        return from_images(splits, classes, dataset_folder(path), path)

    def _call(self, function: Callable[[Path], T], path: Path) -> T:
        try:
            return function(path)
        except SsdctlError:
            raise
        except Exception as error:
            raise DataError(
                f"{path}: --from {self.name} failed: {type(error).__name__}: {error}",
                hint=f"report it to the package of the entry point {self.name} of {ENTRY_POINTS}",
            ) from error


def built_in() -> list[str]:
    """Return the names of the formats in this folder."""
    return sorted(p.stem.replace("_", "-") for p in Path(__file__).parent.glob("[!_]*.py"))


def names() -> list[str]:
    """Return the names of all formats; nothing is imported."""
    return [*built_in(), *entry_point_names(ENTRY_POINTS)]


def load(name: str) -> Format:
    """Return a format.

    Raises:
        UsageError: There is none of that name, or its package cannot be imported.
    """
    if name in built_in():
        module: Format = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        return module
    if name in entry_point_names(ENTRY_POINTS):
        return _Plugin(name, load_entry_point(ENTRY_POINTS, name))
    raise UsageError(
        f"--from {name}: no such dataset format", hint=f"choose from {', '.join(names())}"
    )


def find(path: Path, name: str | None = None) -> tuple[str, Format]:
    """Return the format of a dataset.

    Args:
        path: Its folder, or a file such as data.yaml or instances.json.
        name: The format; None recognises it.

    Raises:
        UsageError: There is no format of that name.
        DataError: No dataset, several, or a file of another format.
    """
    from ssdctl.data.formats import _instead, coco

    if path.is_file():
        found = [entry for entry in _recognised(path) if name in (None, entry[0])]
        if not found:
            raise _instead.of_file(path, name)
    elif name is not None:
        return name, load(name)  # it says what is absent
    elif coco.own_splits(path):
        return "coco", coco  # there may be other labels as well
    else:
        found = list(_recognised(path))
        if not found:
            raise _no_dataset(path)
    if len(found) > 1:
        described = ", ".join(_describe(path, name, by) for name, _, by in found)
        raise DataError(
            f"{path}: contains several datasets: {described}",
            hint=f"choose one: ssdctl prepare --data {path} --from {found[0][0]}",
        )
    name, module, by = found[0]
    if by != path:
        log.info("%s: detected %s", path, _describe(path, name, by))
    return name, module


def datasets_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, of the first ones, that are datasets."""
    folders = sorted(p for p in folder.glob("[!.]*") if p.is_dir())[:MAX_FOLDERS]
    return [path for path in folders if _is_dataset(path)]


def _recognised(path: Path) -> Iterator[tuple[str, Format, Path | bool]]:
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
        return (folder / "dataset.toml").is_file() or any(_recognised(folder))
    return False


def _has_labels(folder: Path) -> bool:
    """Return whether the labels of a dataset are in a folder, not in one that is a dataset."""
    with contextlib.suppress(DataError):
        for _, _, by in _recognised(folder):
            place = by if isinstance(by, Path) else folder
            around = place.parent if place.is_file() else place
            usual = around.name in ANNOTATION_FOLDERS or around.name.lower() in SPLIT_WORDS
            if around == folder or (around.parent == folder and usual):
                return True
    return (folder / "dataset.toml").is_file()


def _no_dataset(path: Path) -> DataError:
    from ssdctl.data.formats import _instead

    files = [file for name in built_in() for file in getattr(load(name), "LOOKED_FOR", ())]
    found, hint = _instead.of_folder(path, built_in())
    above = path.parent if path.name else path.resolve().parent
    if _has_labels(above):
        hint = f"did you mean the folder above, --data {above}?"
    elif below := datasets_in(path):
        hint = (
            f"a folder in it is a dataset: --data {below[0]}; or describe the dataset in a "
            "dataset.toml"
        )
    looked_for = ", ".join(["dataset.toml", *files])
    return DataError(f"{path}: no dataset found{found} (looked for {looked_for})", hint=hint)
