"""What a run tells, and whom: metrics.jsonl, the display, TensorBoard, MLPerf's log.

On every rank but the first it says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssdctl.config.render import to_toml
from ssdctl.config.resolve import Resolved
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.files import make_dir, remove_stale_temporaries, write_text
from ssdctl.runs.evaluation import Evaluation, write_evaluation
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import MetricsFile, Record, environment
from ssdctl.train.mllog import MLLog
from ssdctl.train.setup import Setup
from ssdctl.train.tensorboard import TensorBoard


class RunWriter:
    """The run folder's files that tell of a run.

    Args:
        setup: The run.
        resolved: Its config, with the source of every value.
        start_step: Where it begins.
        emit: Gets every record as it is written.
    """

    def __init__(
        self, setup: Setup, resolved: Resolved, start_step: int, emit: Callable[[Record], None]
    ) -> None:
        self._setup = setup
        self._emit = emit
        self._board: TensorBoard | None = None
        self._mllog: MLLog | None = None
        self.last_evaluation: int | None = None
        self.past_aps: list[float] = []
        if not setup.ranks.is_main:
            return
        config, out = setup.config.train, make_dir(setup.out)
        make_dir(out / "logs")
        remove_stale_temporaries(out)
        resolved = resolved.with_value("train.precision", setup.precision)
        resolved = resolved.with_value("train.batch_size", setup.plan.batch_size)
        write_text(out / "config.toml", to_toml(resolved))
        facts = environment(setup.device.label, setup.ranks.world_size)
        write_text(out / "environment.json", json.dumps(facts, indent=2) + "\n")
        self._metrics = MetricsFile(out / "metrics.jsonl", start_step)
        self.last_evaluation = self._metrics.last_evaluation
        self.past_aps = self._metrics.past_aps
        if config.tensorboard:
            self._board = TensorBoard(out / "tensorboard", start_step)
        if config.mllog is not None:
            self._mllog = MLLog(Path(config.mllog))
            self._mllog.run(
                config, setup.plan, 0 if setup.val is None else len(setup.val.image_ids)
            )

        self.event(
            "started",
            start_step,
            total_steps=setup.plan.total_steps,
            global_batch_size=setup.plan.global_batch_size,
            world_size=setup.ranks.world_size,
        )

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: they come again."""
        if self._setup.ranks.is_main:
            self._metrics = MetricsFile(self._setup.out / "metrics.jsonl", step)

    def train(self, step: int, figures: Record) -> None:
        """A line of kind `train`."""
        self._record({"kind": "train", **self._position(step), **figures})

    def event(self, name: str, step: int, **facts: Any) -> None:
        """A line of kind `event`."""
        self._record({"kind": "event", **self._position(step), "event": name, **facts})

    def evaluation(self, evaluation: Evaluation) -> None:
        """A line of kind `eval`, and the AP of each class."""
        step = evaluation.about.step
        assert step is not None
        self._record({"kind": "eval", **self._position(step), **evaluation.figures})
        self.event("class_ap", step, AP={c.name: c.AP for c in evaluation.per_class})
        if self._mllog is not None:
            epoch = self._position(step)["epoch"]
            self._mllog.point("eval_accuracy", evaluation.figures["AP"], epoch_num=epoch)
            self._mllog.stop("eval", epoch_num=epoch)

    def evaluation_starts(self, step: int) -> None:
        if self._mllog is not None:
            self._mllog.start("eval", epoch_num=self._position(step)["epoch"])

    def best(self, evaluation: Evaluation) -> None:
        """Keep what lies behind the best evaluation, for the report."""
        write_evaluation(RunDir(self._setup.out).evaluation, evaluation)

    def pictures(self, found: Detections, step: int) -> None:
        """Show what is found on the first validation pictures."""
        if self._board is not None and self._setup.val is not None:
            self._board.pictures(self._setup.val, found, step)

    def close(self, step: int, *, is_success: bool) -> None:
        """The run is over."""
        if self._mllog is not None:
            status = "success" if is_success else "aborted"
            self._mllog.stop("run", status=status, epoch_num=self._position(step)["epoch"])
        if self._board is not None:
            self._board.close()

    def _position(self, step: int) -> Record:
        return {"step": step, "epoch": round(self._setup.plan.epoch(step), 4)}

    def _record(self, record: Record) -> None:
        if not self._setup.ranks.is_main:
            return
        self._metrics.write(record)
        if self._board is not None:
            self._board.write(record)
        self._emit(record)
