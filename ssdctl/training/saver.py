"""When a run is saved, where, and in which thread."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks
from ssdctl.training.schedule import every

if TYPE_CHECKING:
    from ssdctl.checkpoint import Checkpoint
    from ssdctl.training.run import SettledRun

log = logging.getLogger(__name__)


class Saver(CheckpointFolder):
    """Writes the checkpoints of a run in a thread, on the first rank; all ranks call it alike."""

    def __init__(self, run: SettledRun, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(run.out, run.config.train.keep)
        self._every = every(run.config.train.save_every, run.plan)
        self._since = time.monotonic()  # the last save, or the last time that one was due
        self.saved_step: int | None = None

    def start(self, step: int, checkpoint: Checkpoint | None) -> None:
        is_own = checkpoint is not None and checkpoint.path.parent == self.path
        self.saved_step = step if checkpoint and is_own and step == checkpoint.step else None
        if self._ranks.is_main:
            self.clean()
            for path in self.continue_from(step):
                text = "%s: the next save sets it aside, the run continues from step %d"
                log.warning(text, path.name, step)

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

    def save(self, state: dict[str, Any]) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        if self._ranks.is_main:
            super().save(state)
        self.saved_step, self._since = state["step"], time.monotonic()

    def newest(self) -> Checkpoint | None:
        self.wait()
        checkpoint = self.newest_intact()[0] if self._ranks.is_main else None
        return collectives.broadcast(checkpoint, self._ranks)
