"""The guard against NaN: bad steps are left out on the device and counted there.

The step itself never waits; the count is read where the log waits for the device anyway. A run
whose steps are bad one after the other has gone wrong for good, and stops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssdctl.errors import NonFiniteError
from ssdctl.train.step import StepResult

MOST_IN_A_ROW = 20


class Guard:
    """Counts the steps that were left out.

    Args:
        policy: `skip` goes on after a bad step, `stop` ends the run at the next log point.
        place: The device of the steps' results.
    """

    def __init__(self, policy: str, place: torch.device) -> None:
        self._policy = policy
        self._total = torch.zeros((), device=place)
        self._in_a_row = torch.zeros((), device=place)
        self._longest = torch.zeros((), device=place)
        self._known = 0

    def watch(self, result: StepResult) -> None:
        """Count a step, without waiting for it."""
        bad: Tensor = result.is_bad
        self._total += bad
        self._in_a_row = (self._in_a_row + bad) * bad
        self._longest = torch.maximum(self._longest, self._in_a_row)

    def check(self, step: int) -> int:
        """How many steps were left out since the last check; waits for the device.

        Raises:
            NonFiniteError: The policy is `stop`, or too many came in a row.
        """
        total, longest = (int(v) for v in torch.stack([self._total, self._longest]).tolist())
        new, self._known = total - self._known, total
        if new and (self._policy == "stop" or longest >= MOST_IN_A_ROW):
            raise NonFiniteError(
                f"{new} steps up to step {step} had a loss or gradient that is NaN or infinite; "
                "the weights were not moved by them",
                hint="lower --lr, lengthen --warmup or set --clip-grad; the last checkpoint is "
                "good, and --resume auto goes on from it",
            )
        return new
