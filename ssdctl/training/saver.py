"""When a run is saved, where, and in which thread."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import Checkpoint
    from ssdctl.training.plan import Plan

log = logging.getLogger(__name__)


class Saver(CheckpointFolder):
    """Writes the checkpoints of a run in a thread, on the first rank; all ranks call it alike."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(plan.out, plan.config.train.keep)
        resume = plan.config.train.resume
        self._resumed = None if resume in ("auto", "never") else Path(resume)
        self._every = plan.every(plan.config.train.save_every)
        self._global_batch = plan.global_batch_size
        self._since = time.monotonic()  # the last save, or the last time that one was due
        self.saved_step: int | None = None

    def start(self, step: int, checkpoint: Checkpoint | None) -> None:
        """Set aside the checkpoints after `step`, from which the run continues.

        With another global batch that is not the step of the checkpoint.
        """
        is_own = checkpoint is not None and self.is_own(checkpoint.path)
        is_same_step = checkpoint is None or step == checkpoint.step
        self.saved_step = step if is_own else None
        if not self._ranks.is_main:
            return
        resumed, file = self._resumed, None
        if checkpoint is not None and resumed is not None and resumed.exists():
            file = resumed if checkpoint.path.samefile(resumed) else None
        if checkpoint is None or not is_own or is_same_step:
            later = self.go_back(step, file)
        else:
            later = self.renumber(checkpoint.path, step, self._global_batch, file)
        for path in later:
            log.warning("%s: set aside, the run continues from step %d", path.name, step)

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of a step and its evaluation as the best, once it is written."""
        self.best_step = step
        if self._ranks.is_main:
            self.wait()
            self.update()

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by the number of steps, which all ranks count."""
        return self._every.is_due(step)

    def is_due_by_clock(self) -> bool:
        """Return whether a save is due by the first rank's clock; true once for every save."""
        now, period = time.monotonic(), self._every.seconds
        if period is None or not self._ranks.is_main or now - self._since < period:
            return False
        self._since = now
        return True

    def save(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        if self._ranks.is_main:
            super().save(checkpoint)
        self.saved_step, self._since = checkpoint.step, time.monotonic()

    def newest(self) -> Checkpoint | None:
        self.wait()
        checkpoint = self.newest_intact()[0] if self._ranks.is_main else None
        return collectives.broadcast(checkpoint, self._ranks)
