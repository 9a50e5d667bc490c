"""Where the parts of a dataset lie: COCO's own layout, or what a `dataset.toml` beside them says.

[train]
images = "photos"                     # folder of the images, below the dataset folder
annotations = "labels/train.json"     # COCO format

A [made] table says how `ssdctl prepare --from`, `--split` or `--classes` wrote the file
(convert.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from ssdctl.config import DataConfig
from ssdctl.config.resolve import read_toml
from ssdctl.data.store_folder import default_store
from ssdctl.errors import DataError, IntegrityError, UsageError
from ssdctl.files import refuse_url, safe_join

SPLITS = ("train", "val")
MADE = "made"
TOML = "dataset.toml"
DEFAULT_ROOTS = (Path("data/coco"), Path("/data/coco"))
WHAT_IS_DROPPED = "`ssdctl prepare` says what was dropped, and why, in the store's report.json"
S = TypeVar("S")

COCO_IMAGES = 117_266  # training images of COCO 2017 with boxes
COCO_CLASSES = 80


class SplitFiles(NamedTuple):
    """The files of one split."""

    images: Path
    annotations: Path


def default_root() -> Path:
    """The dataset folder where the config names none: data/coco if it exists, else /data/coco."""
    near, far = DEFAULT_ROOTS
    return near if near.is_dir() else far


def dataset_folders(config: DataConfig) -> tuple[Path, Path]:
    """The dataset folder and the folder of its store, by the config."""
    for value, option in ((config.root, "--data"), (config.store, "--store")):
        if value:
            refuse_url(value, option)
    root = Path(config.root) if config.root else default_root()
    return root, Path(config.store) if config.store else default_store(root)


def require_split(splits: Mapping[str, S], name: str, root: Path) -> S:
    """The split of that name.

    Raises:
        DataError: The dataset has none.
    """
    if name in splits:
        return splits[name]
    remedy = "name its images and annotations in dataset.toml"
    if name == "val":
        remedy += ", or let `ssdctl prepare --split 0.9` make one"
    raise DataError(f"{root}: has no split {name}, but {', '.join(splits) or 'none'}", hint=remedy)


def find_splits(root: Path) -> dict[str, SplitFiles]:
    """The splits of the dataset in `root`; `train` or `val` may be absent, not both.

    Raises:
        DataError: No folder, no annotations, a broken dataset.toml.
    """
    if not root.is_dir():
        raise DataError(
            f"{root}: no such dataset folder",
            hint="name it with --data DIR, or fetch one: ssdctl download --dest DIR",
        )
    named = read_dataset_toml(root / TOML) if (root / TOML).is_file() else {}
    named = named or coco_layout(root)
    if not named:
        raise DataError(
            f"{root}: holds no dataset: neither annotations/instances_train2017.json nor "
            "instances_val2017.json, nor a dataset.toml",
            hint=_where_it_may_be(root),
        )
    for split, files in named.items():
        if not files.annotations.is_file():
            raise DataError(f"{files.annotations}: no such annotation file (split {split})")
    return named


def _where_it_may_be(root: Path) -> str:
    """What to do about a folder that is no dataset."""
    above = root.resolve().parent
    if (above / TOML).is_file() or coco_layout(above):
        return f"the folder above it is one: --data {above}"
    return (
        "lay it out as COCO does (train2017/, val2017/, annotations/), or name its folders in "
        "dataset.toml (README, Your own data); from Pascal VOC's or YOLO's layout, make one: "
        "ssdctl prepare --from voc, --from yolo"
    )


def require_images(split: str, files: SplitFiles) -> None:
    """A packed store needs no image folder; everything else does.

    Raises:
        DataError: There is none.
    """
    if not files.images.is_dir():
        raise DataError(
            f"{files.images}: no such image folder (split {split})",
            hint=f"the images of {files.annotations.name} belong there, or a link to them",
        )


def coco_layout(root: Path) -> dict[str, SplitFiles]:
    """The splits that COCO's own layout has in `root`."""
    annotations = {s: root / "annotations" / f"instances_{s}2017.json" for s in SPLITS}
    return {
        split: SplitFiles(root / f"{split}2017", path)
        for split, path in annotations.items()
        if path.is_file()
    }


def read_dataset_toml(path: Path) -> dict[str, SplitFiles]:
    """The splits that a `dataset.toml` names.

    Raises:
        DataError: It is broken, names nothing, or names a path that leaves its folder.
    """
    try:
        return _from_toml(path)
    except (UsageError, IntegrityError) as error:  # a broken file, a path that leaves the folder
        raise DataError(f"{path}: {error}", hint=error.hint) from None


def _from_toml(path: Path) -> dict[str, SplitFiles]:
    found: dict[str, dict[str, Path]] = {}
    for key, value, place in read_toml(path):
        split, _, name = key.partition(".")
        if split == MADE:
            continue
        if split not in SPLITS or name not in ("images", "annotations"):
            raise DataError(
                f"{place}: unknown key {key!r}",
                hint="a dataset.toml has the tables [train] and [val] with images and annotations",
            )
        if not isinstance(value, str):
            raise DataError(f"{place}: {key} must be a path below {path.parent}")
        found.setdefault(split, {})[name] = safe_join(path.parent, value)
    for split, parts in found.items():
        for name in ("images", "annotations"):
            if name not in parts:
                raise DataError(f"{path}: [{split}] lacks {name}")
    return {split: SplitFiles(**parts) for split, parts in found.items()}
