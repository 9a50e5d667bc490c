"""Handle steps with a NaN or infinite loss or gradient, which the device skips.

A step does not wait for the device (step.py); its flag is read at the log points, where the run
waits anyway. Then the policy decides: continue (`skip`), restore the last checkpoint and continue
after the offending images (`rollback`), or end (`stop`). Many consecutive bad steps end every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssdctl.errors import NonFiniteError

MAX_CONSECUTIVE = 20
MAX_ROLLBACKS = 10


class BadStep(NamedTuple):
    """A skipped step."""

    step: int
    image_ids: list[int]  # of this rank


class NonFiniteGuard:
    """Tracks the bad steps of a run.

    Args:
        policy: `skip`, `rollback` or `stop`.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._watched: list[tuple[BadStep, Tensor]] = []
        self._consecutive = 0
        self._rollbacks = 0

    def watch(self, step: int, is_bad: Tensor, image_ids: list[int]) -> None:
        """Record a step's flag without waiting for it."""
        self._watched.append((BadStep(step, image_ids), is_bad))

    def check(self) -> list[BadStep]:
        """Return the steps that were skipped since the last check; waits for the device."""
        if not self._watched:
            return []
        flags = torch.stack([flag for _, flag in self._watched]).tolist()
        bad = []
        for (step, _), flag in zip(self._watched, flags, strict=True):
            self._consecutive = self._consecutive + 1 if flag else 0
            if flag:
                bad.append(step)
        self._watched.clear()
        return bad

    def should_roll_back(self, bad: list[BadStep], where: str) -> bool:
        """Return whether to roll back.

        Args:
            bad: The result of `check`.
            where: The folder with the images' ids, for the message.

        Raises:
            NonFiniteError: The policy is `stop`, or there were too many bad steps or rollbacks.
        """
        if not bad:
            return False
        self._rollbacks += self.policy == "rollback"
        has_diverged = self._consecutive >= MAX_CONSECUTIVE or self._rollbacks > MAX_ROLLBACKS
        if self.policy == "stop" or has_diverged:
            raise NonFiniteError(
                f"step {bad[0].step}: the loss or a gradient is NaN or infinite "
                f"({len(bad)} such steps up to step {bad[-1].step}); their images are in {where}",
                hint="they changed no weight: lower --lr, lengthen --warmup or set "
                "--clip-grad, and resume from the last checkpoint with --resume-changed",
            )
        return self.policy == "rollback"
