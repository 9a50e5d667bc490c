"""Record the progress of a run: metrics.jsonl, terminal, trackers, MLPerf's log.

Only the first rank writes. Every rank calls the methods, since some of them gather from all ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ssdctl.config.render import snapshot
from ssdctl.data.dataset import warning_without_validation
from ssdctl.data.store_folder import dataset_folders
from ssdctl.distributed import collectives
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.files import write_text
from ssdctl.input.batch import Batch
from ssdctl.runs.evaluation import Evaluation, write_evaluation
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import MetricsFile, Record, environment
from ssdctl.runs.writer import open_run, tracker_id
from ssdctl.training.bad_images import BadImages
from ssdctl.training.description import (
    data_line,
    details_line,
    evaluations_after,
    length_line,
    network_line,
    recipe_line,
    warning_of_cut,
)
from ssdctl.training.mllog import MLLog
from ssdctl.training.nonfinite import BadStep
from ssdctl.training.setup import Setup
from ssdctl.training.throughput import ThroughputMeter
from ssdctl.training.trackers.background import Trackers
from ssdctl.training.trackers.base import TrackedRun
from ssdctl.training.trackers.pictures import draw_first_images
from ssdctl.training.trackers.registry import find_trackers

log = logging.getLogger(__name__)


class ProgressLog:
    """Records steps, events and evaluations of a run.

    Args:
        setup: The run.
        start_step: The step from which it continues.
        emit: Called with every record, and with what is only shown (ssdctl/runs/progress.py).
        throughput: Measures the rate of the steps.
    """

    def __init__(
        self,
        setup: Setup,
        start_step: int,
        emit: Callable[[Record], None],
        throughput: ThroughputMeter,
    ) -> None:
        self._setup = setup
        self._run = RunDir(setup.out)
        self._throughput = throughput
        self._bad_images = BadImages(setup.plan.images)
        self._epochs_done = setup.plan.epochs_ended(start_step)
        self._epoch_began = (time.monotonic(), 0.0, 0)  # clock, training seconds, images
        self._emit = emit
        self._metrics: MetricsFile | None = None
        self._trackers: Trackers | None = None
        self._best_step: int | None = None  # of an earlier start, which may not have uploaded it
        self._mllog: MLLog | None = None
        if setup.ranks.is_main:
            self._open(start_step)
            self._describe(start_step)
        self.event(
            "started",
            start_step,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            train_images=setup.plan.images,
            val_images=0 if setup.val is None else len(setup.val.image_ids),
            total_steps=setup.plan.total_steps,
            global_batch_size=setup.plan.global_batch_size,
            world_size=setup.ranks.world_size,
        )

    def _open(self, start_step: int) -> None:
        setup, config = self._setup, self._setup.config.train
        facts = environment(setup.device.label, setup.ranks.world_size)
        self._metrics = open_run(self._run, setup.run.resolved, facts, start_step)
        if classes := find_trackers(config):
            run = TrackedRun(
                id=tracker_id(self._run),
                name=self._run.path.resolve().name,
                folder=self._run.path,
                start_step=start_step,
                config=snapshot(setup.config),
                environment=facts,
                records=self._metrics.past_records,
            )
            self._trackers = Trackers(
                classes,
                run,
                uploads=config.upload_checkpoints,
                longest_wait_s=config.rank_timeout / 2,
            )
            evals = [r for r in self._metrics.past_evaluations() if float(r["AP"]) >= 0]
            self._best_step = max(evals, key=lambda r: float(r["AP"]), default={}).get("step")
        if config.mllog is not None:
            self._mllog = MLLog(Path(config.mllog), is_resumed=start_step > 0)
            self._mllog.run(
                config,
                setup.plan,
                platform=setup.device.label,
                world_size=setup.ranks.world_size,
                val_images=0 if setup.val is None else len(setup.val.image_ids),
            )

    def _describe(self, start_step: int) -> None:
        """Emit what the run is about to do, and warn of what it will lack."""
        setup, config, resolved = self._setup, self._setup.config, self._setup.run.resolved
        root, _ = dataset_folders(config.data)
        val_images = 0
        if setup.val is not None:
            val_images = len(setup.val.image_ids if setup.val_rows is None else setup.val_rows)
        evaluations = evaluations_after(resolved, setup.plan, start_step) if val_images else []
        devices = f"{setup.ranks.world_size} x " if setup.ranks.world_size > 1 else ""
        threads = f", {setup.threads} decode thread{'s' * (setup.threads > 1)}"
        names = [c.name for c in setup.train.classes]
        facts = [
            ("data", data_line(root, setup.plan.images, val_images, names)),
            ("network", network_line(config, step=start_step)),
            ("device", f"{devices}{setup.device.label}, {setup.precision}{threads}"),
            ("length", length_line(setup.plan, len(evaluations))),
            ("recipe", recipe_line(resolved, setup.plan)),
            ("run", str(setup.out)),
        ]
        past = [ap for r in self.past_evaluations() if (ap := float(r["AP"])) >= 0]
        self._emit(
            {
                "kind": "start",
                "step": start_step,
                "facts": facts,
                "details": details_line(resolved),
                "images": setup.plan.images,
                "total_steps": setup.plan.total_steps,
                "global_batch_size": setup.plan.global_batch_size,
                "evaluations": evaluations,
                "evaluation_images": val_images,
                "best_ap": max(past, default=None),
            }
        )
        if setup.val is None and not config.train.fake_data:
            log.warning("%s", warning_without_validation(root))
        if warning := warning_of_cut(resolved, setup.plan):
            log.warning("%s", warning)

    def position(self, step: int, *, is_evaluating: bool = False) -> None:
        """Tell the display, and only it, how far the run is. Costs no time on the device."""
        if self._setup.ranks.is_main:
            self._emit({"kind": "position", "step": step, "is_evaluating": is_evaluating})

    def past_evaluations(self) -> list[Record]:
        """Return the recorded evaluations; none on ranks other than the first."""
        return [] if self._metrics is None else self._metrics.past_evaluations()

    def before_step(self, step: int, batches: Sequence[Batch]) -> None:
        """Note the replaced images of the batches of the step after `step`."""
        self._bad_images.watch(batches)
        if self._mllog is not None:
            self._mllog.before_step(step)

    def step(self, step: int, losses: dict[str, float], lr: float) -> None:
        """Record the metrics of a step; warn once if training is input-bound."""
        lap = self._throughput.lap()
        data_wait = round(lap.data_wait, 4)
        self._record(
            "train",
            step,
            loss=losses["loss"],
            loss_box=losses["loss_box"],
            loss_class=losses["loss_class"],
            lr=lr,
            images_per_second=round(lap.images_per_second, 3),
            grad_norm=losses["grad_norm"],
            data_wait=data_wait,
            memory_bytes=self._setup.device.peak_memory_bytes(),
        )
        if self._throughput.is_input_bound():
            self.event("input_starves", step, data_wait=data_wait)
            log.warning(
                "the device waits for images %.0f%% of the time: use more --workers, or smaller "
                "images (ssdctl prepare --shrink 512)",
                100 * lap.data_wait,
            )

    def epoch_ended(self, step: int) -> None:
        """Record the duration and the rate of an epoch if `step` was its last step.

        The first epoch of a resumed run counts from the resumption.
        """
        epochs_done = self._setup.plan.epochs_ended(step)
        if epochs_done == self._epochs_done:
            return
        if self._mllog is not None:
            self._mllog.epoch_ended()
        clock, training_s, images = self._epoch_began
        self._epochs_done = epochs_done
        self._epoch_began = (
            time.monotonic(),
            self._throughput.training_s,
            self._throughput.images,
        )
        rate = (self._throughput.images - images) / max(
            self._throughput.training_s - training_s, 1e-9
        )
        self._record(
            "epoch",
            step,
            duration_s=round(time.monotonic() - clock, 3),
            images_per_second=round(rate, 3),
        )

    def event(self, name: str, step: int, **facts: Any) -> None:
        """Record an event."""
        self._record("event", step, event=name, **facts)

    def bad_images(self, step: int) -> None:
        """Record the images that were replaced since the last call, on any rank.

        Raises:
            DataError: There are too many of them.
        """
        for bad in self._bad_images.collect(self._setup.ranks):
            self.event("bad_image", step, **bad._asdict())
            log.warning("image %s was replaced: %s: %s", bad.image_id, bad.file, bad.problem)
        self._bad_images.refuse_too_many()

    def bad_steps(self, step: int, bad: list[BadStep]) -> None:
        """Record skipped steps, and write their image ids to RUN/nonfinite/."""
        folder = self._run.nonfinite
        shares = collectives.gather_to_first([entry.image_ids for entry in bad], self._setup.ranks)
        for number, entry in enumerate(bad):
            ids = [i for share in shares for i in share[number]]
            self.event("nonfinite", step, bad_step=entry.step)
            if self._setup.ranks.is_main:
                content = json.dumps({"step": entry.step, "image_ids": ids})
                write_text(folder / f"step-{entry.step:08d}.json", content)
        log.warning(
            "%d steps up to step %d had a NaN or infinite loss or gradient and were skipped; "
            "their images are in %s",
            len(bad),
            bad[-1].step,
            folder,
        )

    def evaluation_started(self, step: int) -> None:
        """Show the start of an evaluation, and record it in MLPerf's log."""
        self.position(step, is_evaluating=True)
        if self._mllog is not None:
            self._mllog.block_ended()
            self._mllog.start("eval", epoch_num=self._epoch_number(step))

    def training_ended(self) -> None:
        """Record that no step follows, in MLPerf's log only."""
        if self._mllog is not None:
            self._mllog.epoch_ended()
            self._mllog.block_ended()

    def detections(self, detections: Detections, step: int) -> None:
        """Draw the detections on the first validation images, for trackers only."""
        if self._trackers is not None and self._setup.val is not None:
            self._trackers.pictures(step, draw_first_images(self._setup.val, detections))

    def evaluation(
        self, evaluation: Evaluation, losses: dict[str, float], *, is_best: bool
    ) -> None:
        """Record an evaluation and the AP of each class; keep its details if it is the best.

        Args:
            evaluation: The figures.
            losses: The means of the loss and its terms over the evaluated pictures.
            is_best: Whether its AP is the best so far.
        """
        step = evaluation.about.step
        assert step is not None
        if is_best and self._metrics is not None:
            write_evaluation(self._run.evaluation, evaluation)  # for the report
        # The record comes last: an evaluation without one is repeated at the next start.
        self._record("eval", step, **evaluation.figures, **losses)
        self.event("class_ap", step, AP={c.name: c.AP for c in evaluation.per_class})
        if is_best and self._trackers is not None:
            self._trackers.checkpoint("best", step, self._run.best)
            self._best_step = None
        if self._mllog is not None:
            epoch = self._epoch_number(step)
            self._mllog.point("eval_accuracy", evaluation.figures["AP"], epoch_num=epoch)
            self._mllog.stop("eval", epoch_num=epoch)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: those steps are trained again."""
        if self._metrics is not None:
            self._metrics.rewind(step)
        self._epochs_done = self._setup.plan.epochs_ended(step)

    def close(self, step: int, *, is_success: bool) -> None:
        """End MLPerf's log and the trackers."""
        if self._mllog is not None:
            status = "success" if is_success else "aborted"
            self.training_ended()
            self._mllog.stop("run", status=status, epoch_num=self._epoch_number(step))
        if is_success and self._trackers is not None:
            if self._best_step is not None:
                self._trackers.checkpoint("best", self._best_step, self._run.best)
            self._trackers.checkpoint("last", step, self._run.last)
        self.close_trackers(is_success=is_success)

    def close_trackers(self, *, is_success: bool = False) -> None:
        """Close the trackers, which takes a limited time. Does nothing if they are closed."""
        if self._trackers is not None:
            self._trackers.close(is_success=is_success)

    def _epoch(self, step: int) -> float:
        return round(self._setup.plan.epoch(step), 4)

    def _epoch_number(self, step: int) -> float:
        """Return the number of the epoch that ends with a step, or the fraction of epochs."""
        ended = self._setup.plan.epochs_ended(step)
        return ended if self._setup.plan.epochs_ended(step - 1) < ended else self._epoch(step)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self._metrics is None:
            return
        record = {"kind": kind, "step": step, "epoch": self._epoch(step), **values}
        written = self._metrics.write(record)
        if self._trackers is not None:
            self._trackers.record(written)
        self._emit(record)
