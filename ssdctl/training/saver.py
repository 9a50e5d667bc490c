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
    from ssdctl.checkpoint.reader import Checkpoint
    from ssdctl.training.run import SettledRun

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run in a thread, on the first rank.

    Args:
        run: The run.
        ranks: All of them call the same methods.
    """

    def __init__(self, run: SettledRun, ranks: Ranks) -> None:
        self._ranks = ranks
        self._folder = CheckpointFolder(run.out, run.config.train.keep)
        self._every = every(run.config.train.save_every, run.plan)
        self._since = time.monotonic()  # the last save, or the last time that one was due
        self.saved_step: int | None = None

    def start(self, step: int, checkpoint: Checkpoint | None) -> None:
        """Continue from a step.

        Args:
            step: The position of the run.
            checkpoint: That it continues from, of this run or of another one.
        """
        is_own = checkpoint is not None and checkpoint.path.parent == self._folder.path
        self.saved_step = step if checkpoint and is_own and step == checkpoint.step else None
        if self._ranks.is_main:
            self._folder.clean()
            for path in self._folder.continue_from(step):
                log.warning(
                    "%s: the next save sets it aside, the run continues from step %d",
                    path.name,
                    step,
                )

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
            self._folder.save(state)
        self.saved_step, self._since = state["step"], time.monotonic()

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of a step as the best."""
        self._folder.mark_best(step)

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, on all ranks."""
        self._folder.wait()
        checkpoint = self._folder.newest_intact()[0] if self._ranks.is_main else None
        return collectives.broadcast(checkpoint, self._ranks)

    def check(self) -> None:
        """Raise the DiskError of the last save, if it failed. Does not wait."""
        self._folder.check()

    def wait(self) -> None:
        """Wait for the save in progress.

        Raises:
            DiskError: It could not be written.
        """
        self._folder.wait()

    def close(self) -> None:
        """Finish the save in progress, ignoring its error: for a run that ends by another one."""
        self._folder.close()
