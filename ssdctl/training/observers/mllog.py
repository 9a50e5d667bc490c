"""Write MLPerf log lines (`:::MLLOG {...}`), for tools that read submissions.

The keys are those of the rules for SSD of MLPerf training 1.0, in the open division. A block is the
training between two evaluations. Epochs are counted from 1.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ssdctl.files import disk_errors, no_follow
from ssdctl.training.observers import End, Observer, Rewind, Scored, Start, Step

BENCHMARK = "ssd"
CROP_ATTEMPTS = 1  # per mode: ssdctl/input/crop.py
PACKAGE_PARENT = Path(__file__).parents[3]


class MLLog(Observer):
    """Appends MLPerf log lines to the file of `--mllog`; a resumed run's log continues."""

    def on_start(self, start: Start) -> None:
        self._plan, self._config = start.plan, start.plan.config.train
        assert self._config.mllog is not None
        self._path = Path(self._config.mllog).absolute()  # the program may change its folder
        self._block: int | None = None  # the first epoch of the block in progress
        self._epoch: int | None = None  # the epoch in progress
        self._is_running = False  # a resumed run, which may have ended, from its first step on
        with disk_errors(self._path, "writing"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            has_header = start.step > 0 and self._path.exists() and self._path.stat().st_size > 0
        if not has_header:
            self._header(start)

    def on_step(self, step: Step) -> None:
        self._begin(step.step - 1, int(1000 * step.began))
        if self._ends_epoch(step.step):
            self._end_epoch()

    def on_evaluation_start(self, step: int) -> None:
        if step == self._plan.total_steps:
            self._end_epoch()
        self._end_block()
        self._start_run()
        self._start("eval", epoch_num=self._epoch_number(step))

    def on_evaluation(self, scored: Scored) -> None:
        epoch = self._epoch_number(scored.step)
        self._point("eval_accuracy", scored.evaluation.metrics["AP"], epoch_num=epoch)
        self._stop("eval", epoch_num=epoch)

    def on_rewind(self, rewind: Rewind) -> None:
        self._end_epoch()
        self._end_block()

    def on_end(self, end: End) -> None:
        self._end_epoch()
        self._end_block()
        best, target = end.summary.best_ap, self._config.target_ap
        has_target = target is None or (best is not None and best >= target)
        status = "success" if end.is_success and has_target else "aborted"
        if end.has_progressed:  # also if no step was left
            self._start_run()
        if self._is_running:
            self._stop("run", status=status, epoch_num=self._epoch_number(end.step))

    def _header(self, start: Start) -> None:
        config, plan = self._config, self._plan
        self._point("cache_clear", True)
        self._start("init")
        self._point("submission_benchmark", BENCHMARK)
        self._point("submission_division", "open")
        self._point("submission_org", "ssdctl")
        self._point("submission_platform", start.device)
        self._point("submission_status", "research")
        self._point("seed", config.seed)
        self._point("global_batch_size", plan.global_batch_size)
        self._point("gradient_accumulation_steps", config.accumulate)
        self._point("train_samples", plan.images)
        self._point("eval_samples", start.val_images)
        self._point("max_samples", CROP_ATTEMPTS)
        shared = start.world_size if config.sync_bn else 1
        self._point("model_bn_span", plan.batch_size * shared)
        self._point("opt_name", config.optimizer)
        self._point("opt_base_learning_rate", plan.base_lr)
        self._point("opt_weight_decay", config.weight_decay)
        self._point("opt_learning_rate_warmup_steps", plan.warmup_steps)
        self._point("opt_learning_rate_warmup_factor", 0)  # the warm-up starts at 0
        self._point("opt_learning_rate_decay_boundary_epochs", list(config.decay_epochs))
        self._point("opt_learning_rate_decay_boundary_steps", list(plan.decay_steps))
        self._stop("init")
        self._start_run()

    def _start_run(self, time_ms: int | None = None) -> None:
        if not self._is_running:
            self._start("run", time_ms)
            self._is_running = True

    def _begin(self, step: int, time_ms: int) -> None:
        self._start_run(time_ms)
        epoch = self._plan.epochs_ended(step) + 1
        if self._block is None:
            self._block = epoch
            end = self._plan.next_evaluation(step)
            count = max(round(self._plan.epoch(end) - self._plan.epoch(step)), 1)
            self._start("block", time_ms, first_epoch_num=epoch, epoch_count=count)
        if self._epoch is None:
            self._epoch = epoch
            self._start("epoch", time_ms, epoch_num=epoch)

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            self._stop("epoch", epoch_num=self._epoch)
            self._epoch = None

    def _end_block(self) -> None:
        if self._block is not None:
            self._stop("block", first_epoch_num=self._block)
            self._block = None

    def _epoch_number(self, step: int) -> float:
        """Return the number of the epoch that ends with a step, or the fraction of epochs."""
        plan = self._plan
        return plan.epochs_ended(step) if self._ends_epoch(step) else round(plan.epoch(step), 4)

    def _ends_epoch(self, step: int) -> bool:
        return self._plan.epochs_ended(step - 1) < self._plan.epochs_ended(step)

    def _point(self, key: str, value: Any, **metadata: Any) -> None:
        self._write("POINT_IN_TIME", key, value, metadata)

    def _start(self, what: str, time_ms: int | None = None, **metadata: Any) -> None:
        self._write("INTERVAL_START", f"{what}_start", None, metadata, time_ms)

    def _stop(self, what: str, **metadata: Any) -> None:
        self._write("INTERVAL_END", f"{what}_stop", None, metadata)

    def _write(
        self,
        event_type: str,
        key: str,
        value: Any,
        metadata: dict[str, Any],
        time_ms: int | None = None,
    ) -> None:
        line = {
            "namespace": "",
            "time_ms": int(1000 * time.time()) if time_ms is None else time_ms,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {**_call_site(), **metadata},
        }
        with (
            disk_errors(self._path, "writing"),
            open(self._path, "a", encoding="utf-8", opener=no_follow) as file,
        ):
            file.write(f":::MLLOG {json.dumps(line)}\n")


def _call_site() -> dict[str, Any]:
    """Return the file and the line of the call of `_point`, `_start` or `_stop`."""
    frame = sys._getframe(3)
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(PACKAGE_PARENT):
        path = path.relative_to(PACKAGE_PARENT)
    return {"file": path.as_posix(), "lineno": frame.f_lineno}
