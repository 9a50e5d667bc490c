"""Score a checkpoint: find its data, detect, score, analyse the errors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.checkpoint.reader import Checkpoint, read_model
from ssdctl.config import Config, DataConfig
from ssdctl.config.sections.evaluate import EvaluateConfig
from ssdctl.data.classes import UNUSED, ClassName, class_differences, match_classes
from ssdctl.data.dataset import require_split
from ssdctl.data.index import earlier_packing, is_prepared
from ssdctl.data.store import Split
from ssdctl.data.store_folder import dataset_folders
from ssdctl.device.base import Device
from ssdctl.distributed.collectives import run_and_gather
from ssdctl.distributed.dataset import open_on_all_ranks
from ssdctl.distributed.ranks import SINGLE_PROCESS, Ranks
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.analysis import analyse
from ssdctl.evaluation.coco_ap import NO_OBJECTS, run_scoring
from ssdctl.evaluation.detect import DetectOptions, detect_with, merge
from ssdctl.evaluation.ground_truth import read_ground_truth
from ssdctl.files import write_bytes
from ssdctl.inference.predict import open_detector
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.progress import Progress

log = logging.getLogger(__name__)


def evaluate_checkpoint(
    path: Path,
    config: Config,
    device: Device,
    *,
    given: set[str],
    progress: Progress,
    ranks: Ranks = SINGLE_PROCESS,
    detections_file: Path | None = None,
) -> Evaluation | None:
    """Score one checkpoint on a split; each rank detects its share, the first one scores.

    Args:
        path: The checkpoint, or an ONNX file of `ssdctl export`.
        config: The call's config; the checkpoint's dataset replaces its own unless `given`.
        device: To detect on.
        given: The settings that the call names by options or variables.
        progress: Shows the progress of an iteration on the first rank.
        ranks: This process and the others.
        detections_file: Where to write the detections in COCO's results format.

    Returns:
        The evaluation on the first rank, None on the others.

    Raises:
        UsageError, DataError, IntegrityError, NonFiniteError: See the functions called. An error of
            one rank during detection is raised on every rank.
    """
    settings = config.evaluate
    checkpoint = read_model(path)
    data = choose_data(checkpoint, config.data, given)
    root, folder = dataset_folders(data)
    splits = open_on_all_ranks(root, folder, ranks, progress)
    split = require_split(splits, settings.split, root)
    category_ids = dataset_category_ids(checkpoint, split.classes, root)

    rows = _chosen_rows(split, settings.annotated_only, settings.limit)
    place = f"{root} {settings.split}" + ("" if data.root else " (the default dataset)")
    counted = _counted(split, rows, settings)
    log.info("%s (step %s) on %s: %s", path, checkpoint.step, place, counted)
    if not split.usable[rows].all():
        bad = split.image_ids[rows[~split.usable[rows]]].tolist()
        log.warning(
            "%d images cannot be decoded and count as images without detections: %s",
            len(bad),
            bad[:5],
        )
    threads = settings.workers or usable_cores(ranks.world_size)
    precision = choose_precision(checkpoint, settings, device)
    options = DetectOptions.of(settings, precision, threads)
    detector = open_detector(checkpoint, device, options.detector)
    share = rows[ranks.rank :: ranks.world_size]
    parts = run_and_gather(
        lambda: detect_with(
            detector,
            split,
            share,
            device,
            options,
            progress if ranks.is_main else None,
            category_ids,
        ),
        ranks,
    )
    if not ranks.is_main:
        return None
    detections = merge(parts)
    if detections_file is not None:
        write_bytes(detections_file, msgspec.json.encode(detections.to_coco()))
        log.info("%d detections written to %s", len(detections.scores), detections_file)
    ids = split.image_ids[rows]
    truth = read_ground_truth(split.index_file)
    scoring = run_scoring(truth, detections, image_ids=ids, verify=settings.verify)
    if scoring.has_no_objects:
        log.warning("%s", NO_OBJECTS)
    elif not len(detections.scores):
        log.warning("no detection scores over %g: AP is 0", detector.score_threshold)
    about = EvaluationInfo(
        source=str(path),
        step=checkpoint.step,
        epoch=round(checkpoint.epoch, 4),
        data=str(root),
        store=str(folder),
        split=settings.split,
        images=len(rows),
        detections=len(detections.scores),
        precision=precision,
        score_threshold=detector.score_threshold,
    )
    return analyse(scoring, detections, about)


def choose_precision(checkpoint: Checkpoint, settings: EvaluateConfig, device: Device) -> str:
    """Return the precision to evaluate in: the chosen one, else the run's, else fp32.

    In the run's precision a checkpoint has the AP that training printed. A precision in which that
    AP differs in the last digits is reported.
    """
    trained = checkpoint.config.get("train.precision", "fp32")
    precision = settings.precision
    if precision == "auto":
        precision = trained if trained in device.precisions else "fp32"
    if precision != trained and checkpoint.is_of_run:
        reason = "" if trained in device.precisions else f", which {device.label} does not compute"
        log.info(
            "computing in %s; training computed its AP in %s%s: the last digits differ",
            precision,
            trained,
            reason,
        )
    return precision


def _counted(split: Split, rows: np.ndarray[Any, Any], settings: EvaluateConfig) -> str:
    """Describe the number of images, and how many third-party tools would score."""
    empty = int((np.diff(split.starts)[rows] == 0).sum())
    if settings.annotated_only:
        left_out = int((np.diff(split.starts) == 0).sum())
        return f"{len(rows)} images, {left_out} without objects skipped"
    if empty:
        return f"{len(rows)} images, {empty} without objects (counted; skip with --annotated-only)"
    return f"{len(rows)} images"


def dataset_category_ids(
    checkpoint: Checkpoint, classes: list[ClassName], root: Path
) -> NDArray[np.int64]:
    """Return the dataset's category id of each class of a checkpoint, matched by name.

    Outputs that torchvision keeps for ids that COCO left out have -1.

    Args:
        checkpoint: Its classes may have other ids, or another order.
        classes: The dataset's.
        root: The dataset's folder, for messages.

    Raises:
        IntegrityError: One has classes that the other does not have.
    """
    ids = np.array([c.id for c in classes], np.int64)
    count = checkpoint.architecture.num_classes - 1
    if not checkpoint.classes:  # a third-party file without names: only the number can be compared
        if count == len(classes):
            return ids
        difference = f"it has {count} classes without names, the dataset has {len(classes)}"
    else:
        used = [c for c in checkpoint.classes if c.name != UNUSED]
        order = match_classes(used, classes)
        if order is not None:
            matched = iter(ids[order])
            return np.array([-1 if c.name == UNUSED else next(matched) for c in checkpoint.classes])
        difference = class_differences(used, classes)
    raise IntegrityError(
        f"{checkpoint.path} was trained on other classes than {root} has: {difference}",
        hint="name the dataset that it was trained on: --data DIR",
    )


def data_of(checkpoint: Checkpoint) -> tuple[Path, Path]:
    """Return the dataset and store folders that a checkpoint was trained on."""
    return dataset_folders(_trained_on(checkpoint))


def _trained_on(checkpoint: Checkpoint) -> DataConfig:
    return DataConfig(
        root=checkpoint.config.get("data.root"), store=checkpoint.config.get("data.store")
    )


def choose_data(checkpoint: Checkpoint, data: DataConfig, given: set[str]) -> DataConfig:
    """Return the dataset to score on: the user's choice, else the one it was trained on."""
    if "data.root" in given or not checkpoint.is_of_run:
        return data
    if "data.store" in given:
        return msgspec.structs.replace(_trained_on(checkpoint), store=data.store)
    root, folder = data_of(checkpoint)
    fallback, own_folder = dataset_folders(data)
    if root.exists():
        # A checkpoint is an untrusted file: only the user chooses folders that are written to.
        is_chosen = (root, folder) == (fallback, own_folder)
        if not (is_chosen or is_prepared(root, folder) or earlier_packing(folder)):
            raise DataError(
                f"{checkpoint.path} was trained on {root}, which has no store in {folder} any more",
                hint=f"--data {root} prepares it again",
            )
        return _trained_on(checkpoint)
    log.info(
        "the dataset of %s (%s) does not exist any more: using %s", checkpoint.path, root, fallback
    )
    return data


def _chosen_rows(split: Split, annotated_only: bool, limit: int | None) -> np.ndarray[Any, Any]:
    rows = np.arange(len(split.image_ids))
    if annotated_only:
        rows = rows[np.diff(split.starts) > 0]
    return rows[:limit]
