"""Choose what to score a checkpoint on: the dataset, its images and classes, and the precision.

A checkpoint remembers its dataset, fold and precision; what the user chooses takes precedence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.config import Config, DataConfig
from ssdctl.config.sections import EvaluateConfig
from ssdctl.data.annotations import (
    MAX_NAMED,
    Annotations,
    ClassName,
    class_differences,
    match_classes,
)
from ssdctl.data.coco_json import UNUSED
from ssdctl.data.index import again_command, image_contents, read_made
from ssdctl.data.open_dataset import fold_rows, without_images
from ssdctl.data.sources import has_dataset, is_prepared
from ssdctl.data.store_folder import dataset_folders, real_path
from ssdctl.errors import DataError, IntegrityError, SsdctlError, UsageError
from ssdctl.runs.folder import run_of
from ssdctl.runs.metrics import Record
from ssdctl.runs.run import Run
from ssdctl.runtime.safe_text import counted, listed, quoted_folder

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import ModelFile
    from ssdctl.data.store import Split
    from ssdctl.device import Device

log = logging.getLogger(__name__)
Fold = tuple[str, str | None]  # `I/K`, and the groups


def choose_data(checkpoint: ModelFile, config: Config) -> DataConfig:
    """Return the dataset to score on: the user's choice, else the one it was trained on."""
    data, explicit = config.data, config.explicit_settings()
    settings = checkpoint.run_settings
    if "data.root" in explicit or settings is None or settings.get("train.fake_data"):
        return data
    if "data.store" in explicit:
        return msgspec.structs.replace(trained_on(checkpoint), store=data.store)
    own, fallback = trained_on(checkpoint), dataset_folders(data)
    root, folder = dataset_folders(own)
    if own.root and not has_dataset(root, folder):
        problem = f"{checkpoint.path} was trained on {root}, which is not there any more"
        if not config.is_chosen("data.root"):
            named = quoted_folder(fallback[0]) if fallback[0].exists() else "DIR"
            raise DataError(
                problem, hint=f"name its folder now, or another dataset: --data {named}"
            )
        log.warning("%s: using %s, of %s", problem, fallback[0], config.sources["data.root"])
        return data
    # A checkpoint is an untrusted file: only the user chooses folders that are written to.
    is_chosen = [*map(real_path, (root, folder))] == [*map(real_path, fallback)]
    if not (is_chosen or is_prepared(root, folder)):
        state = "has no store" if read_made(folder) is None else "changed since it was prepared"
        raise DataError(
            f"{checkpoint.path} was trained on {root}, which {state} ({folder})",
            hint=f"{again_command(root, folder)}, or name another one: --data DIR",
        )
    return own


def trained_on(checkpoint: ModelFile) -> DataConfig:
    """Return the dataset that a checkpoint's run trained on; the default one if unknown.

    If it is gone, as after a move, it is the one with which the run was continued.
    """
    own, run = _data_of(checkpoint.run_settings or {}), run_of(checkpoint.path)
    if own.root and run.checkpoints == checkpoint.path.absolute().parent:
        with contextlib.suppress(SsdctlError):
            last = _data_of(Run(run.path).settings)
            if last.root and not has_dataset(*dataset_folders(own)):
                return last
    return own


def _data_of(settings: Mapping[str, Any]) -> DataConfig:
    return DataConfig(root=settings.get("data.root"), store=settings.get("data.store"))


def name_of_images(root: Path, split: str, fold: Fold | None, *, is_default: bool) -> str:
    """Return the dataset, split and fold, for messages."""
    part = "" if fold is None else f", fold {fold[0]}"
    return f"{root} {split}{part}" + " (the default dataset)" * is_default


