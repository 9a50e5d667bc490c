"""Score the network in the middle of a run: every rank detects its share, the first one scores."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ssdctl.data.dataset import dataset_folders
from ssdctl.evaluate.analysis import FILE, About, analyse, write_evaluation
from ssdctl.evaluate.coco_ap import Detections, Scores, Scoring, run_scoring
from ssdctl.evaluate.detect import DetectOptions, detect_split, merge
from ssdctl.train import distributed
from ssdctl.train.setup import Setup


class Validation(NamedTuple):
    """What a run scored, and what it takes to say why."""

    scoring: Scoring
    found: Detections
    data: Path
    store: Path

    @property
    def scores(self) -> Scores:
        return self.scoring.scores

    def write(self, out: Path, checkpoint: Path, step: int, epoch: float) -> None:
        """Leave the analysis for the report, as `ssdctl evaluate --report RUN` would."""
        about = About(
            source=str(checkpoint),
            step=step,
            epoch=epoch,
            data=str(self.data),
            store=str(self.store),
            split="val",
            images=self.scores.images,
            detections=len(self.found.scores),
        )
        write_evaluation(out / FILE, analyse(self.scoring, self.found, about))


def validate(setup: Setup) -> Validation | None:
    """AP on the validation split, in the run's precision; None on every rank but the first.

    Each image is detected by one rank, so none is counted twice whatever the number of ranks.
    """
    assert setup.val is not None
    wishes = setup.config.evaluate
    options = DetectOptions(
        batch_size=wishes.batch_size,
        precision=setup.precision,
        threads=setup.threads,
        score_threshold=wishes.score_threshold,
        nms_iou=wishes.nms_iou,
    )
    rows = np.arange(len(setup.val.image_ids))[setup.ranks.rank :: setup.ranks.world_size]
    found = detect_split(setup.model, setup.val, rows, setup.device, options)
    parts = distributed.gather(found, setup.ranks)
    if not setup.ranks.is_first:
        return None
    merged = merge(parts)
    scoring = run_scoring(setup.val.annotations, merged)
    return Validation(scoring, merged, *dataset_folders(setup.config.data))
