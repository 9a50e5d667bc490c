"""Evaluate during a run: the ranks detect, and a separate process computes the score.

Training waits only for the detections. The score arrives some steps later and belongs to the step
of the detections; the next checkpoint is saved only after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssdctl.data.store_folder import dataset_folders
from ssdctl.distributed import collectives
from ssdctl.evaluation.analysis import BackgroundScoring
from ssdctl.evaluation.coco_ap import Detections, read_ground_truth
from ssdctl.evaluation.detect import ValidationLoss, detect
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runs.folder import run_dir
from ssdctl.runs.metrics import Record
from ssdctl.runtime import signals
from ssdctl.runtime.safe_text import counted

if TYPE_CHECKING:
    from ssdctl.data.annotations import Annotations
    from ssdctl.device import Device
    from ssdctl.distributed import Ranks
    from ssdctl.model.ssd300 import SSD300
    from ssdctl.training.plan import Plan
    from ssdctl.training.setup import Splits


class EarlyStopping:
    """Tracks the best AP of a run. A negative AP is not defined (COCO's -1) and does not count."""

    def __init__(self, ap: float | None, target: float | None, patience: int | None) -> None:
        self.ap = None if ap is not None and ap < 0 else ap
        self._target = target
        self._patience = patience
        self._without_improvement = 0

    def update(self, ap: float) -> bool:
        """Record an evaluation; return whether it is the best."""
        if ap < 0:
            return False
        if self.ap is not None and ap <= self.ap:
            self._without_improvement += 1
            return False
        self.ap, self._without_improvement = ap, 0
        return True

    def reason_to_end(self) -> str | None:
        """Return why the run ends, as a message; None if it continues."""
        if self._target is not None and self.ap is not None and self.ap >= self._target:
            return f"AP {self.ap:.3f} reached --target-ap {self._target:g}"
        if self._patience is not None and self._without_improvement >= self._patience:
            tried = counted(self._without_improvement, "evaluation")
            return f"no better AP in {tried} (--patience)"
        return None


class Evaluator:
    """Evaluates a run on its validation split.

    Args:
        past: The recorded evaluations of earlier starts that a better one replaces, on the first
            rank.
        best_ap: The best AP of the checkpoint, if that evaluation is one of them.
    """

    def __init__(
        self,
        plan: Plan,
        model: SSD300,
        splits: Splits,
        device: Device,
        ranks: Ranks,
        threads: int,
        *,
        past: Sequence[Record],
        best_ap: float | None,
    ) -> None:
        config = plan.config.train
        self._plan, self._model, self._device, self._ranks = plan, model, device, ranks
        self._splits, self._threads = splits, threads
        self._scoring: BackgroundScoring | None = None
        self._truth: Annotations | None = None  # on the first rank; `prepare` may replace the file
        if splits.val is not None and ranks.is_main:
            self._truth = read_ground_truth(splits.val.index_file)
        first = None if past else best_ap
        self.early_stopping = EarlyStopping(first, config.target_ap, config.patience)
        for record in {record["step"]: record for record in past}.values():
            self.early_stopping.update(float(record["AP"]))
        # With another global batch, later steps of the run before are not in `past`.
        if best_ap is not None and best_ap > (self.early_stopping.ap or 0):
            self.early_stopping.ap = best_ap
        self.losses: dict[str, float] = {}  # last detection's, on the first rank
        self.is_repeated = False  # the evaluation that is scored: its step has a record

    def rewind(self, past: Sequence[Record]) -> None:
        last = max((record["step"] for record in past), default=None)
        self.evaluated_step: int | None = collectives.broadcast(last, self._ranks)
        self.detected_step: int | None = None  # by this start

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after this step and was not made yet."""
        if self._splits.val is None or self.evaluated_step == step:
            return False
        return self._plan.evaluates_at(min(step, self._plan.total_steps))

    def detect(self) -> Detections | None:
        """Return the detections on the validation split; None on ranks other than the first.

        Each image is processed by one rank, so none is counted twice. A signal ends the detection
        early. The validation loss of the same images is kept for `losses`.
        """
        val = self._splits.val
        assert val is not None
        settings, losses = self._plan.config.evaluate, ValidationLoss(self._model, self._device)
        config = DetectorConfig(self._plan.precision, settings.score_threshold, settings.nms_iou)
        detections = detect(
            Detector(self._model, self._device, config),
            val,
            self._splits.scored_rows,
            batch_size=settings.batch_size,
            threads=self._threads,
            ranks=self._ranks,
            progress=signals.until_stopped,
            losses=losses,
        )
        self.losses = losses.means
        return detections

    def start_scoring(self, detections: Detections, step: int) -> None:
        """Start to score detections in the background; only one score is computed at a time."""
        assert self._scoring is None
        plan, val, rows = self._plan, self._splits.val, self._splits.val_rows
        assert val is not None
        assert self._truth is not None
        root, store = dataset_folders(plan.config.data)
        settings = plan.config.evaluate
        limits = self._model.constants.thresholds(settings.score_threshold, settings.nms_iou)
        image_ids = None if rows is None else val.image_ids[rows]
        about = EvaluationInfo(
            source=str(run_dir(plan.config).best),
            step=step,
            epoch=round(plan.epoch(step), 4),
            data=str(root),
            store=str(store),
            split="val" if rows is None else "train",
            precision=plan.precision,
            score_threshold=limits[0],
            warnings=[*val.warnings] if rows is None else [],
        )
        self._scoring = BackgroundScoring(self._truth, detections, about, image_ids)

    def scored(self, *, wait: bool) -> tuple[Evaluation, bool] | None:
        """Return the evaluation finished since the last call and whether it is the best, if any."""
        if self._scoring is None or not (wait or self._scoring.is_done):
            return None
        scoring, self._scoring = self._scoring, None
        evaluation = scoring.result()
        if self.is_repeated:
            return evaluation, False
        return evaluation, self.early_stopping.update(evaluation.metrics["AP"])