def choose_fold(
    checkpoint: ModelFile,
    config: Config,
    root: Path,
    splits: Mapping[str, Split],
    *,
    is_required: bool = False,
) -> Fold | None:
    """Return the fold of a checkpoint's run, and its groups, to score on; None without one.

    A split or another dataset that the user names takes precedence. A dataset that was moved is
    recognized by its labels and images.

    Raises:
        UsageError: A fold `is_required`, and the dataset is another one.
    """
    settings = checkpoint.run_settings or {}
    if settings.get("train.fold") is None or config.is_chosen("evaluate.split"):
        return None
    fold = settings["train.fold"], settings.get("train.group")
    if _is_own(checkpoint, root):
        return fold
    records = _events(checkpoint)
    with contextlib.suppress(SsdctlError, KeyError):  # no such split, or not divisible
        trained = without_images(splits["train"], fold_rows(splits["train"], *fold))
        now = {"labels": trained.labels_digest(), **_images_now(settings, trained)}
        if any(now.items() <= record.items() for record in records):
            return fold
    if is_required and not records:
        raise UsageError(
            f"{checkpoint.path}: only its run folder shows whether {root} is the dataset of its "
            "fold, and it is in none",
            hint="name the run, or score one file on --split",
        )
    if is_required:
        raise UsageError(
            f"{checkpoint.path}: {root} is not the dataset of its fold, or has other labels now",
            hint="name that dataset with --data DIR, or score one run on --split",
        )
    return None


def _is_own(checkpoint: ModelFile, root: Path) -> bool:
    """Return whether a dataset has the path of the one that a checkpoint's run trained on."""
    own, _ = dataset_folders(trained_on(checkpoint))
    return real_path(own) == real_path(root)


def _events(checkpoint: ModelFile) -> list[Record]:
    """Return the events of a checkpoint's run; none of a checkpoint without its run."""
    with contextlib.suppress(SsdctlError):
        return Run(run_of(checkpoint.path).path).events
    return []


def warn_of_images(
    checkpoint: ModelFile,
    root: Path,
    splits: Mapping[str, Split],
    name: str,
    held: NDArray[np.int64] | None,
) -> list[str]:
    """Log the warnings of a split, and whether the run may have trained on its images."""
    if part := (checkpoint.run_settings or {}).get("train.overfit"):
        log.info("training computed its AP on its training images (--overfit %s)", part)
    warnings = [*splits[name].warnings]
    if held is not None or name != "train":  # else the user asks for training images
        is_divided = name != "test"
        warning = warning_of_images(checkpoint, root, splits[name], held, is_divided=is_divided)
        warnings += [warning] if warning else []
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def warning_of_images(
    checkpoint: ModelFile,
    root: Path,
    split: Split,
    held: NDArray[np.int64] | None,
    *,
    is_divided: bool = True,
) -> str | None:
    """Return a warning if the run of a checkpoint may have trained on images that are scored.

    Args:
        split: The split that is scored.
        held: The training images that are scored; None scores the whole split.
        is_divided: Whether `--split` or `--fold` may have chosen the images.
    """
    if not checkpoint.run_settings:
        return None
    records = _events(checkpoint)
    is_own = is_divided and _is_own(checkpoint, root)
    if is_own and _was_divided_anew(checkpoint, split, held, records):
        return (
            f"{root} was divided in another way when {checkpoint.path} was trained: the run may "
            "have trained on images that are scored"
        )
    trained = {content for record in records for content in record.get("sample", ())}
    contents = image_contents(split.index_file)
    scored = contents if held is None else contents[held]
    if trained.isdisjoint(f"{content:012x}" for content in scored):
        return None
    return f"{checkpoint.path} was trained on images of {root} that are scored"


def _was_divided_anew(
    checkpoint: ModelFile, split: Split, held: NDArray[np.int64] | None, records: Sequence[Record]
) -> bool:
    """Return whether the dataset is divided in another way than when the run began."""
    settings = checkpoint.run_settings or {}
    known = split.divisions or (None,)
    if any(record.get("division", known[0]) not in known for record in records):
        return True
    now: dict[str, object] = {}
    if held is not None:
        train = split
        if (fold := settings.get("train.fold")) is not None:
            try:
                rows = fold_rows(split, fold, settings.get("train.group"))
            except SsdctlError:  # the fold does not exist any more
                return True
            train = without_images(split, rows)
        if np.isin(train.trainable, held).any():  # another fold, or none
            return True
        now = _images_now(settings, train)
    return any(record.get(key, value) != value for record in records for key, value in now.items())


