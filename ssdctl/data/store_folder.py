"""Choose the dataset folder and its store: `prepared/` in that folder, or a cache folder.

A dataset folder that cannot be written, as one that many users share, gets its index in the user's
cache folder, under a name made of the dataset's path. Each user has their
own cache; processes of one user are kept apart by the store's lock.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.data import STORE_NAME, TOML, cached_store, is_refused, is_writable, usual_store
from ssdctl.errors import DataError, UsageError
from ssdctl.files import refuse_url
from ssdctl.runtime.safe_text import quoted_folder

if TYPE_CHECKING:
    from ssdctl.config import Config, DataConfig

log = logging.getLogger(__name__)
DEFAULT_ROOTS = (Path("data/coco"), Path("/data/coco"))


def default_root() -> Path:
    """Return the dataset folder if the config names none: data/coco if present, else /data/coco."""
    near, far = DEFAULT_ROOTS
    return near if near.is_dir() else far


def require_dataset(config: DataConfig) -> None:
    """Check that the config names a dataset, or that one is in its usual folder."""
    from ssdctl.data.dataset import datasets_in

    dataset_folders(config)
    if config.root or default_root().exists():
        return
    near, far = DEFAULT_ROOTS
    if found := datasets_in(Path()):
        names = ", ".join(map(str, found))
        hint = f"datasets in this folder: {names}; use --data {quoted_folder(found[0])}"
    else:
        hint = "--data DIR names your images; `ssdctl demo` needs none"
    raise DataError(f"no --data given, and neither ./{near} nor {far} exists", hint=hint)


def dataset_folders(config: DataConfig) -> tuple[Path, Path]:
    """Return the dataset folder (or file, but the folder of a dataset.toml) and its store."""
    for value, option in ((config.root, "--data"), (config.store, "--store")):
        if value:
            refuse_url(value, option)
    root = Path(config.root) if config.root else default_root()
    if root.name == TOML and root.is_file():
        root = root.parent
    if config.store:
        return root, Path(config.store)
    return root, default_store(root)


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths of the dataset, its store and the file of `--init`.

    A checkpoint contains them, so that `evaluate CKPT` finds the dataset from any folder.
    """
    if config.train.init is not None and (init := Path(config.train.init)).exists():
        config = config.with_value("train.init", str(init.absolute()))
    root, _ = dataset_folders(config.data)
    if config.data.store is not None:
        config = config.with_value("data.store", str(Path(config.data.store).absolute()))
    return config.with_value("data.root", str(root.absolute()))


def refuse_in_dataset(out: Path, root: Path | None = None, option: str = "--out") -> None:
    """Raise UsageError for a new folder or image in a dataset: the next `prepare` would read it.

    Args:
        root: The dataset; None: every one counts that has a store in it, or labels in usual places.
    """
    from ssdctl.data.dataset import has_usual_labels
    from ssdctl.data.image_files import dataset_folder

    def is_read(folder: Path) -> bool:
        if root is not None:
            own = str(folder) == real_path(dataset_folder(root))
            return own and _would_read(root, folder, real, with_labels=True)
        files = (store.with_suffix("") for store in folder.glob(f"*.{STORE_NAME}"))
        found = [path for path in (folder, *files) if _has_store(path, folder)]
        found += [folder] if folder != real and has_usual_labels(folder) else []
        return any(_would_read(path, folder, real) for path in found)

    real = Path(real_path(out))
    for folder in filter(is_read, (real, *real.parents)):
        raise UsageError(
            f"{option} {out}: is in the dataset {folder}, which would be read with it",
            hint="choose a place outside of the dataset",
        )


def _has_store(root: Path, folder: Path) -> bool:
    """Return whether a dataset has its usual store, of labels in a folder."""
    from ssdctl.data import index
    from ssdctl.data.annotations import SPLITS

    found = (index.read_metadata(usual_store(root), split) for split in SPLITS)
    origins = (Path(real_path(metadata.origin)) for metadata in found if metadata)
    return any(origin.is_relative_to(folder) for origin in origins)


def _would_read(root: Path, folder: Path, out: Path, *, with_labels: bool = False) -> bool:
    """Return whether `prepare` would read labels in `out`.

    Of COCO, and of YOLO if data.yaml names folders of splits, only usual and named folders count;
    of YOLO any if a whole dataset is written there, `with_labels` in folders of splits.
    """
    from ssdctl.data.annotations import split_of
    from ssdctl.data.find_images import STANDARD
    from ssdctl.data.formats import coco, yolo
    from ssdctl.data.image_files import ANNOTATION_FOLDERS

    try:
        # Labels of another format make a folder ambiguous, if it is not laid out as COCO's.
        splits = coco.splits_of(root) if root.is_file() else coco.own_splits(root)
        folders = None if splits or with_labels else yolo.named_folders(root)
    except DataError:
        return _has_store(root, folder)  # otherwise it is no dataset
    below = out.relative_to(folder).parts
    if (
        (folders is None and not splits)
        or not below
        or below[0] in (*STANDARD, *ANNOTATION_FOLDERS)
    ):
        return True
    paths = {p for files in splits.values() for p in (*files.images, files.annotations.parent)}
    named = {real_path(path) for path in (*paths, *(folders or ()))} - {str(folder)}
    is_named = any(out.is_relative_to(path) for path in named)
    return is_named or split_of(below[0] if splits else "/".join(below)) is not None


def real_path(path: str | Path) -> str:
    """Return the path of a dataset or store without links and `..`, to compare it."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # of a damaged file
        return str(path)


@functools.cache  # once for each
def _warn_of_refused(store: Path, instead: Path) -> None:
    log.warning("%s cannot be read, so its options are not known: using %s", store, instead)


def default_store(root: Path) -> Path:
    """Return the store's folder of the dataset in `root` if the user names none."""
    folder = usual_store(root)
    if not root.exists() or is_writable(folder if folder.exists() else folder.parent):
        return folder
    from ssdctl.data.sources import is_prepared

    cached = cached_store(root)
    if is_refused(folder):
        _warn_of_refused(folder, cached)
    elif folder.exists() and is_prepared(root, folder):
        return folder
    return cached
