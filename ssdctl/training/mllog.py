"""Write MLPerf log lines (`:::MLLOG {...}`), for tools that read submissions. Torch-free.

The keys are those of the rules for SSD of MLPerf training 1.0, in the open division. A block is the
training between two evaluations. Epochs are counted from 1.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ssdctl.config import TrainConfig
from ssdctl.files import disk_errors, no_follow
from ssdctl.training.schedule import TrainSchedule, next_evaluation

BENCHMARK = "ssd"
CROP_ATTEMPTS = 1  # per mode: ssdctl/input/crop.py
PACKAGE_PARENT = Path(__file__).parents[2]


class MLLog:
    """Appends MLPerf log lines to a file.

    Args:
        path: The file; its folder is created.
        is_resumed: Whether the run continues: the log of its first part then continues too.
    """

    def __init__(self, path: Path, *, is_resumed: bool = False) -> None:
        self._path = path
        self._block: int | None = None  # the first epoch of the block in progress
        self._epoch: int | None = None  # the epoch in progress
        with disk_errors(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._has_header = is_resumed and path.exists() and path.stat().st_size > 0
        if not self._has_header:
            self.point("cache_clear", True)
            self.start("init")

    def point(self, key: str, value: Any, **metadata: Any) -> None:
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, what: str, **metadata: Any) -> None:
        self._write("INTERVAL_START", f"{what}_start", None, metadata)

    def stop(self, what: str, **metadata: Any) -> None:
        self._write("INTERVAL_END", f"{what}_stop", None, metadata)

    def run(
        self,
        config: TrainConfig,
        plan: TrainSchedule,
        *,
        platform: str,
        world_size: int,
        val_images: int,
    ) -> None:
        """Log the run's settings after its setup, then its start."""
        self._config, self._plan = config, plan
        if self._has_header:
            return
        self.point("submission_benchmark", BENCHMARK)
        self.point("submission_division", "open")
        self.point("submission_org", "ssdctl")
        self.point("submission_platform", platform)
        self.point("submission_status", "research")
        self.point("seed", config.seed)
        self.point("global_batch_size", plan.global_batch_size)
        self.point("gradient_accumulation_steps", config.accumulate)
        self.point("train_samples", plan.images)
        self.point("eval_samples", val_images)
        self.point("max_samples", CROP_ATTEMPTS)
        self.point("model_bn_span", plan.batch_size * (world_size if config.sync_bn else 1))
        self.point("opt_name", config.optimizer)
        self.point("opt_base_learning_rate", plan.peak_lr)
        self.point("opt_weight_decay", config.weight_decay)
        self.point("opt_learning_rate_warmup_steps", plan.warmup_steps)
        self.point("opt_learning_rate_warmup_factor", 0)  # the warm-up starts at 0
        self.point("opt_learning_rate_decay_boundary_epochs", list(config.decay_epochs))
        self.point("opt_learning_rate_decay_boundary_steps", list(plan.decay_steps))
        self.stop("init")
        self.start("run")

    def before_step(self, step: int) -> None:
        """Log the start of a block and of an epoch if one starts with the step after `step`."""
        epoch = self._plan.epochs_ended(step) + 1
        if self._block is None:
            self._block = epoch
            end = next_evaluation(self._config, self._plan, step)
            count = max(round(self._plan.epoch(end) - self._plan.epoch(step)), 1)
            self.start("block", first_epoch_num=epoch, epoch_count=count)
        if self._epoch is None:
            self._epoch = epoch
            self.start("epoch", epoch_num=epoch)

    def epoch_ended(self) -> None:
        """Log the end of the epoch in progress, if there is one."""
        if self._epoch is not None:
            self.stop("epoch", epoch_num=self._epoch)
            self._epoch = None

    def block_ended(self) -> None:
        """Log the end of the block in progress, if there is one."""
        if self._block is not None:
            self.stop("block", first_epoch_num=self._block)
            self._block = None

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        line = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {**_place(), **metadata},
        }
        with (
            disk_errors(self._path, "writing"),
            open(self._path, "a", encoding="utf-8", opener=no_follow) as file,
        ):
            file.write(f":::MLLOG {json.dumps(line)}\n")


def _place() -> dict[str, Any]:
    """Return the file and the line of the call of `point`, `start` or `stop`."""
    frame = sys._getframe(3)
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(PACKAGE_PARENT):
        path = path.relative_to(PACKAGE_PARENT)
    return {"file": path.as_posix(), "lineno": frame.f_lineno}
