"""Convert other layouts to COCO's format, divide a dataset and choose classes: `prepare --from`,
`--split`, `--classes`, and datasets that are recognised as VOC, YOLO, Open Images or CVAT XML.

Images stay where they are, and no file of the user is changed. The result is a folder with
annotation files (`annotations/ssdctl_train-5be1c0de.json`, `ssdctl_val-...`) and a `dataset.toml`
that names them: the dataset folder if the user gave one of the options, else `converted` in the
store. The [made] table describes the conversion; the same command again starts from the originals.
Annotations have a hash of their content in their names, so that replacing dataset.toml, which is
written last, replaces a conversion by another one atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import typing
from pathlib import Path
from typing import NamedTuple

from ssdctl.config.resolve import read_toml
from ssdctl.data.annotations import LabeledImage
from ssdctl.data.dataset import (
    CONVERTED,
    MADE,
    TOML,
    SplitFiles,
    read_dataset_toml,
    require_root,
    root_folder,
)
from ssdctl.data.formats import coco
from ssdctl.data.formats.coco_writer import divided, document, num_images, with_classes
from ssdctl.data.formats.cvat_xml import read_cvat_xml
from ssdctl.data.formats.file_names import files_below
from ssdctl.data.formats.find_layout import Layout, Source, find_layout
from ssdctl.data.formats.open_images import read_open_images
from ssdctl.data.formats.voc import read_voc
from ssdctl.data.formats.yolo import read_yolo
from ssdctl.data.split_files import usable_splits
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.files import lock, make_dir, read_text, write_bytes, write_text
from ssdctl.runtime.packages import entry_point_names, load_entry_point

ORIGINAL = "dataset.original.toml"  # the user's own, after --split or --classes replaced it
LABELS = "labels.sha256"  # in the folder of a conversion: the version of the labels
LABEL_SUFFIXES = (".txt", ".xml", ".csv", ".yaml", ".yml", ".names")
MAX_COMPARED = 20_000  # label files whose sizes and times are compared at the start of a run
MAX_VERSION_BYTES = 1000
AUTO = "auto"
FORMATS = typing.get_args(Source)
ENTRY_POINTS = "ssdctl.datasets"  # functions of other packages that read a layout
log = logging.getLogger(__name__)


class Conversion(NamedTuple):
    """The options of a conversion."""

    source: str | None = None  # voc, yolo, ...; None: recognise it
    split: float | None = None  # share of the images to train on
    classes: tuple[str, ...] = ()  # to keep; none: all

    def __bool__(self) -> bool:
        return bool(self.source or self.split or self.classes)


class _Part(NamedTuple):
    """A split: its image folder, and its annotations in COCO's format."""

    images: Path
    content: bytes
    origin: Path  # for messages
    is_original: bool = False  # the content is that of `origin`, a COCO file


def convert(root: Path, options: Conversion, folder: Path | None = None) -> dict[str, SplitFiles]:
    """Write the annotation files and the dataset.toml of a conversion.

    Args:
        root: The dataset folder, or its file.
        options: What to do.
        folder: Where to write; None is the dataset folder itself.

    Raises:
        UsageError: The options do not apply: a validation split exists already, no such class.
        DataError: The originals cannot be read.
        DiskError: The folder cannot be written.
    """
    require_root(root)
    if options.source is not None and not _is_known(options.source):
        names = ", ".join([*FORMATS, *entry_point_names(ENTRY_POINTS)])
        raise UsageError(f"--from {options.source}: no such layout", hint=f"choose from {names}")
    source = _source(root, options.source)
    parts = _parts(root, source)
    if options.classes:
        parts = {
            split: part._replace(
                content=with_classes(part.content, options.classes, part.origin), is_original=False
            )
            for split, part in parts.items()
        }
    if options.split is not None:
        if "val" in parts:
            raise UsageError(f"--split: {root} has validation images already", hint="omit --split")
        train, val = divided(parts["train"].content, options.split, parts["train"].origin)
        parts = {
            **parts,
            "train": parts["train"]._replace(content=train, is_original=False),
            "val": parts["train"]._replace(content=val, is_original=False),
        }
    target = folder or root
    splits = _write(root, target, source, options, parts)
    counts = ", ".join(f"{num_images(p.content, p.origin):,} {s}" for s, p in parts.items())
    if folder is None:
        read = "" if source == ORIGINAL else f", read from {source.upper()}"
        log.info("wrote %s and annotations/ beside it (%s images%s)", target / TOML, counts, read)
    else:
        log.info("Converted from %s: %s images", source.upper(), counts)
    return splits


