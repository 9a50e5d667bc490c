"""The guard against NaN: bad steps are left out on the device, and named when the log waits.

The step itself never waits (step.py); its flag is read at the log points, where the run waits for
the device anyway. What follows is the policy's: go on (`skip`), go back to the last checkpoint past
the offending images (`rollback`), or end (`stop`). Bad steps one after the other end every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssdctl.errors import NonFiniteError

MOST_IN_A_ROW = 20
MOST_ROLLBACKS = 10


class BadStep(NamedTuple):
    """A step that was left out."""

    step: int
    image_ids: list[int]  # of this rank's share


class NonFiniteGuard:
    """Watches the flags of a run's steps.

    Args:
        policy: `skip`, `rollback` or `stop`.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._watched: list[tuple[BadStep, Tensor]] = []
        self._in_a_row = 0
        self._rollbacks = 0

    def watch(self, step: int, is_bad: Tensor, image_ids: list[int]) -> None:
        """Note a step's flag, without waiting for it."""
        self._watched.append((BadStep(step, image_ids), is_bad))

    def check(self) -> list[BadStep]:
        """The steps that were left out since the last check; waits for the device."""
        if not self._watched:
            return []
        flags = torch.stack([flag for _, flag in self._watched]).tolist()
        bad = []
        for (step, _), flag in zip(self._watched, flags, strict=True):
            self._in_a_row = self._in_a_row + 1 if flag else 0
            if flag:
                bad.append(step)
        self._watched.clear()
        return bad

    def should_roll_back(self, bad: list[BadStep], where: str) -> bool:
        """Whether to roll back; the policy's end of the run is raised.

        Args:
            bad: What `check` returned.
            where: The folder that names the images, for the message.

        Raises:
            NonFiniteError: The policy is `stop`, or there were too many bad steps or rollbacks.
        """
        if not bad:
            return False
        self._rollbacks += self.policy == "rollback"
        is_hopeless = self._in_a_row >= MOST_IN_A_ROW or self._rollbacks > MOST_ROLLBACKS
        if self.policy == "stop" or is_hopeless:
            raise NonFiniteError(
                f"step {bad[0].step}: the loss or a gradient is NaN or infinite "
                f"({len(bad)} such steps up to step {bad[-1].step}); their images are in {where}",
                hint="no weight was moved by them: lower --lr, lengthen --warmup or set "
                "--clip-grad, and go on from the last checkpoint with --resume-changed",
            )
        return self.policy == "rollback"
