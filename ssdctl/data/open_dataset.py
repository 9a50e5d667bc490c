"""Open a dataset for training or evaluation; prepare it first if it never was.

splits = open_dataset(root, store_folder)
splits["train"].decode(0)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssdctl.config import Config
from ssdctl.data import store
from ssdctl.data.convert import (
    AUTO,
    Conversion,
    convert,
    convert_again,
    convert_if_needed,
    describe_conversion,
    read_unconverted,
    warn_of_changed_labels,
)
from ssdctl.data.dataset import (
    CONVERTED,
    NotConvertedError,
    SplitFiles,
    find_splits,
    require_images,
    require_split,
)
from ssdctl.data.formats import coco
from ssdctl.data.formats.coco import MAX_NAMED
from ssdctl.data.formats.coco_check import check
from ssdctl.data.formats.file_names import resolve_images
from ssdctl.data.image_check import changed_images
from ssdctl.data.prepare import Outcome, prepare
from ssdctl.data.store import is_prepared
from ssdctl.data.store_folder import dataset_folders, is_cached_store, require_dataset
from ssdctl.errors import DataError, UsageError
from ssdctl.files import is_plain_name
from ssdctl.runtime.progress import Progress

log = logging.getLogger(__name__)
MAX_CHECKED = 200_000  # images of a split that are compared with their fingerprints at the start


def prepare_dataset(config: Config, *, force: bool, progress: Progress) -> Outcome:
    """Convert the dataset of a config if its layout is not COCO's, and write its store.

    With options of a conversion it is written to the dataset folder, else to the store; a
    conversion that an earlier call wrote is only reported.

    Raises:
        UsageError: Options that exclude each other, or do not apply.
        DataError: See `prepare`.
        DiskError: The store cannot be written.
    """
    options = config.prepare
    if options.encoding == "raw" and not options.pack:
        raise UsageError(
            "--encoding raw with --no-pack: decoded pixels exist only in a packed store",
            hint="leave out one of the two",
        )
    require_dataset(config.data)
    root, folder = dataset_folders(config.data)
    source = None if options.source == AUTO else options.source
    conversion = Conversion(source, options.split, options.classes)
    if conversion:
        convert(root, conversion, folder / CONVERTED if root.is_file() else None)
    elif description := describe_conversion(root):
        log.info("%s", description)
    else:
        convert_again(root, folder)
    return prepare(
        root,
        folder,
        pack=options.pack,
        shrink=options.shrink,
        encoding=options.encoding,
        verify_images=options.verify_images,
        keep_damaged=options.keep_damaged,
        jobs=options.jobs,
        force=force,
        allow_dropped=options.allow_dropped,
        progress=progress,
    )


def open_dataset(
    root: Path,
    folder: Path,
    *,
    progress: Progress | None = None,
    check_images: bool = True,
) -> dict[str, store.Split]:
    """Return the dataset's splits, ready to read; one that was never prepared is indexed first.

    Args:
        root: The dataset folder.
        folder: The store's.
        progress: See `ssdctl.data.image_check_jobs`.
        check_images: Check whether the images of a store that is not packed are unchanged.

    Raises:
        DataError: See `prepare`; or an image is missing or changed since.
    """
    convert_if_needed(root, folder)
    splits = find_splits(root, folder)
    if not is_prepared(root, folder):
        log.info("%s is not prepared yet: checking it, as `ssdctl prepare --no-pack` does", root)
        outcome = prepare(root, folder, pack=False, progress=progress)
        for report in outcome.splits:
            for kind, count in report.counts().items():
                log.info("  %s: %d x %s", report.split, count, kind)
            for warning in (*report.notes, *report.warnings):
                log.info("  %s: %s", report.split, warning)
        return {split: store.open_split(folder, split, files) for split, files in splits.items()}
    if is_cached_store(folder):
        log.info("%s cannot be written: its index is in %s", root, folder)
    if check_images:
        for split, files in splits.items():
            _refuse_changed(folder, split, files)
    return {split: store.open_split(folder, split, files) for split, files in splits.items()}


def _refuse_changed(folder: Path, split: str, files: SplitFiles) -> None:
    metadata = store.read_metadata(folder, split)
    if metadata is None or metadata.packed:
        return
    require_images(split, files)
    changed = changed_images(files.images, *store.read_fingerprints(folder, split, MAX_CHECKED))
    if changed:
        raise DataError(
            f"{files.images}: {len(changed)} images are missing or changed since {folder} was "
            f"prepared: {', '.join(changed[:MAX_NAMED])}",
            hint="put them back, or run ssdctl prepare again with the same options",
        )


class DatasetSize(NamedTuple):
    """What a run would train and validate on."""

    trainable: int  # training images with boxes
    validation: int  # images; 0: no validation split
    classes: list[str]


def count_images(root: Path, folder: Path) -> DatasetSize:
    """Return how many images and which classes a run would train on; nothing is written.

    Raises:
        DataError: The annotations are invalid, or there is no training split.
    """
    try:
        splits = find_splits(root, folder)
        files = require_split(splits, "train", root)
        warn_of_changed_labels(root, folder)
        if is_prepared(root, folder):
            split = store.open_split(folder, "train", files)
            val = splits.get("val")
            num_val = 0 if val is None else len(store.open_split(folder, "val", val).image_ids)
            return DatasetSize(len(split.trainable), num_val, [c.name for c in split.classes])
        contents = {
            name: coco.read_content(files.annotations)
            for name, files in splits.items()
            if name != "test"
        }
    except NotConvertedError:
        unconverted = read_unconverted(root)
        splits = {name: files for name, (files, _) in unconverted.items()}
        contents = {name: content for name, (_, content) in unconverted.items()}
        files = require_split(splits, "train", root)
    other_splits = [f.annotations for name, f in splits.items() if name != "train"]
    annotations = coco.parse(contents["train"], files.annotations, other_splits)
    unresolved = [i for i in annotations.images if not (i.width and is_plain_name(i.file_name))]
    resolve_images(unresolved, files.images)
    boxes, _ = check(annotations, files.annotations)
    val_images = 0
    if "val" in contents:
        val_images = len(coco.parse(contents["val"], splits["val"].annotations).images)
    classes = [c.name for c in annotations.categories]
    return DatasetSize(int((np.diff(boxes.starts) > 0).sum()), val_images, classes)