def convert_if_needed(root: Path, folder: Path) -> None:
    """Convert a dataset of a layout other than COCO's into its store, if that was not done yet.

    Raises:
        DataError: No dataset, or several; the originals cannot be read.
        DiskError: The store cannot be written.
    """
    if (root / TOML).is_file():
        return
    if not (folder / CONVERTED / TOML).is_file():
        convert_again(root, folder)
    else:
        warn_of_changed_labels(root, folder)


def warn_of_changed_labels(root: Path, folder: Path) -> None:
    """Log a warning if label files changed since they were converted into the store."""
    if not (root / TOML).is_file() and _labels_changed(root, folder / CONVERTED):
        log.warning(
            "labels in %s changed, or were copied, since they were read, and are used as read: "
            "`ssdctl prepare --data %s` reads them",
            root_folder(root),
            root,
        )


def is_converted(root: Path, folder: Path) -> bool:
    """Return whether `convert_if_needed` would write nothing."""
    if (root / TOML).is_file() or (folder / CONVERTED / TOML).is_file():
        return True
    return find_layout(root).source == "coco"


def convert_again(root: Path, folder: Path) -> None:
    """Convert a dataset of a layout other than COCO's into its store from the originals.

    Raises:
        See `convert_if_needed`.
    """
    require_root(root)
    if (root / TOML).is_file():
        return
    record = folder / CONVERTED / TOML
    conversion = _read_conversion(record) or {}
    if "split" in conversion or "classes" in conversion:
        log.info("%s", _describe(record))
        return
    layout = find_layout(root)
    if layout.source == "coco":
        if record.is_file():
            record.unlink()  # the folder had another layout before
        return
    log.info("%s: detected %s", root, layout.describe())
    version = _labels_version(root)
    convert(root, Conversion(), folder / CONVERTED)
    if _read_version(folder / CONVERTED) != version:
        write_text(folder / CONVERTED / LABELS, version)


def _labels_changed(root: Path, folder: Path) -> bool:
    """Return whether label files changed since a conversion; not if all of them are gone."""
    version = _read_version(folder)
    return bool(version) and _labels_version(root) not in ("", version)


def _read_version(folder: Path) -> str:
    try:
        return read_text(folder / LABELS, MAX_VERSION_BYTES)
    except (OSError, UnicodeDecodeError):
        return ""  # of a conversion by an earlier version, or by --split


def _labels_version(root: Path) -> str:
    """Return a hash of the files that may contain labels: their names, and sizes and times of
    the first ones; empty if there are none."""
    folder = root_folder(root)
    names = sorted(n for n in files_below(folder) if Path(n).suffix in LABEL_SUFFIXES)
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for name in names[:MAX_COMPARED]:
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
    return digest.hexdigest() if names else ""


def read_unconverted(root: Path) -> dict[str, tuple[SplitFiles, bytes]]:
    """Return the annotations of a dataset that was not converted; nothing is written.

    Raises:
        DataError: No dataset, or several; the originals cannot be read.
    """
    parts = _parts(root, find_layout(root).source)
    return {s: (SplitFiles(part.images, part.origin), part.content) for s, part in parts.items()}


def describe_conversion(root: Path) -> str | None:
    """Describe how the dataset.toml of `root` was made; None if it is the user's own, or absent."""
    return _describe(root / TOML)


def _describe(path: Path) -> str | None:
    conversion = _read_conversion(path)
    if conversion is None:
        return None
    options = ", ".join(f"{key} {value}" for key, value in conversion.items())
    return (
        f"{path} was made by ssdctl prepare ({options}): if the originals change, "
        "give the same options again"
    )


def _read_conversion(path: Path) -> dict[str, object] | None:
    if not path.is_file():
        return None
    try:
        values = read_toml(path)
    except UsageError as error:
        raise DataError(str(error)) from None
    prefix = f"{MADE}."
    table = {key.removeprefix(prefix): v for key, v, _ in values if key.startswith(prefix)}
    return table or None


def _source(root: Path, given: str | None) -> str:
    """Return the source to read: a format, `auto`, or the name of the user's own dataset.toml."""
    conversion = _read_conversion(root / TOML)
    is_own = conversion is None and (root / TOML).is_file()
    if given is not None:
        if is_own:
            raise UsageError(
                f"--from {given}: {root / TOML} exists and was not written by ssdctl",
                hint="omit --from to prepare what it names, or move it away",
            )
        return given
    if conversion is not None:
        return str(conversion.get("source", ""))
    return ORIGINAL if is_own else find_layout(root).source


