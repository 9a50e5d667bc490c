"""Score the network in the middle of a run: every rank detects its share, the first one scores."""

from __future__ import annotations

import numpy as np

from ssdctl.evaluate.coco_ap import Scores, score
from ssdctl.evaluate.detect import DetectOptions, detect_split, merge
from ssdctl.train import distributed
from ssdctl.train.setup import Setup


def validate(setup: Setup) -> Scores | None:
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
    return score(setup.val.annotations, merge(parts))
