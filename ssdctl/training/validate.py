"""Evaluate during a run: the ranks detect, and a separate process computes the score.

Training waits only for the detections. The score arrives some steps later and belongs to the step
of the detections; the next checkpoint is saved only after it.
"""

from __future__ import annotations

import numpy as np

from ssdctl.data.store_folder import dataset_folders
from ssdctl.distributed import collectives
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.evaluation.detect import DetectOptions, detect_split, merge
from ssdctl.evaluation.scoring import BackgroundScoring
from ssdctl.evaluation.validation_loss import ValidationLoss, mean_losses
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runs.layout import RunDir
from ssdctl.runtime import signals
from ssdctl.training.schedule import Every, at_steps
from ssdctl.training.setup import Setup


class Validator:
    """Evaluates a run on its validation split.

    Args:
        setup: The run.
        eval_every: None evaluates only at the end, or at the epochs of --eval-at.
    """

    def __init__(self, setup: Setup, eval_every: Every | None) -> None:
        self._setup = setup
        self._every = eval_every
        self._at = set(at_steps(setup.config.train.eval_at, setup.plan))
        self._scoring: BackgroundScoring | None = None
        self.losses: dict[str, float] = {}  # of the last detection, on the first rank

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after this step."""
        if self._setup.val is None:
            return False
        return step in self._at or (self._every is not None and self._every.is_due(step))

    def detect(self) -> Detections | None:
        """Return the detections on the validation split; None on ranks other than the first.

        The validation loss of the same pictures is kept for `losses`.

        Each image is processed by one rank, so none is counted twice. A signal ends the detection
        early.

        Raises:
            NonFiniteError: An output is NaN or infinite on any rank.
            DataError: An image cannot be decoded.
        """
        setup, config = self._setup, self._setup.config.evaluate
        assert setup.val is not None
        options = DetectOptions.of(config, setup.precision, setup.threads)
        rows = np.arange(len(setup.val.image_ids)) if setup.val_rows is None else setup.val_rows
        rows = rows[setup.ranks.rank :: setup.ranks.world_size]
        val, losses = setup.val, ValidationLoss(setup.model, setup.device)

        def detect() -> tuple[Detections, list[float]]:
            detections = detect_split(
                setup.model, val, rows, setup.device, options, signals.until_stopped, losses=losses
            )
            return detections, losses.sums()

        parts = collectives.run_and_gather(detect, setup.ranks)
        if not setup.ranks.is_main:
            return None
        self.losses = mean_losses([sums for _, sums in parts])
        return merge([detections for detections, _ in parts])

    def start_scoring(self, detections: Detections, step: int, epoch: float) -> None:
        """Start to score detections in the background; only one score is computed at a time."""
        assert self._scoring is None
        setup = self._setup
        assert setup.val is not None
        root, store = dataset_folders(setup.config.data)
        image_ids = None if setup.val_rows is None else setup.val.image_ids[setup.val_rows]
        about = EvaluationInfo(
            source=str(RunDir(setup.out).best),
            step=step,
            epoch=epoch,
            data=str(root),
            store=str(store),
            split="val" if setup.val_rows is None else "train",
            images=len(setup.val.image_ids if image_ids is None else image_ids),
            detections=len(detections.scores),
            precision=setup.precision,
        )
        self._scoring = BackgroundScoring(setup.val.index_file, detections, about, image_ids)

    def scored(self, *, wait: bool) -> Evaluation | None:
        """Return the evaluation finished since the last call, if any."""
        if self._scoring is None or not (wait or self._scoring.is_done):
            return None
        scoring, self._scoring = self._scoring, None
        return scoring.result()