def _parts(root: Path, source: str) -> dict[str, _Part]:
    """Return the splits of the originals."""
    if source == ORIGINAL:
        own = root / (ORIGINAL if (root / ORIGINAL).is_file() else TOML)
        return _coco_parts(root, read_dataset_toml(own))
    if source in FORMATS:
        layout = find_layout(root, source)
        if layout.splits:
            return _coco_parts(root, layout.splits)
        images_root, origin = layout.root, layout.file
        splits, classes = _read_labels(layout, root.is_file())
    elif _is_known(source):
        images_root, origin = root_folder(root), root
        splits, classes = _read_with_plugin(source, root)
    else:
        raise DataError(
            f"{root / TOML}: [made] names an unknown source {source!r}",
            hint="install the package that reads it",
        )
    if not classes:
        raise DataError(f"{root}: no object is labelled in it")
    if "train" not in splits:
        raise DataError(f"{root}: no images to train on")
    return {
        split: _Part(images_root, document(images, classes), origin)
        for split, images in splits.items()
    }


def _read_labels(layout: Layout, is_file: bool) -> tuple[dict[str, list[LabeledImage]], list[str]]:
    file = layout.file if layout.file.is_file() else None
    if layout.source == "yolo":
        is_yaml = file is not None and file.suffix in (".yaml", ".yml")
        return read_yolo(layout.root, file if is_yaml else None)
    if layout.source == "cvat-xml":
        return read_cvat_xml(layout.file, layout.root)
    if layout.source == "openimages":
        return read_open_images(layout.root, [layout.file] if is_file else None)
    splits = read_voc(layout.root)
    names = {box.name for images in splits.values() for image in images for box in image.boxes}
    return splits, sorted(names)


def _is_known(source: str) -> bool:
    return source in FORMATS or source in entry_point_names(ENTRY_POINTS)


def _read_with_plugin(source: str, root: Path) -> tuple[dict[str, list[LabeledImage]], list[str]]:
    """Return what another package reads, as the readers of `formats/` do.

    Raises:
        DataError: It fails, or a box has a class that it does not list.
        UsageError: It cannot be imported.
    """
    read = load_entry_point(ENTRY_POINTS, source)
    try:
        splits, classes = read(root)
        used = {b.name for images in splits.values() for image in images for b in image.boxes}
    except SsdctlError:
        raise
    except Exception as error:
        raise DataError(
            f"{root}: --from {source} failed: {type(error).__name__}: {error}",
            hint=f"report it to the package that has the entry point {source} of {ENTRY_POINTS}",
        ) from error
    if unlisted := used - set(classes):
        raise DataError(f"{root}: --from {source} does not list the class {min(unlisted)!r}")
    return usable_splits(splits), classes


def _coco_parts(root: Path, splits: dict[str, SplitFiles]) -> dict[str, _Part]:
    if "train" not in splits:
        raise DataError(
            f"{root}: no training split in COCO's format to start from",
            hint="for another layout give its name, as in --from voc",
        )
    return {
        split: _Part(files.images, coco.read_content(files.annotations)[:], files.annotations, True)
        for split, files in splits.items()
    }


def _write(
    root: Path,
    target: Path,
    source: str,
    options: Conversion,
    parts: dict[str, _Part],
) -> dict[str, SplitFiles]:
    """Write only what differs, so that an unchanged conversion changes no file."""
    folder = target / "annotations"
    make_dir(folder)
    table = {
        "source": source,
        "split": options.split,
        "classes": list(options.classes) or None,
    }
    lines = ["# Written by `ssdctl prepare`; the originals are unchanged.", f"[{MADE}]"]
    lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    paths = {
        split: part.origin if part.is_original else folder / _file_name(split, part.content)
        for split, part in parts.items()
    }
    for split, path in paths.items():
        images = _relative(parts[split].images, root_folder(root))
        lines += ["", f"[{split}]", f"images = {_toml(images)}"]
        lines += [f"annotations = {_toml(_relative(path, target))}"]
    text = "\n".join(lines) + "\n"
    with lock(folder / ".ssdctl.lock", f"waiting for another ssdctl in {target}"):
        for split, path in paths.items():
            if not path.is_file():
                write_bytes(path, parts[split].content)
        if source == ORIGINAL and not (target / ORIGINAL).is_file():
            write_bytes(target / ORIGINAL, (root / TOML).read_bytes())
        if not (target / TOML).is_file() or (target / TOML).read_text(encoding="utf-8") != text:
            write_text(target / TOML, text)
        for path in folder.glob("ssdctl_*.json"):
            if path not in paths.values():
                path.unlink(missing_ok=True)  # of an earlier conversion
    return {split: SplitFiles(parts[split].images, path) for split, path in paths.items()}


def _relative(path: Path, base: Path) -> str:
    """Return a path for dataset.toml: relative if it is below `base`, else absolute."""
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    return path.absolute().as_posix()


def _file_name(split: str, content: bytes) -> str:
    return f"ssdctl_{split}-{hashlib.sha256(content).hexdigest()[:8]}.json"


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and lists are equal in both
