"""Open a dataset for training or evaluation; prepare it first if it never was."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.config import Config, PrepareConfig
from ssdctl.config.fields import Tiling
from ssdctl.data import TOML, index, is_cached_store, prepare_command
from ssdctl.data.annotations import (
    AUTOMATIC,
    MAX_NAMED,
    SPLITS,
    Annotations,
    Conversion,
    paths_below,
)
from ssdctl.data.check import Checked, check
from ssdctl.data.dataset import (
    read_dataset,
    relative_image_dir,
    require_split,
    resolve_images,
)
from ssdctl.data.divide import is_held_out
from ssdctl.data.formats import load
from ssdctl.data.image_check import require_image_files
from ssdctl.data.image_files import (
    changed_images,
    relative_folder,
    require_image_folder,
    require_root,
)
from ssdctl.data.index import again_command
from ssdctl.data.prepare import prepare, require_packed
from ssdctl.data.report import Outcome
from ssdctl.data.sources import (
    changes,
    has_dataset,
    is_prepared,
    last_store,
    other_dataset,
    refuse_store_of_another,
)
from ssdctl.data.store import Split, image_folder, open_splits
from ssdctl.data.store_folder import dataset_folders, require_dataset
from ssdctl.data.stored_images import config_of, has_packed_images
from ssdctl.data.tiles import cut, objects_in_tiles, tiled, whole_views
from ssdctl.errors import DataError, UsageError
from ssdctl.runtime.progress import Progress, without_progress

log = logging.getLogger(__name__)
WHOLE = {"split": None, "group": None}
MAX_CHECKED = 200_000  # images of a split that are compared with their fingerprints at the start


def prepare_dataset(config: Config, *, force: bool, progress: Progress) -> Outcome:
    """Check the dataset of a config and write its store.

    Of --from, --split, --group, --classes, --image-dir and --verify-images, those not given are of
    the last time.

    Raises:
        UsageError: Options that exclude each other, or do not apply.
        DataError: See `prepare`.
        DiskError: The store cannot be written.
    """
    options = config.prepare
    packing = {"--encoding raw": options.encoding == "raw", "--shrink": options.shrink}
    if not options.pack and (unused := [name for name, value in packing.items() if value]):
        raise UsageError(
            f"{unused[0]} with --no-pack: it applies only to packed images",
            hint="leave out one of the two",
        )
    require_dataset(config.data)
    root, folder = dataset_folders(config.data)
    given = _conversion(root, options)
    if not force:
        refuse_store_of_another(root, folder)
    is_replaced = force and other_dataset(root, folder) is not None
    if is_replaced and (forgotten := _last(root, folder)):
        log.info("%s is replaced, with the options of its dataset: %s", folder, forgotten)
    last = msgspec.structs.asdict(AUTOMATIC if is_replaced else _last(root, folder))
    remembered = {name: value for name, value in last.items() if not getattr(given, name)}
    if config.is_chosen("prepare.source"):  # --from auto
        remembered.pop("source", None)
    conversion = msgspec.structs.replace(given, **remembered)
    if given.group is not None and conversion.split is None:
        hint = "add the share to train on: --split 0.9"
        config.require_not_given(["prepare.group"], f"{given.group} without --split", hint)
    if kept := Conversion(**remembered):
        log.info("using the options of the last time: %s; other ones replace them", kept)
    stored = None if is_replaced else config_of(folder)
    if stored and stored.verify_images and not config.is_chosen("prepare.verify_images"):
        log.info("decoding every image completely, as the last time: --no-verify-images ends it")
        chosen = options if config.is_chosen("prepare.keep_damaged") else stored
        options = msgspec.structs.replace(
            options, verify_images=True, keep_damaged=chosen.keep_damaged
        )
    if options.keep_damaged and not options.verify_images:
        raise UsageError("--keep-damaged finds no image by itself", hint="add --verify-images")
    with _errors_of_last_time(root, folder, kept):
        return prepare(
            root,
            folder,
            options,
            conversion,
            force=force,
            is_optional=not config.is_typed("prepare.split", "prepare.group"),
            progress=progress,
        )


def _conversion(root: Path, options: PrepareConfig) -> Conversion:
    source = None if options.source == "auto" else options.source
    image_dir = options.image_dir and relative_image_dir(root, options.image_dir, is_there=False)
    return Conversion(source, options.split, options.classes, image_dir, options.group)


def _last(root: Path, folder: Path, first: PrepareConfig | None = None) -> Conversion:
    """Return how the dataset was read the last time; `first`: the options of the first time."""
    made = index.last_made(last_store(root, folder))
    if made is None:
        return AUTOMATIC if first is None else _conversion(root, first)
    if (root / TOML).is_file():  # it takes precedence over the other formats
        return msgspec.structs.replace(made.conversion, source=None)
    return made.conversion


@contextlib.contextmanager
def _errors_of_last_time(root: Path, folder: Path, remembered: Conversion) -> Iterator[None]:
    """Raise DataError for a remembered option that does not fit the dataset any more."""
    try:
        yield
    except UsageError as error:
        option = str(error).split()[0].rstrip(":")
        if f"{option} " not in str(remembered):
            raise
        other = again_command(root, folder, option, "...")
        hint = f"{other} replaces it; remove {folder} to forget it"
        raise DataError(
            f"{error} (remembered from the last prepare)",
            hint="; ".join(filter(None, (error.hint, hint))),
        ) from None
    except DataError as error:
        made = index.last_made(last_store(root, folder))
        name = remembered.source or (made.format if made else None)
        if name is None:
            raise
        try:
            is_known = bool(load(name).recognize(root)) or remembered.source is None
        except UsageError:
            text = f"{error} (the last time its format was {name}, which is not installed)"
            raise DataError(text, hint=error.hint) from None
        if is_known:
            raise
        hint = f"{again_command(root, folder, '--from', 'auto')} recognizes the format again"
        text = f"{error} (--from {name} is remembered from the last prepare)"
        raise DataError(text, hint=hint) from None


def _read_as_last_time(
    root: Path, folder: Path, first: PrepareConfig | None
) -> dict[str, Annotations]:
    with _errors_of_last_time(root, folder, _last(root, folder)):
        return read_dataset(root, _last(root, folder, first), store=folder, is_optional=True)


def open_dataset(
    root: Path,
    folder: Path,
    options: PrepareConfig | None = None,
    *,
    progress: Progress = without_progress,
) -> dict[str, Split]:
    """Return the dataset's splits, ready to read.

    One that was never prepared is indexed first. If its labels changed, they are indexed again, but
    packed images are never replaced.

    Args:
        options: Of `prepare`. How the annotations are read is of the last time, if there is one.

    Raises:
        DataError: See `prepare`; or an image is missing or changed since.
    """
    _require(root, folder)
    changed = _changes(root, folder)
    if changed:
        log.info("indexing %s again, as `%s` does", root, again_command(root, folder))
    elif changed is None:
        log.info(
            "%s is not prepared yet: checking it, as `%s` does",
            root,
            prepare_command(root, folder, "--no-pack"),
        )
    elif is_cached_store(folder):
        log.info("%s cannot be written: its index is in %s", root, folder)
    if changed is None or changed:
        _index(root, folder, options or PrepareConfig(), progress)
        return open_splits(root, folder)
    splits = open_splits(root, folder)
    for split in splits:
        _refuse_changed(root, folder, split)
    return splits


def _require(root: Path, folder: Path) -> None:
    if not has_dataset(root, folder):
        require_root(root)


def _changes(root: Path, folder: Path) -> list[str] | None:
    """Return what changed since a dataset was prepared, with a warning; None: it never was."""
    refuse_store_of_another(root, folder)
    made = index.read_made(folder)
    changed = None if made is None else changes(root, folder, made)
    if changed:
        log.warning("%s changed since it was prepared: %s", root, "; ".join(changed))
    return changed


def _index(root: Path, folder: Path, options: PrepareConfig, progress: Progress) -> None:
    unpacked = PrepareConfig(
        pack=False,
        allow_dropped=options.allow_dropped,
        verify_images=options.verify_images,
        keep_damaged=options.keep_damaged,
    )
    with _errors_of_last_time(root, folder, _last(root, folder)):
        outcome = prepare(
            root,
            folder,
            unpacked,
            _last(root, folder, options),
            is_optional=True,
            keep_images=True,
            progress=progress,
        )
    for report in outcome.splits:
        for kind, count in report.counts().items():
            log.info("  %s: %d x %s", report.split, count, kind)
        for warning in (*report.notes, *report.warnings):
            log.info("  %s: %s", report.split, warning)


def _refuse_changed(root: Path, folder: Path, split: str) -> None:
    metadata = index.read_metadata(folder, split)
    if metadata is None or metadata.packed:
        return
    images_dir = image_folder(root, metadata)
    require_image_folder(images_dir, split, Path(metadata.origin))
    images = index.read_images(folder, split, MAX_CHECKED)
    if changed := changed_images(images_dir, images.names, images.fingerprints):
        raise DataError(
            f"{images_dir}: {len(changed)} images are missing or changed since {folder} was "
            f"prepared: {', '.join(changed[:MAX_NAMED])}",
            hint=f"put them back, or prepare it again: {again_command(root, folder)}",
        )


def without_division(config: Config, root: Path) -> PrepareConfig:
    """Return the options of `prepare` to read what is not trained on: a file is not divided."""
    return msgspec.structs.replace(config.prepare, **(WHOLE if root.is_file() else {}))


class DatasetSize(NamedTuple):
    trainable: int  # training images with boxes
    background: int | None  # training images without objects; None: not known
    validation: int  # images; 0: no validation split
    classes: list[str]
    warnings: Sequence[str] = ()  # on measuring with the validation split


def fold_rows(split: Split, fold: str, group: str | None) -> NDArray[np.int64]:
    """Return the images of the fold `I/K`.

    Args:
        group: As in `divided`; None: that of `prepare`.
    """
    annotations = index.read_annotations(split.index_file)
    metadata = index.require_metadata(split.index_file)
    paths = paths_below(metadata.images, annotations.file_names)
    return np.flatnonzero(is_held_out(paths, fold, group or metadata.made.conversion.group))


def without_images(split: Split, images: NDArray[np.int64]) -> Split:
    """Return a split that does not train on some images, nor on their tiles."""
    is_held = np.zeros(split.num_images, np.bool_)
    is_held[images] = True
    if split.tiles is not None:
        is_held = np.concatenate([is_held, is_held[split.tiles.rows]])
    trainable, background = (r[~is_held[r]] for r in (split.trainable, split.background))
    return split._replace(trainable=trainable, background=background)


def count_images(
    root: Path,
    folder: Path,
    tiling: Tiling | None = None,
    fold: str | None = None,
    group: str | None = None,
    options: PrepareConfig | None = None,
) -> DatasetSize:
    """Return how many images and which classes a run would train on; nothing is written.

    Args:
        options: See `open_dataset`.

    Raises:
        DataError: As `open_dataset`, if a store was made.
    """
    _require(root, folder)
    changed = _changes(root, folder)
    if changed == []:
        splits = open_splits(root, folder)
        for split in splits:
            _refuse_changed(root, folder, split)
        train = tiled(require_split(splits, "train", root), tiling)
        val, names = splits.get("val"), [c.name for c in train.classes]
        num_val, warnings = (len(val.image_ids), val.warnings) if val else (0, ())
        if fold is not None:
            rows = fold_rows(train, fold, group)
            train, num_val, warnings = without_images(train, rows), len(rows), ()
        return DatasetSize(len(train.trainable), len(train.background), num_val, names, warnings)
    unprepared = _read_as_last_time(root, folder, options)
    annotations = require_split(unprepared, "train", root)
    resolved = resolve_images(unprepared)
    # `prepare` has refused a dataset without boxes: not its packed images are the reason.
    if changed or check(resolved["train"][0]).objects.num_trained().any():
        require_packed(root, folder, resolved)
    if not has_packed_images(folder):
        for split, (images, sizes) in resolved.items():
            require_image_files(images, split, sizes)
    annotations = resolved["train"][0]
    num_val = len(unprepared["val"].file_names) if "val" in unprepared else 0
    checked, is_used = check(annotations), np.ones(len(annotations.file_names), np.bool_)
    if fold is not None:
        below = relative_folder(annotations.folder, root)
        paths = paths_below(below, annotations.file_names)
        is_used = ~is_held_out(paths, fold, group or _last(root, folder, options).group)
        num_val = int((~is_used).sum())
    trainable = int(((checked.objects.num_trained() > 0) & is_used).sum())
    background = int((checked.is_empty & is_used).sum())
    if tiling is not None:
        trainable, num_tiles = _count_tiles(annotations, checked, tiling, is_used)
        background += num_tiles
    warnings = annotations.notes if changed else ()  # how images are divided now
    names = [c.name for c in annotations.classes]
    return DatasetSize(trainable, background, num_val, names, warnings)


def _count_tiles(
    annotations: Annotations, checked: Checked, tiling: Tiling, is_used: NDArray[np.bool_]
) -> tuple[int, int]:
    """Return how many views of used images show objects, and how many tiles touch none."""
    objects, tiles = checked.objects, cut(annotations.sizes, tiling)
    used, counts = objects.is_trained, objects.num_trained()
    starts = np.concatenate([[0], np.cumsum(counts)])
    found = objects_in_tiles(
        tiles, annotations.sizes, starts, objects.fractions[used], objects.labels[used]
    )
    is_known = ((counts > 0) | checked.is_empty) & is_used
    learned = found.learned() & is_used[tiles.rows]
    whole = whole_views(tiles.rows[learned], len(is_used))[(counts > 0) & is_used]
    without = is_known[tiles.rows] & (found.counts == 0)
    return int(whole.sum() + learned.sum()), int(without.sum())


def annotations_with_images(root: Path, folder: Path) -> dict[str, Annotations]:
    """Return the same as `annotations_of`, with the paths of the image files."""
    annotations = annotations_of(root, folder)
    if is_prepared(root, folder):
        return annotations
    return {split: found for split, (found, _) in resolve_images(annotations).items()}


def annotations_of(
    root: Path, folder: Path, options: PrepareConfig | None = None
) -> dict[str, Annotations]:
    """Return the annotations of a dataset: the index's if it is prepared, else the files'.

    Nothing is written. `options`: see `open_dataset`.
    """
    _require(root, folder)
    if not is_prepared(root, folder):
        return _read_as_last_time(root, folder, options)
    return {
        split: index.read_annotations(index.index_path(folder, split))._replace(
            folder=image_folder(root, metadata)
        )
        for split in SPLITS
        if (metadata := index.read_metadata(folder, split)) is not None
    }
