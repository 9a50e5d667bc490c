"""Where the parts of a dataset lie: COCO's own layout, or what a `dataset.toml` beside them says.

[train]
images = "photos"                     # folder of the images, below the dataset folder
annotations = "labels/train.json"     # COCO format
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ssdctl.config import DataConfig
from ssdctl.config.resolve import read_toml
from ssdctl.errors import DataError, IntegrityError, UsageError
from ssdctl.files import safe_join

SPLITS = ("train", "val")
DEFAULT_ROOTS = (Path("data/coco"), Path("/data/coco"))


class SplitFiles(NamedTuple):
    """The files of one split."""

    images: Path
    annotations: Path


def default_root() -> Path:
    """The dataset folder where the config names none: data/coco if it exists, else /data/coco."""
    near, far = DEFAULT_ROOTS
    return near if near.is_dir() else far


def dataset_folders(config: DataConfig) -> tuple[Path, Path]:
    """The dataset folder and its store's, as the config has them."""
    root = Path(config.root) if config.root else default_root()
    return root, Path(config.store) if config.store else root / "prepared"


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
    named: dict[str, SplitFiles] = {}
    if (root / "dataset.toml").is_file():
        try:
            named = _from_toml(root / "dataset.toml")
        except (
            UsageError,
            IntegrityError,
        ) as error:  # a broken file, a path that leaves the folder
            raise DataError(f"{root / 'dataset.toml'}: {error}") from None
    if not named:
        for split in SPLITS:
            annotations = root / "annotations" / f"instances_{split}2017.json"
            if annotations.is_file():
                named[split] = SplitFiles(root / f"{split}2017", annotations)
    if not named:
        raise DataError(
            f"{root}: holds no dataset: neither annotations/instances_train2017.json nor "
            "instances_val2017.json, nor a dataset.toml",
            hint="lay it out as COCO does (train2017/, val2017/, annotations/), or name its "
            "folders in dataset.toml (README, Your own data)",
        )
    for split, files in named.items():
        if not files.annotations.is_file():
            raise DataError(f"{files.annotations}: no such annotation file (split {split})")
    return named


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


def _from_toml(path: Path) -> dict[str, SplitFiles]:
    found: dict[str, dict[str, Path]] = {}
    for key, value, place in read_toml(path):
        split, _, name = key.partition(".")
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