def _images_now(settings: Mapping[str, Any], train: Split) -> dict[str, object]:
    """Return the fingerprint that a start records; empty if it trains on some of the images."""
    is_part = settings.get("train.limit_train") or settings.get("train.overfit")
    return {} if is_part else {"image_ids": train.training_digest()}


def rows_to_score(
    split: Split,
    truth: Annotations,
    settings: EvaluateConfig,
    what: str,
    held: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the rows of the images; log how many have no objects or cannot be decoded."""
    has_objects = np.bincount(truth.rows, minlength=split.num_images) > 0
    every = np.arange(split.num_images) if held is None else np.sort(held)
    rows = (every[has_objects[every]] if settings.annotated_only else every)[: settings.limit]
    text = counted(len(rows), "image")
    if settings.annotated_only:
        is_cut = len(rows) == settings.limit  # else all images were looked at
        reached = every[every <= rows[-1]] if is_cut else every
        text += f", {len(reached) - len(rows)} without objects skipped"
    elif empty := int((~has_objects)[rows].sum()):
        text += f", {empty} without objects (counted; skip with --annotated-only)"
    require_images(rows, what)
    log.info("%s: %s", what, text)
    if bad := split.image_ids[rows[~split.usable[rows]]].tolist():
        what = "images cannot be decoded and count as images without detections"
        log.warning("%d %s: %s", len(bad), what, bad[:5])
    return rows


def require_images(images: NDArray[np.int64], what: str) -> None:
    if not len(images):
        raise DataError(
            f"{what}: no image to score", hint="--annotated-only leaves out images without objects"
        )


def choose_precision(checkpoint: ModelFile, settings: EvaluateConfig, device: Device) -> str:
    """Return the precision to evaluate in: the chosen one, else the run's, else fp32.

    In the run's precision the AP equals the AP of training; another precision is reported.
    """
    trained = (checkpoint.run_settings or {}).get("train.precision", "fp32")
    is_computed = trained in device.precisions
    precision = settings.precision
    if precision == "auto":
        precision = trained if is_computed else "fp32"
    if precision != trained and checkpoint.run_settings is not None:
        reason = "" if is_computed else f", which {device.label} does not compute"
        text = "computing in %s; training computed its AP in %s%s: the last digits differ"
        log.info(text, precision, trained, reason)
    return precision


def dataset_category_ids(
    checkpoint: ModelFile, classes: list[ClassName], root: Path
) -> NDArray[np.int64]:
    """Return the dataset's category id of each class of a checkpoint, matched by name.

    Classes that the dataset lacks have -1, and outputs that torchvision keeps for ids that COCO
    left out.

    Raises:
        IntegrityError: The dataset has classes that the checkpoint lacks.
    """
    ids = np.array([c.id for c in classes], np.int64)
    known = [c for c in checkpoint.classes if c.name != UNUSED]
    order = match_classes(known, classes)
    if order is not None and max(order, default=-1) >= 0:
        if absent := [c.name for c, n in zip(known, order, strict=True) if n < 0]:
            text = "%s lacks classes, whose detections do not count: %s"
            log.warning(text, root, listed(absent, MAX_NAMED))
        matched = iter(np.append(ids, -1)[order])
        return np.array([-1 if c.name == UNUSED else next(matched) for c in checkpoint.classes])
    difference = class_differences(known, classes)
    if not checkpoint.classes:  # a third-party file without names: only the number can be compared
        count = checkpoint.architecture.num_classes - 1
        if checkpoint.has_ids_as_labels(classes):
            labels = np.arange(1, count + 1)
            return np.where(np.isin(labels, ids), labels, -1)
        if count == len(classes):
            return ids
        number = counted(count, "class")
        difference = f"it has {number} without names, the dataset has {len(classes)}"
    raise IntegrityError(
        f"{checkpoint.path} was trained on other classes than {root} has: {difference}",
        hint="name the dataset that it was trained on: --data DIR",
    )
