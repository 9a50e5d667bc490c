"""Score a file of detections in COCO's results format. No image is read; torch-free."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from ssdctl.config import Config
from ssdctl.data.dataset import require_split
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store_folder import dataset_folders
from ssdctl.evaluation.analysis import analyse
from ssdctl.evaluation.coco_ap import NO_OBJECTS, Detections, read_detections, run_scoring
from ssdctl.evaluation.ground_truth import GroundTruth, ground_truth
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo

logger = logging.getLogger(__name__)


def evaluate_results(path: Path, config: Config) -> Evaluation:
    """Score a results file against the annotations of a split.

    Args:
        path: The detections.
        config: Its `data` table names the dataset; its `evaluate` table the split and the images.

    Raises:
        DataError: The file, the dataset or its annotations cannot be read.
        IntegrityError: With `evaluate.verify`, hotcoco and pycocotools differ.
    """
    settings = config.evaluate
    root, store = dataset_folders(config.data)
    truth = ground_truth(require_split(annotations_of(root, store), settings.split, root))
    detections = read_detections(path)
    image_ids = truth.annotated_image_ids if settings.annotated_only else truth.image_ids
    scoring = run_scoring(
        truth, detections, image_ids=image_ids[: settings.limit], verify=settings.verify
    )
    logger.info("%d detections against %s", len(detections.scores), truth.path)
    if scoring.has_no_objects:
        logger.warning("%s", NO_OBJECTS)
    elif not len(detections.scores):
        logger.warning("%s holds no detection: AP is 0", path)
    _warn_of_unlisted_categories(detections, truth)
    info = EvaluationInfo(
        source=str(path),
        data=str(root),
        store=str(store),
        split=settings.split,
        images=scoring.scores.images,
        detections=len(detections.scores),
    )
    return analyse(scoring, detections, info)


def _warn_of_unlisted_categories(detections: Detections, truth: GroundTruth) -> None:
    listed = sorted(entry.id for entry in truth.classes if entry.id is not None)
    unlisted = int((~np.isin(detections.category_ids, listed)).sum())
    if unlisted:
        logger.warning(
            "%d detections are of categories that %s does not list and are ignored; "
            "it lists the ids %s, ...",
            unlisted,
            truth.path,
            ", ".join(map(str, listed[:5])),
        )
