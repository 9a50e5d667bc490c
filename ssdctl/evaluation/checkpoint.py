"""Score a checkpoint: find its data, detect, score."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.checkpoint.contents import Checkpoint
from ssdctl.checkpoint.file import read_model
from ssdctl.config import Config, DataConfig
from ssdctl.config.sections.evaluate import EvaluateConfig
from ssdctl.data.classes import UNUSED, ClassName, class_differences, match_classes
from ssdctl.data.dataset import require_split
from ssdctl.data.index import earlier_packing, is_prepared
from ssdctl.data.store import Split
from ssdctl.data.store_folder import dataset_folders
from ssdctl.device.base import Device
from ssdctl.distributed.process_group import open_on_all_ranks
from ssdctl.distributed.ranks import SINGLE_PROCESS, Ranks
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.coco_ap import read_ground_truth
from ssdctl.evaluation.detect import detect
from ssdctl.evaluation.score import score
from ssdctl.files import write_bytes
from ssdctl.inference.detector import DetectorConfig
from ssdctl.inference.predict import open_detector
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.system import usable_cores

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
    """Score one checkpoint, or an ONNX file, on a split; None on ranks other than the first.

    Each rank detects on its share, the first one scores. The checkpoint's dataset replaces the
    config's unless `given`, the settings that the call names, has it.

    Raises:
        UsageError, DataError, IntegrityError, NonFiniteError: See the functions called. An error of
            one rank during detection is raised on every rank.
    """
    settings = config.evaluate
    checkpoint = read_model(path)
    data = choose_data(checkpoint, config.data, given)
    root, folder = dataset_folders(data)
    split = require_split(open_on_all_ranks(root, folder, ranks, progress), settings.split, root)
    category_ids = dataset_category_ids(checkpoint, split.classes, root)
    place = f"{root} {settings.split}" + ("" if data.root else " (the default dataset)")
    rows = _rows_to_score(split, settings, f"{path} (step {checkpoint.step}) on {place}")
    precision = choose_precision(checkpoint, settings, device)
    thresholds = settings.score_threshold, settings.nms_iou
    detector = open_detector(checkpoint, device, DetectorConfig(precision, *thresholds))
    detections = detect(
        detector,
        split,
        rows,
        batch_size=settings.batch_size,
        threads=settings.workers or usable_cores(ranks.world_size),
        ranks=ranks,
        progress=progress if ranks.is_main else None,
        category_ids=category_ids,
    )
    if detections is None:
        return None
    if detections_file is not None:
        write_bytes(detections_file, msgspec.json.encode(detections.to_coco()))
        log.info("%d detections written to %s", len(detections.scores), detections_file)
    about = EvaluationInfo(
        source=str(path),
        step=checkpoint.step,
        epoch=round(checkpoint.epoch, 4),
        data=str(root),
        store=str(folder),
        split=settings.split,
        precision=precision,
        score_threshold=detector.score_threshold,
    )
    truth = read_ground_truth(split.index_file)
    return score(truth, detections, about, split.image_ids[rows], verify=settings.verify)


def _rows_to_score(split: Split, settings: EvaluateConfig, what: str) -> NDArray[np.int64]:
    """Choose the images, and log how many have no objects or cannot be decoded."""
    has_objects = np.diff(split.starts) > 0
    rows = np.flatnonzero(has_objects | (not settings.annotated_only))[: settings.limit]
    counted = f"{len(rows)} images"
    if settings.annotated_only:
        counted += f", {int((~has_objects).sum())} without objects skipped"
    elif empty := int((~has_objects)[rows].sum()):
        counted += f", {empty} without objects (counted; skip with --annotated-only)"
    log.info("%s: %s", what, counted)
    if bad := split.image_ids[rows[~split.usable[rows]]].tolist():
        what = "images cannot be decoded and count as images without detections"
        log.warning("%d %s: %s", len(bad), what, bad[:5])
    return rows


def choose_precision(checkpoint: Checkpoint, settings: EvaluateConfig, device: Device) -> str:
    """Return the precision to evaluate in: the chosen one, else the run's, else fp32.

    In the run's precision a checkpoint has the AP that training printed. A precision in which that
    AP differs in the last digits is reported.
    """
    trained = checkpoint.config.get("train.precision", "fp32")
    is_computed = trained in device.precisions
    precision = settings.precision
    if precision == "auto":
        precision = trained if is_computed else "fp32"
    if precision != trained and checkpoint.is_of_run:
        reason = "" if is_computed else f", which {device.label} does not compute"
        log.info(
            "computing in %s; training computed its AP in %s%s: the last digits differ",
            precision,
            trained,
            reason,
        )
    return precision


def dataset_category_ids(
    checkpoint: Checkpoint, classes: list[ClassName], root: Path
) -> NDArray[np.int64]:
    """Return the dataset's category id of each class of a checkpoint, matched by name.

    Outputs that torchvision keeps for ids that COCO left out have -1.

    Raises:
        IntegrityError: One has classes that the other does not have.
    """
    ids = np.array([c.id for c in classes], np.int64)
    known = [c for c in checkpoint.classes if c.name != UNUSED]
    order = match_classes(known, classes)
    if checkpoint.classes and order is not None:
        matched = iter(ids[order])
        return np.array([-1 if c.name == UNUSED else next(matched) for c in checkpoint.classes])
    difference = class_differences(known, classes)
    if not checkpoint.classes:  # a third-party file without names: only the number can be compared
        count = checkpoint.architecture.num_classes - 1
        if count == len(classes):
            return ids
        difference = f"it has {count} classes without names, the dataset has {len(classes)}"
    raise IntegrityError(
        f"{checkpoint.path} was trained on other classes than {root} has: {difference}",
        hint="name the dataset that it was trained on: --data DIR",
    )


def data_of(checkpoint: Checkpoint) -> tuple[Path, Path]:
    """Return the dataset and store folders that a checkpoint was trained on."""
    return dataset_folders(_trained_on(checkpoint))


def _trained_on(checkpoint: Checkpoint) -> DataConfig:
    config = checkpoint.config
    return DataConfig(root=config.get("data.root"), store=config.get("data.store"))


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
