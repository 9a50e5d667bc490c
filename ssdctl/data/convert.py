"""Make other people's data a COCO dataset, and cut one to size: `prepare --from`, `--split`,
`--classes`.

Images stay where they are, and no file of the user's is changed: what is written are annotation
files (`annotations/ssdctl_train-5be1c0de.json`, `ssdctl_val-...`) and the `dataset.toml` that names
them. Its [made] table says from what; the same command again starts from the originals again.
Annotations carry a hash of their content in their names, so that dataset.toml, replaced last, is
the one moment at which a conversion takes another's place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ssdctl.config.resolve import read_toml
from ssdctl.data.dataset import MADE, TOML, SplitFiles, coco_layout, read_dataset_toml
from ssdctl.data.formats import coco
from ssdctl.data.formats.coco_writer import divided, document, num_images, with_classes
from ssdctl.data.formats.voc import read_voc
from ssdctl.data.formats.yolo import read_yolo
from ssdctl.errors import DataError, UsageError
from ssdctl.files import lock, make_dir, write_bytes, write_text

ORIGINAL = "dataset.original.toml"  # the user's own, where --split or --classes took its place
Say = Callable[[str], None]


class Conversion(NamedTuple):
    """What is wished for."""

    source: str | None  # voc, yolo; None: the dataset as it is
    split: float | None  # share of the images to train on
    classes: tuple[str, ...]  # to keep; none: all

    def __bool__(self) -> bool:
        return bool(self.source or self.split or self.classes)


class _Part(NamedTuple):
    """A split: its image folder below the dataset folder, and its annotations."""

    images: str
    content: bytes
    origin: Path  # for messages


def convert(root: Path, wish: Conversion, say: Say) -> None:
    """Write the annotation files and the dataset.toml that `wish` asks for.

    Raises:
        UsageError: It makes no sense here: a validation split is there already, no such class.
        DataError: The originals cannot be read.
        DiskError: The dataset folder cannot be written.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such dataset folder")
    source = _source(root, wish.source)
    parts = _read(root, source, say)
    if wish.classes:
        parts = {
            split: part._replace(content=with_classes(part.content, wish.classes, part.origin))
            for split, part in parts.items()
        }
    if wish.split is not None:
        if "val" in parts:
            raise UsageError(
                f"--split: {root} has validation images already", hint="leave --split out"
            )
        train, val = divided(parts["train"].content, wish.split, parts["train"].origin)
        parts = {
            "train": parts["train"]._replace(content=train),
            "val": parts["train"]._replace(content=val),
        }
    _write(root, source, wish, parts, say)
    counts = ", ".join(f"{s} {num_images(p.content, p.origin):,}" for s, p in parts.items())
    say(f"{root / TOML} names the splits: {counts} images (made from {source})")


def describe_made(root: Path) -> str | None:
    """How the dataset.toml of `root` was made; None where it is the user's own, or none."""
    made = _made(root / TOML)
    if made is None:
        return None
    given = ", ".join(f"{key} {value}" for key, value in made.items())
    return (
        f"{root / TOML} was made by ssdctl prepare ({given}): after a change of the originals, "
        "give the same options again"
    )


def _made(path: Path) -> dict[str, object] | None:
    if not path.is_file():
        return None
    try:
        values = read_toml(path)
    except UsageError as error:
        raise DataError(str(error)) from None
    found = {key.partition(".")[2]: value for key, value, _ in values if key.startswith(MADE + ".")}
    return found or None


def _source(root: Path, wished: str | None) -> str:
    """What to read: voc, yolo, coco or the user's own dataset.toml (by its name now)."""
    made = _made(root / TOML)
    is_own = made is None and (root / TOML).is_file()
    if wished is not None:
        if is_own:
            raise UsageError(
                f"--from {wished}: {root / TOML} is there already and is not ssdctl's",
                hint="leave --from out to prepare what it names, or move it away",
            )
        return wished
    if made is not None:
        return str(made.get("source", ""))
    return ORIGINAL if is_own else "coco"


def _read(root: Path, source: str, say: Say) -> dict[str, _Part]:
    """The splits of the originals."""
    if source == "voc":
        found = read_voc(root, say)
        classes = sorted({box.name for images in found.values() for i in images for box in i.boxes})
    elif source == "yolo":
        found, classes = read_yolo(root, say)
    else:
        return _read_coco(root, source)
    if not classes:
        raise DataError(f"{root}: no object is labelled in it")
    if "train" not in found:
        raise DataError(f"{root}: no images to train on")
    return {split: _Part(".", document(images, classes), root) for split, images in found.items()}


def _read_coco(root: Path, source: str) -> dict[str, _Part]:
    if source == "coco":
        splits = coco_layout(root)
    elif source == ORIGINAL:
        own = root / (ORIGINAL if (root / ORIGINAL).is_file() else TOML)
        splits = read_dataset_toml(own)
    else:
        raise DataError(f"{root / TOML}: [made] names an unknown source {source!r}")
    if "train" not in splits:
        raise DataError(
            f"{root}: no training split in COCO's format to start from",
            hint="for another layout say --from voc or --from yolo",
        )
    return {split: _part(root, files) for split, files in splits.items()}


def _part(root: Path, files: SplitFiles) -> _Part:
    content = coco.read_bytes(files.annotations)
    return _Part(files.images.relative_to(root).as_posix(), content, files.annotations)


def _write(root: Path, source: str, wish: Conversion, parts: dict[str, _Part], say: Say) -> None:
    """Write what differs, so that nothing looks changed where nothing is."""
    folder = root / "annotations"
    make_dir(folder)
    made = {"source": source, "split": wish.split, "classes": list(wish.classes) or None}
    lines = ["# Written by `ssdctl prepare`; the originals are as they were.", f"[{MADE}]"]
    lines += [f"{key} = {_toml(value)}" for key, value in made.items() if value is not None]
    paths = {split: folder / _file_name(split, part.content) for split, part in parts.items()}
    for split, path in paths.items():
        images, annotations = _toml(parts[split].images), _toml(f"annotations/{path.name}")
        lines += ["", f"[{split}]", f"images = {images}", f"annotations = {annotations}"]
    text = "\n".join(lines) + "\n"
    with lock(folder / ".ssdctl.lock", lambda: say(f"another ssdctl works on {root}: waiting")):
        for split, path in paths.items():
            if not path.is_file():
                write_bytes(path, parts[split].content)
        if source == ORIGINAL and not (root / ORIGINAL).is_file():
            write_bytes(root / ORIGINAL, (root / TOML).read_bytes())
        if not (root / TOML).is_file() or (root / TOML).read_text(encoding="utf-8") != text:
            write_text(root / TOML, text)
        for path in folder.glob("ssdctl_*.json"):
            if path not in paths.values():
                path.unlink(missing_ok=True)  # of an earlier conversion


def _file_name(split: str, content: bytes) -> str:
    return f"ssdctl_{split}-{hashlib.sha256(content).hexdigest()[:8]}.json"


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and lists of both agree
